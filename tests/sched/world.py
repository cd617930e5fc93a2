"""What a scheduler's batches would do to a cache: a memory that knows who wrote each slot.

Tables are kept per row as an engine's ranks keep them, from the updates alone. Every query then reads all
keys it may see, and every step the states it goes on from: a wrong table, a block held twice or a position
computed twice shows at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from rayk.kv.specs import KVCacheSpec, Mamba2Spec
from rayk.types.batch import Rollback, ScheduledBatch, ScheduledRequest
from rayk.types.request import FinishReason, Request
from tests.kv.brute import full, sliding

BLOCK = 4
WINDOW = 6
WINDOWS = (None, WINDOW)
"""Of the groups of attention, which come first."""
STATE_BLOCKS = (3, 1000)
"""Tokens per block of the groups of states: smaller than a chunk, and longer than any sequence."""
EOS = 0
STOP = 1

Slot = tuple[int, int, int]
"""(group, block, slot in the block)"""


def state(block_size: int) -> Mamba2Spec:
    """A small recurrent state."""
    return Mamba2Spec(
        block_size, "float32", conv_width=2, num_heads=2, head_size=2, num_groups=1, state_size=2
    )


def one_layer_each(*specs: KVCacheSpec) -> tuple[KVCacheGroup, ...]:
    """A group per spec, its block size as it is."""
    return tuple(KVCacheGroup(i, spec, (i,), 1) for i, spec in enumerate(specs))


GROUPS = one_layer_each(full(BLOCK), sliding(WINDOW), *(state(size) for size in STATE_BLOCKS))


def sampled_token(request_id: str, position: int) -> int:
    """What the model says at a position: any function of both; now and then a stop token."""
    return (int(request_id) * 7919 + position * 104729 + position**3) % 11


def expected_output(request: Request, max_positions: int) -> tuple[list[int], FinishReason]:
    """A request's whole output, from the definition of its sampling parameters."""
    sampling, output = request.sampling, []
    while True:
        position = len(request.prompt_token_ids) + len(output) - 1
        output.append(sampled_token(request.request_id, position))
        is_eos = output[-1] == EOS and not sampling.ignore_eos
        if is_eos or output[-1] in sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens or position + 2 == max_positions:
            return output, FinishReason.LENGTH


class World:
    """The memory, the rows' tables, and what is known of every request's progress."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.memory: dict[Slot, tuple[str, int, int]] = {}
        self.rows: dict[int, list[list[int]]] = {}
        self.num_computed: dict[str, int] = {}
        """Tokens of each request whose KV exists; absent or 0 after a preemption."""
        self.prompt_computed: dict[str, Counter[int]] = {}
        """How often each prompt token of each request was computed, here and elsewhere."""
        self.last_steps: dict[int, ScheduledRequest] = {}
        """What each row computed last."""

    def prefill(self, request: Request, num_tokens: int) -> None:
        """Another engine's KV of the live rows arrives in the request's blocks."""
        tables = self.manager.block_tables(request.request_id)
        for group, window in enumerate(WINDOWS):
            start = 0 if window is None else max(0, num_tokens + 1 - window)
            for position in range(start, num_tokens):
                block = tables[group][position // BLOCK]
                assert block != 0, "a live row has a block"
                written = (request.request_id, position, request.prompt_token_ids[position])
                self.memory[group, block, position % BLOCK] = written
        last = num_tokens - 1
        for group, size in enumerate(STATE_BLOCKS, start=len(WINDOWS)):
            block = tables[group][last // size]
            assert block != 0, "the last token's state has a block"
            self.memory[group, block, 0] = (request.request_id, last, request.prompt_token_ids[last])
        self.num_computed[request.request_id] = num_tokens
        self.prompt_computed[request.request_id] = Counter(range(num_tokens))

    def run(self, batch: ScheduledBatch) -> dict[str, int]:
        """Carry out a step: tables, writes, then reads; the sampled tokens."""
        for share in batch.requests:
            self._update_tables(share)
            self._read_states(share)
        for share in batch.requests:
            self._write(share)
        for share in batch.requests:
            for position in self._positions(share)[: len(share.token_ids) - self._num_vain(share)]:
                self._read(share, position)
            self.num_computed[share.request_id] -= self._num_vain(share)
        return {
            share.request_id: sampled_token(share.request_id, self._positions(share)[-1])
            for share in batch.requests
            if share.needs_logits and not share.num_drafts
        }

    @staticmethod
    def accepted(batch: ScheduledBatch) -> dict[str, list[int]]:
        """What the model makes of drafts: its tokens up to the first that was not proposed."""
        found = {}
        for share in (r for r in batch.requests if r.num_drafts):
            last = share.num_computed_tokens + len(share.token_ids) - share.num_drafts - 1
            drafts = share.token_ids[len(share.token_ids) - share.num_drafts :]
            tokens = [sampled_token(share.request_id, last)]
            for position, draft in enumerate(drafts, start=last + 1):
                if tokens[-1] != draft:
                    break
                tokens.append(sampled_token(share.request_id, position))
            found[share.request_id] = tokens
        return found

    def _num_vain(self, share: ScheduledRequest) -> int:
        """How many of its last tokens the model did not agree to."""
        if not share.num_drafts:
            return 0
        accepted = self.accepted(ScheduledBatch(step=0, requests=(share,)))
        return 1 + share.num_drafts - len(accepted[share.request_id])

    def roll_back(self, rollbacks: Sequence[Rollback]) -> None:
        """Bring the states of these rows back to those after so many tokens of their last steps."""
        for row, num_kept in rollbacks:
            share = self.last_steps[row]
            positions = self._positions(share)
            assert 1 <= num_kept < len(positions), "there is nothing to roll back"
            last = num_kept - 1
            for group, size in enumerate(STATE_BLOCKS, start=len(WINDOWS)):
                column = positions[last] // size
                block = self.rows[row][group][column]
                # What the step left in that block, perhaps before it went on to others.
                at = min(positions[-1], (column + 1) * size - 1) - positions[0]
                was = (share.request_id, positions[at], share.token_ids[at])
                assert self.memory[group, block, 0] == was, "the state is another one already"
                self.memory[group, block, 0] = (share.request_id, positions[last], share.token_ids[last])

    def _update_tables(self, share: ScheduledRequest) -> None:
        tables = self.rows.setdefault(share.row, [[] for _ in GROUPS])
        for table, (start, ids) in zip(tables, share.new_block_ids, strict=True):
            assert start <= len(table), "a table has a hole"
            table[start : start + len(ids)] = ids
        for table, theirs in zip(tables, self.manager.block_tables(share.request_id), strict=True):
            # Blocks out of the window may be null with the manager and stale on the ranks.
            assert all(a == b for a, b in zip(table, theirs, strict=False) if b != 0)
            assert len(table) >= len(theirs)

    def _write(self, share: ScheduledRequest) -> None:
        positions = self._positions(share)
        known = self.num_computed.get(share.request_id, 0)
        assert share.num_computed_tokens == known, "a position is computed twice or left out"
        for group, g in enumerate(GROUPS):
            size = g.spec.block_size
            for position, token in zip(positions, share.token_ids, strict=True):
                block = self.rows[share.row][group][position // size]
                assert block != 0, "tokens are written into blocks that exist"
                slot = position % size if group < len(WINDOWS) else 0
                self.memory[group, block, slot] = (share.request_id, position, token)
        self.num_computed[share.request_id] = positions[-1] + 1
        self.last_steps[share.row] = share
        self.prompt_computed.setdefault(share.request_id, Counter()).update(positions)

    def num_recomputed(self, request: Request) -> int:
        """Prompt tokens' computations but the first of each."""
        counts = self.prompt_computed[request.request_id]
        return sum(counts[p] - 1 for p in range(len(request.prompt_token_ids)))

    def _read_states(self, share: ScheduledRequest) -> None:
        """A step goes on from the state after the token before its first, unless that is the very first."""
        last = share.num_computed_tokens - 1
        if last < 0:
            return
        for group, size in enumerate(STATE_BLOCKS, start=len(WINDOWS)):
            block = self.rows[share.row][group][last // size]
            table = self.manager.block_tables(share.request_id)[group]
            assert block == table[last // size] != 0, "the state lies in a block that was freed"
            found = self.memory.get((group, block, 0))
            assert found is not None, f"{share.request_id}: no state was ever written"
            assert found[:2] == (share.request_id, last), f"not the state after token {last}: {found}"

    def _read(self, share: ScheduledRequest, query: int) -> None:
        tables = self.manager.block_tables(share.request_id)
        for group, window in enumerate(WINDOWS):
            start = 0 if window is None else max(0, query + 1 - window)
            for key in range(start, query + 1):
                block = self.rows[share.row][group][key // BLOCK]
                assert block == tables[group][key // BLOCK], f"token {key} lies in a block that was freed"
                found = self.memory.get((group, block, key % BLOCK))
                assert found is not None, f"{share.request_id}: token {key} was never written"
                assert found[:2] == (share.request_id, key), f"token {key} is overwritten: {found}"
                is_generated = 0 <= found[2] < 100
                told = sampled_token(share.request_id, key - 1) if is_generated else found[2]
                assert found[2] == told, f"token {key} is not the request's: {found}"

    @staticmethod
    def _positions(share: ScheduledRequest) -> range:
        return range(share.num_computed_tokens, share.num_computed_tokens + len(share.token_ids))
