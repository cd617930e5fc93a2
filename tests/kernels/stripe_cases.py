"""A batch's keys dealt over ranks in stripes, token by token, as facts of vLLM's source say.

Nothing here uses rayk: which rank holds a token, and where, is found by asking token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.cases import Batch, layer_view


@dataclass(frozen=True)
class Stripes:
    """N ranks, runs of I tokens, and B slots of a block on a rank."""

    num_ranks: int
    interleave: int
    block_size: int

    def owner(self, position: int) -> int:
        return position // self.interleave % self.num_ranks

    def slot(self, position: int) -> tuple[int, int]:
        """(column of the block table, slot)."""
        column, offset = divmod(position, self.block_size * self.num_ranks)
        turn = self.interleave * self.num_ranks
        return column, offset // turn * self.interleave + offset % self.interleave


def rank_cache(batch: Batch, stripes: Stripes, rank: int, order: str = "LBNHC") -> Tensor:
    """What a rank caches of a batch whose blocks hold N * B tokens; all else is NaN."""
    blocks, heads, _, content = batch.cache.shape
    cache = layer_view(
        order,
        blocks=blocks,
        heads=heads,
        slots=stripes.block_size,
        content=content,
        dtype=batch.cache.dtype,
    )
    for r, position, block, slot in rank_places(batch, stripes, rank):
        cache[block, :, slot] = torch.cat([batch.keys[r][position], batch.values[r][position]], -1)
    return cache


def rank_places(batch: Batch, stripes: Stripes, rank: int) -> Iterator[tuple[int, int, int, int]]:
    """(request, position, kernel block, slot) of every live token that the rank holds."""
    for r, (_, total) in enumerate(batch.requests):
        for position in range(batch.seen(r, 0).start, total):
            if stripes.owner(position) == rank:
                column, slot = stripes.slot(position)
                yield r, position, int(batch.block_table[r, column]), slot


def rank_attention(
    batch: Batch,
    stripes: Stripes,
    rank: int,
    dtype: torch.dtype,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """[T, Q, Dv] and logs of sums of exponents [T, Q], token by token from the dense keys and values that the
    rank holds; zeros and -inf where these are none."""
    outs, sums = [], []
    queries = iter(batch.q.to(dtype))
    for r, (num_queries, _) in enumerate(batch.requests):
        keys, values = (x[r].to(dtype)[:, batch.kv_index] for x in (batch.keys, batch.values))
        for i in range(num_queries):
            held = [p for p in batch.seen(r, i) if stripes.owner(p) == rank]
            scores = torch.einsum("qd,kqd->qk", next(queries), keys[held]) * scale
            if soft_cap is not None:
                scores = (scores / soft_cap).tanh() * soft_cap
            sums.append(scores.logsumexp(-1))
            weights = (scores - sums[-1].unsqueeze(-1)).exp()
            outs.append(torch.einsum("qk,kqd->qd", weights, values[held]))
    return torch.stack(outs), torch.stack(sums)


def rank_bounds(batch: Batch, stripes: Stripes, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The request of each token, and the first and the end of the rank's rows that it sees; int32 [T]."""
    rows = []
    for r, (num_queries, total) in enumerate(batch.requests):
        held = [p for p in range(total) if stripes.owner(p) == rank]
        for i in range(num_queries):
            seen = batch.seen(r, i)
            rows.append((r, sum(p < seen.start for p in held), sum(p < seen.stop for p in held)))
    return tuple(torch.tensor(column, dtype=torch.int32) for column in zip(*rows, strict=True))  # type: ignore[return-value]
