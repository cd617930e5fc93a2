"""What a rank of an engine holds: units x tokens x layers.

Units are anything that is divided over tensor-parallel ranks: KV heads, query heads, weight rows. A shard of
them is a tuple of global unit ids, not a range. Tokens of a sequence are dealt over ranks that hold the same
units (decode context parallel), and layers over stages (pipeline parallel). Cutting weights, laying out
pages and planning transfers all use these functions. Free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def shard_units(num_units: int, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    """List the units of one rank if each rank needs an equal share.

    Contiguous shares if `tp_size` divides `num_units`; replicas (rank r holds unit r * num_units // tp_size)
    if `num_units` divides `tp_size`; otherwise raises Unsupported.
    """
    assert 0 <= tp_rank < tp_size, (tp_rank, tp_size)
    if num_units % tp_size == 0:
        share = num_units // tp_size
        return tuple(range(tp_rank * share, (tp_rank + 1) * share))
    if tp_size % num_units == 0:
        return (tp_rank * num_units // tp_size,)
    raise Unsupported(f"{num_units} units cannot be shared by TP {tp_size}: neither divides the other")


def shard_range(size: int, tp_size: int, tp_rank: int) -> range:
    """Return a rank's contiguous share of `size` rows; shares differ by at most one (MLP, vocabulary)."""
    assert 0 <= tp_rank < tp_size, (tp_rank, tp_size)
    return range(size * tp_rank // tp_size, size * (tp_rank + 1) // tp_size)


def query_heads(
    num_query_heads: int, tp_size: int, tp_rank: int, what: str = "query heads"
) -> tuple[int, ...]:
    """List the query heads of one rank. Raises Unsupported unless `tp_size` divides them."""
    if num_query_heads % tp_size:
        raise Unsupported(f"TP {tp_size} does not divide the model's {num_query_heads} {what}")
    return shard_units(num_query_heads, tp_size, tp_rank)


@lru_cache(maxsize=4096)
def kv_heads(
    num_query_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int, what: str = "query heads"
) -> tuple[int, ...]:
    """KV heads that one rank's query heads attend to, ascending (replicated if ranks share one).

    It also divides the heads of a recurrent state and the groups of B and C, or the key heads, that they
    share; `what` names the former.
    """
    assert num_query_heads % num_kv_heads == 0, (num_query_heads, num_kv_heads)
    groups = num_query_heads // num_kv_heads
    return tuple(sorted({q // groups for q in query_heads(num_query_heads, tp_size, tp_rank, what)}))


def kv_index(num_query_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    """Find for each query head of the rank the slot of its KV head among the rank's KV heads."""
    groups = num_query_heads // num_kv_heads
    slots = {h: i for i, h in enumerate(kv_heads(num_query_heads, num_kv_heads, tp_size, tp_rank))}
    return tuple(slots[q // groups] for q in query_heads(num_query_heads, tp_size, tp_rank))


def dcp_sizes(num_query_heads: int, num_kv_heads: int, tp_size: int) -> tuple[int, ...]:
    """List the sizes over which tokens can be dealt, ascending, 1 first: those at which every aligned run of
    so many tensor-parallel ranks holds the same KV heads (a latent cache has one). Raises Unsupported unless
    `tp_size` divides the query heads."""
    held = [kv_heads(num_query_heads, num_kv_heads, tp_size, rank) for rank in range(tp_size)]
    return tuple(
        size
        for size in range(1, tp_size + 1)
        if tp_size % size == 0 and all(held[rank] == held[rank - rank % size] for rank in range(tp_size))
    )


class TokenShard(Protocol):
    """Which tokens of a sequence a rank holds; positions are absolute, int64 arrays.

    It repeats every `period` positions, and a block id covers a multiple of that, so that a token's row in a
    block follows from its position alone. Hashable and picklable.
    """

    def __hash__(self) -> int: ...

    @property
    def period(self) -> int: ...

    def rows(self, block_tokens: int) -> Ints:
        """List the held rows of any block of so many tokens, ascending, by asking each for its owner."""
        ...

    def holds(self, positions: Ints) -> Bools: ...

    def local(self, positions: Ints) -> Ints:
        """Count the held positions before each of these, all of which are held, by a closed formula."""
        ...

    def positions(self, local: Ints) -> Ints:
        """Return the inverse of `local`."""
        ...

    @overload
    def count(self, num_tokens: int) -> int: ...
    @overload
    def count(self, num_tokens: Ints) -> Ints: ...
    def count(self, num_tokens: int | Ints) -> int | Ints:
        """Count those held among the first so many: the length of the sequence on this rank."""
        ...


@dataclass(frozen=True, slots=True)
class Stripe:
    """Runs of `interleave` tokens dealt in turn, as in vLLM (cp_kv_cache_interleave_size)."""

    num_shards: int = 1
    index: int = 0
    interleave: int = 1

    @property
    def period(self) -> int:
        return self.num_shards * self.interleave

    def rows(self, block_tokens: int) -> Ints:
        return _held_rows(self, block_tokens)

    def holds(self, positions: Ints) -> Bools:
        held: Bools = positions // self.interleave % self.num_shards == self.index
        return held

    def local(self, positions: Ints) -> Ints:
        return positions // self.period * self.interleave + positions % self.interleave

    def positions(self, local: Ints) -> Ints:
        turn, rest = local // self.interleave, local % self.interleave
        return (turn * self.num_shards + self.index) * self.interleave + rest

    @overload
    def count(self, num_tokens: int) -> int: ...
    @overload
    def count(self, num_tokens: Ints) -> Ints: ...
    def count(self, num_tokens: int | Ints) -> int | Ints:
        # As vLLM's get_dcp_local_seq_lens: whole turns, and what the last one leaves for this rank.
        whole = num_tokens // self.period * self.interleave
        rest = num_tokens - whole * self.num_shards - self.index * self.interleave
        if isinstance(rest, int):
            return whole + min(max(rest, 0), self.interleave)
        return whole + np.clip(rest, 0, self.interleave)


WHOLE = Stripe()
"""Every token: what a rank holds where tokens are not dealt, and of recurrent states, which are not split by
tokens: each rank keeps its own units' states whole."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Of each `period` tokens, those in `spans` (start, stop), ascending and apart from each other. Rayk's
    engines deal stripes; a peer may keep ranges, even of a whole sequence (a period of its longest)."""

    period: int
    spans: tuple[tuple[int, int], ...]

    def rows(self, block_tokens: int) -> Ints:
        return _held_rows(self, block_tokens)

    def holds(self, positions: Ints) -> Bools:
        rows = positions % self.period
        held = np.zeros(np.shape(rows), dtype=bool)
        for start, stop in self.spans:
            held |= (rows >= start) & (rows < stop)
        return held

    def local(self, positions: Ints) -> Ints:
        return self.count(positions)

    def positions(self, local: Ints) -> Ints:
        starts = np.array([start for start, _ in self.spans], dtype=np.int64)
        before = np.cumsum([0, *(stop - start for start, stop in self.spans)])
        turn, rest = local // before[-1], local % before[-1]
        span = np.searchsorted(before, rest, side="right") - 1
        found: Ints = turn * self.period + starts[span] + rest - before[span]
        return found

    @overload
    def count(self, num_tokens: int) -> int: ...
    @overload
    def count(self, num_tokens: Ints) -> Ints: ...
    def count(self, num_tokens: int | Ints) -> int | Ints:
        turns, rest = num_tokens // self.period, num_tokens % self.period
        per_turn = sum(stop - start for start, stop in self.spans)
        if isinstance(rest, int):
            return turns * per_turn + sum(min(max(rest - a, 0), b - a) for a, b in self.spans)
        counts = turns * per_turn
        for start, stop in self.spans:
            counts = counts + np.clip(rest - start, 0, stop - start)
        return counts


@lru_cache(maxsize=1024)
def _held_rows(shard: TokenShard, block_tokens: int) -> Ints:
    if block_tokens % shard.period:
        raise Unsupported(f"blocks of {block_tokens} tokens do not hold whole turns of {shard.period} tokens")
    rows: Ints = np.flatnonzero(shard.holds(np.arange(block_tokens, dtype=np.int64)))
    rows.setflags(write=False)
    return rows


def split_layers(num_layers: int, pp_size: int, counts: Sequence[int] | None = None) -> tuple[int, ...]:
    """Count the layers of each stage, first to last. Raises Unsupported if a stage is empty or `counts` do
    not add up.

    Without `counts` as vLLM does (distributed/utils.py, get_pp_indices): equal shares, and what remains goes
    one each to the stages from the second-last backwards.
    """
    if counts is not None:
        if len(counts) != pp_size or sum(counts) != num_layers or min(counts) < 1:
            raise Unsupported(
                f"stages of {', '.join(map(str, counts))} layers do not divide {num_layers} layers over "
                f"{pp_size} stages of at least one each"
            )
        return tuple(counts)
    share, rest = divmod(num_layers, pp_size)
    if share == 0:
        raise Unsupported(f"{num_layers} layers do not fill {pp_size} stages")
    # The last stage has the output layer to compute; the first one comes last of all.
    return tuple(share + (pp_size - 1 - rest <= stage < pp_size - 1) for stage in range(pp_size))


@dataclass(frozen=True, slots=True)
class RankShare:
    """Where a rank stands in its engine, and what of tokens and layers that gives it."""

    rank: int
    stage: int
    tp_rank: int
    dcp_rank: int
    layers: range | None
    """None: all."""
    tokens: TokenShard
    """They are those of caches with a row per token; states are never split by tokens."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How an engine divides what it keeps: units over `tp` ranks, tokens over runs of `dcp` of these, layers
    over stages of `tp` ranks each."""

    tp: int = 1
    dcp: int = 1
    dcp_interleave: int = 1
    stages: tuple[int, ...] = ()
    """Layers of each stage, first to last (`split_layers`); () is one stage."""
    draft_tp: int = 1
    """Ranks over which units of a drafter's layers are divided: each run of so many holds all of them."""

    def __post_init__(self) -> None:
        assert 1 <= self.dcp <= self.tp, self
        assert self.draft_tp >= 1, self
        assert self.tp % self.draft_tp == 0, self
        assert self.dcp_interleave >= 1, self
        assert min(self.stages, default=1) >= 1, self

    @property
    def pp(self) -> int:
        return max(1, len(self.stages))

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def rank_of(self, stage: int, tp_rank: int) -> int:
        """Return the rank in the engine. The last stage comes first: rank 0, which leads, samples tokens."""
        return (self.pp - 1 - stage) * self.tp + tp_rank

    def unit_share(self, tp_rank: int, *, is_draft: bool) -> tuple[int, int]:
        """Return (ranks, place among them): how many share the units of the model's layers, or a drafter's,
        and which of these shares a rank holds."""
        return (self.draft_tp, tp_rank % self.draft_tp) if is_draft else (self.tp, tp_rank)

    def share(self, rank: int) -> RankShare:
        """Say what a rank of the engine holds."""
        assert 0 <= rank < self.num_ranks, (rank, self)
        turn, tp_rank = divmod(rank, self.tp)
        stage, dcp_rank = self.pp - 1 - turn, tp_rank % self.dcp
        first = sum(self.stages[:stage])
        layers = range(first, first + self.stages[stage]) if self.stages else None
        tokens = Stripe(self.dcp, dcp_rank, self.dcp_interleave) if self.dcp > 1 else WHOLE
        return RankShare(rank, stage, tp_rank, dcp_rank, layers, tokens)


def engine_shape(config: EngineConfig, num_layers: int) -> EngineShape:
    """Return how an engine divides a model of so many layers. Raises Unsupported for stages that do not."""
    stages = split_layers(num_layers, config.pp, config.pp_layers) if config.pp > 1 else ()
    return EngineShape(config.tp, config.dcp, config.dcp_interleave if config.dcp > 1 else 1, stages)
