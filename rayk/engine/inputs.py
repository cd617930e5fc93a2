"""Turn a scheduled batch into the tensors of a forward pass, on the host. Block tables persist between steps.
Legend: R requests of the batch, T packed tokens, B kernel blocks, S segments."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from rayk.attention.metadata import CommonAttentionMetadata, TokenShardMetadata
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.kv.riders import of_groups
from rayk.kv.scratch import StateScratch
from rayk.parallel.shard import WHOLE, TokenShard
from rayk.types.batch import UNKNOWN_TOKEN, ScheduledBatch

# of a KV group: by tokens for attention, by segments for recurrent states
GroupMetadata = CommonAttentionMetadata | Segments


class BlockTables(NamedTuple):
    """The blocks of every row of one KV group."""

    ids: np.ndarray  # int32 [max_seqs, blocks of the longest request]
    block_size: int  # tokens of a block, for attention of a kernel's
    is_state: bool = False  # a block has one recurrent state


@dataclass(frozen=True)
class ModelInputs:
    """One step's tensors. Filled by InputBuilder, moved to the device by HostBuffers."""

    token_ids: torch.Tensor  # int64 [T]; -1 - row for a token that the row's last step samples
    positions: torch.Tensor  # int64 [T]
    logits_index: torch.Tensor  # int64 [tokens whose logits are sampled]: their packed index
    metadata: tuple[GroupMetadata, ...]  # per KV group
    logits_index_host: np.ndarray  # `logits_index`, which stays on the host
    sampled_rows: torch.Tensor  # int64 [tokens whose logits are sampled]: the rows of their requests
    num_unknown: int = 0  # negative `token_ids`
    # int64: packed index of every token of the batch's `prompt_logits`
    prompt_index: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """Holds what all KV groups see of a step; `starts` and `seq_lens` also as tensors, which groups share."""

    rows: np.ndarray  # [R] int64, each request's row of the block tables
    computed: np.ndarray  # [R] int64, tokens before this step
    seq_lens: np.ndarray  # [R] int32, tokens after this step
    starts: np.ndarray  # [R + 1] int32, where each request's tokens start among the packed ones
    last_tokens: np.ndarray  # [R] int64, the packed index of each request's last token
    request_of: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    shared_starts: torch.Tensor
    shared_seq_lens: torch.Tensor
    host_starts: tuple[int, ...]
    host_seq_lens: tuple[int, ...]
    max_query_len: int  # most tokens of one request
    drafts: np.ndarray | None  # [R] int64, the drafts of each request; None where nobody has any


@dataclass(frozen=True, kw_only=True, slots=True)
class _Packing:
    """How a step's tokens lie, whatever they are. Arrays are as in _Step, and read only."""

    counts: np.ndarray  # [R] int64, tokens of each request
    starts: np.ndarray
    last_tokens: np.ndarray
    request_of: np.ndarray
    offsets: np.ndarray  # [T] int64, from the first token of the request
    shared_starts: torch.Tensor
    host_starts: tuple[int, ...]


def _pack(counts: Sequence[int]) -> _Packing:
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    request_of = np.repeat(np.arange(len(counts)), counts)
    return _Packing(
        counts=np.array(counts, dtype=np.int64),
        starts=starts,
        last_tokens=starts[1:].astype(np.int64) - 1,
        request_of=request_of,
        offsets=np.arange(len(request_of)) - starts[request_of],
        shared_starts=_tensor(starts),
        host_starts=tuple(starts.tolist()),
    )


@cache
def _one_token_each(num_requests: int) -> _Packing:
    """Return the packing of a decode step, which is made once."""
    return _pack((1,) * num_requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cuts:
    """A step's segments where blocks of states have one size. Groups share them: only slots differ."""

    rows: np.ndarray  # [S] int64, the row of the block tables of each segment's request
    blocks: np.ndarray  # [S] int64, the column in which it ends
    # [S] int64: after how many drafts it ends, if its state goes to the scratch, else -1; None: to blocks all
    kept: np.ndarray | None
    # [R] int64, the column of each request's state before this step; 0 where it has none
    last_blocks: np.ndarray
    shared_starts: torch.Tensor
    shared_ends: torch.Tensor
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    longest_run: int  # see Segments


class InputBuilder:
    """Keeps the block tables of every row and builds a step's inputs from the scheduler's deltas."""

    def __init__(
        self,
        geometry: RankGeometry,
        *,
        max_seqs: int,
        max_positions: int,
        scratch: StateScratch | None = None,
    ) -> None:
        self._groups = geometry.groups
        self._kv_groups = tuple(g.group for g in geometry.groups)
        self._scratch = scratch
        # of each KV group, the tokens that get slots here; also what digests take a rank's rows for
        self.tokens: tuple[TokenShard, ...] = tuple(g.tokens for g in geometry.groups)
        self._tables = [np.zeros((max_seqs, _table_width(g, max_positions)), np.int32) for g in self._groups]

    @property
    def tables(self) -> tuple[BlockTables, ...]:
        """List the block tables of each KV group, which steps change in place."""
        return tuple(
            BlockTables(table, g.block_size if _is_state(g) else g.kernel_block_size, _is_state(g))
            for g, table in zip(self._groups, self._tables, strict=True)
        )

    def build(self, batch: ScheduledBatch, only: Collection[int] | None = None) -> ModelInputs:
        """Apply the batch's table updates and return its tensors. `only`: the KV groups that get metadata;
        None: all."""
        self.update_tables(batch)
        step = self._step(batch)
        token_ids = np.array([t for r in batch.requests for t in r.token_ids], dtype=np.int64)
        num_unknown = 0
        if token_ids.min() < 0:
            unknown = np.flatnonzero(token_ids == UNKNOWN_TOKEN)
            token_ids[unknown] = -1 - step.rows[step.request_of[unknown]]
            num_unknown = len(unknown)
        logits_index, sampled_rows = step.last_tokens, step.rows
        if step.max_query_len > 1 and any(r.num_drafts for r in batch.requests):
            counts = np.array([r.num_logits for r in batch.requests])
            logits_index = last_ones(step.last_tokens, counts)
            sampled_rows = np.repeat(step.rows, counts)
        elif not all(r.needs_logits for r in batch.requests):
            needs = np.array([r.needs_logits for r in batch.requests], dtype=bool)
            logits_index, sampled_rows = logits_index[needs], sampled_rows[needs]
        parts = [
            (g, tokens, table)
            for g, tokens, table in zip(self._groups, self.tokens, self._tables, strict=True)
            if only is None or g.group.index in only
        ]
        sizes = {g.block_size for g, _, _ in parts if _is_state(g)}
        cuts = {size: self._cuts(size, step) for size in sizes}
        return ModelInputs(
            token_ids=_tensor(token_ids),
            positions=_tensor(step.positions),
            logits_index=_tensor(logits_index),
            logits_index_host=logits_index,
            sampled_rows=_tensor(sampled_rows),
            num_unknown=num_unknown,
            prompt_index=self._prompt_index(batch, step.starts),
            metadata=tuple(
                self._segments(g.group.index, table, step, cuts[g.block_size])
                if _is_state(g)
                else self._attention(g, table, step)
                if tokens == WHOLE
                else self._token_shard(g, tokens, table, step)
                for g, tokens, table in parts
            ),
        )

    def _step(self, batch: ScheduledBatch) -> _Step:
        rows = np.array([r.row for r in batch.requests], dtype=np.int64)
        computed = np.array([r.num_computed_tokens for r in batch.requests], dtype=np.int64)
        counts = tuple(len(r.token_ids) for r in batch.requests)
        most = max(counts)
        packed = _one_token_each(len(rows)) if most == 1 else _pack(counts)
        positions = computed if most == 1 else computed[packed.request_of] + packed.offsets
        seq_lens = (computed + packed.counts).astype(np.int32)
        return _Step(
            rows=rows,
            computed=computed,
            seq_lens=seq_lens,
            starts=packed.starts,
            last_tokens=packed.last_tokens,
            request_of=packed.request_of,
            positions=positions,
            shared_starts=packed.shared_starts,
            shared_seq_lens=_tensor(seq_lens),
            host_starts=packed.host_starts,
            host_seq_lens=tuple(seq_lens.tolist()),
            max_query_len=most,
            drafts=None if most == 1 else _drafts(batch),
        )

    def _prompt_index(self, batch: ScheduledBatch, starts: np.ndarray) -> torch.Tensor | None:
        if not any(r.prompt_logits[1] for r in batch.requests):
            return None
        ranges = [
            np.arange(begin + r.prompt_logits[0], begin + r.prompt_logits[1])
            for r, begin in zip(batch.requests, starts.tolist(), strict=False)
            if r.prompt_logits[1]
        ]
        return _tensor(np.concatenate(ranges))

    def update_tables(self, batch: ScheduledBatch) -> None:
        """Put the batch's new blocks in."""
        for request in batch.requests:
            updates = request.new_block_ids
            if len(updates) < len(self._kv_groups):  # those that ride have none of their own
                updates = of_groups(self._kv_groups, updates)
            for g, table, (start, ids) in zip(self._groups, self._tables, updates, strict=True):
                if ids:
                    kernel_ids = to_kernel_blocks(ids, g.kernel_blocks_per_block)
                    at = start * g.kernel_blocks_per_block
                    table[request.row, at : at + len(kernel_ids)] = kernel_ids

    def _attention(self, group: GroupGeometry, table: np.ndarray, step: _Step) -> CommonAttentionMetadata:
        size = group.kernel_block_size
        longest = max(step.host_seq_lens)
        block_table = table[step.rows, : -(-longest // size)]
        columns, slots = np.divmod(step.positions, size)
        blocks = block_table[step.request_of, columns].astype(np.int64)
        return CommonAttentionMetadata(
            query_start_loc=step.shared_starts,
            seq_lens=step.shared_seq_lens,
            block_table=_tensor(block_table),
            slot_mapping=_tensor(blocks * size + slots),
            block_size=size,
            num_tokens=len(step.positions),
            max_query_len=step.max_query_len,
            max_seq_len=longest,
            query_start_loc_cpu=step.host_starts,
            seq_lens_cpu=step.host_seq_lens,
        )

    def _token_shard(
        self, group: GroupGeometry, tokens: TokenShard, table: np.ndarray, step: _Step
    ) -> TokenShardMetadata:
        """Address the rows of a rank that holds some tokens, which lie in their order."""
        size = group.kernel_block_size
        longest = max(step.host_seq_lens)
        block_table = table[step.rows, : max(1, -(-tokens.count(longest) // size))]
        held = tokens.holds(step.positions)
        columns, slots = np.divmod(np.where(held, tokens.local(step.positions), 0), size)
        blocks = block_table[step.request_of, columns].astype(np.int64)
        ends = tokens.count(step.positions + 1).astype(np.int32)
        return TokenShardMetadata(
            query_start_loc=step.shared_starts,
            seq_lens=step.shared_seq_lens,
            block_table=_tensor(block_table),
            slot_mapping=_tensor(np.where(held, blocks * size + slots, -1)),
            block_size=size,
            num_tokens=len(step.positions),
            max_query_len=step.max_query_len,
            max_seq_len=longest,
            query_start_loc_cpu=step.host_starts,
            seq_lens_cpu=step.host_seq_lens,
            key_rows=_tensor(step.request_of.astype(np.int32)),
            key_starts=_tensor(np.zeros_like(ends)),
            key_ends=_tensor(ends),
            tokens=tokens,
            positions_cpu=step.positions,
        )

    def _cuts(self, size: int, step: _Step) -> _Cuts:
        """Cut a segment per block that the step touches: each block ends up with the state at its last
        token."""
        if step.drafts is not None:
            return _draft_cuts(size, step, step.drafts)
        first = step.computed // size
        counts = (step.seq_lens - 1) // size - first + 1
        segment_starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=segment_starts[1:])
        request_of = np.repeat(np.arange(len(counts)), counts)
        blocks = first[request_of] + np.arange(len(request_of)) - segment_starts[request_of]
        end_positions = np.minimum((blocks + 1) * size, step.seq_lens[request_of])
        ends = ((step.starts[:-1] - step.computed)[request_of] + end_positions).astype(np.int32)
        return _Cuts(
            rows=step.rows[request_of],
            blocks=blocks,
            kept=None,
            last_blocks=np.maximum(step.computed - 1, 0) // size,
            shared_starts=_tensor(segment_starts),
            shared_ends=_tensor(ends),
            starts=tuple(segment_starts.tolist()),
            ends=tuple(ends.tolist()),
            longest_run=_longest_run(step, counts),
        )

    def _segments(self, group: int, table: np.ndarray, step: _Step, cuts: _Cuts) -> Segments:
        writes = table[cuts.rows, cuts.blocks].astype(np.int64)
        if cuts.kept is not None:
            assert self._scratch is not None, "an engine that speculates has a scratch for states"
            drafts = np.flatnonzero(cuts.kept >= 0)
            writes[drafts] = self._scratch.blocks(group, cuts.rows[drafts], cuts.kept[drafts])
        found = table[step.rows, cuts.last_blocks]
        reads = np.where(step.computed > 0, found, NO_SLOT).astype(np.int64)
        assert not np.any(writes == NULL_BLOCK), "a state is to be kept in a block that nobody gave"
        assert not np.any(reads == NULL_BLOCK), "a state is to be read from a block that nobody gave"
        return Segments(
            query_start_loc=step.shared_starts,
            read_slots=_tensor(reads),
            segment_start_loc=cuts.shared_starts,
            segment_ends=cuts.shared_ends,
            write_slots=_tensor(writes),
            query_start_loc_cpu=step.host_starts,
            segment_start_loc_cpu=cuts.starts,
            segment_ends_cpu=cuts.ends,
            max_query_len=step.max_query_len,
            longest_run=cuts.longest_run,
        )


def _drafts(batch: ScheduledBatch) -> np.ndarray | None:
    """Count each request's drafts, int64 [R]; None if nobody has any."""
    drafted = [r for r in batch.requests if r.num_drafts]
    if not drafted:
        return None
    for r in drafted:
        assert r.needs_logits, "drafts are there to be judged"
        assert r.num_drafts < len(r.token_ids), "drafts follow a token that is known"
        assert UNKNOWN_TOKEN not in r.token_ids[-r.num_drafts :], "drafts are known when a step begins"
    return np.array([r.num_drafts for r in batch.requests], dtype=np.int64)


def _draft_cuts(size: int, step: _Step, drafts: np.ndarray) -> _Cuts:
    """Cut a step in which some requests have drafts: their last known token and each draft end a segment,
    too. What is no block's last state goes to the scratch."""
    counts = np.diff(step.starts)
    # How many drafts a token has behind it: 0 for a request's last known one, less for those before.
    behind = np.arange(len(step.positions)) - (step.last_tokens - drafts)[step.request_of]
    is_kept = (step.positions + 1) % size == 0
    is_kept[step.last_tokens] = True
    is_end = is_kept | ((behind >= 0) & (drafts > 0)[step.request_of])
    tokens = np.flatnonzero(is_end)
    request_of = step.request_of[tokens]
    num_segments = np.bincount(request_of, minlength=len(counts))
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(num_segments, out=starts[1:])
    ends = (tokens + 1).astype(np.int32)
    return _Cuts(
        rows=step.rows[request_of],
        blocks=step.positions[tokens] // size,
        kept=np.where(is_kept[tokens], -1, behind[tokens]),
        last_blocks=np.maximum(step.computed - 1, 0) // size,
        shared_starts=_tensor(starts),
        shared_ends=_tensor(ends),
        starts=tuple(starts.tolist()),
        ends=tuple(ends.tolist()),
        longest_run=_longest_run(step, num_segments),
    )


def _longest_run(step: _Step, num_segments: np.ndarray) -> int:
    if step.max_query_len == 1:
        return 0
    counts = np.diff(step.starts)
    return int(counts[counts != num_segments].max(initial=0))


def last_ones(last_tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """List packed indices, int64: of each request the last `counts` tokens, given its very last one [R]."""
    ends = np.cumsum(counts)
    return np.repeat(last_tokens + 1 - ends, counts) + np.arange(ends[-1])


def to_kernel_blocks(block_ids: tuple[int, ...] | list[int], ratio: int) -> np.ndarray:
    """Turn manager block id b into kernel blocks b * ratio .. b * ratio + ratio - 1. The null block's are
    null, too: they are never handed out."""
    ids = np.asarray(block_ids, dtype=np.int32)
    return (ids[:, None] * ratio + np.arange(ratio, dtype=np.int32)).reshape(-1)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _is_state(group: GroupGeometry) -> bool:
    return not group.group.spec.has_token_rows


def _table_width(group: GroupGeometry, max_positions: int) -> int:
    """Count the kernel blocks of a row: those of the longest sequence, whose last block is whole."""
    ratio = group.kernel_blocks_per_block
    return -(-max_positions // group.block_size) * ratio
