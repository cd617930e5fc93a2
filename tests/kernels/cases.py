"""Batches for attention tests, laid out by hand: strides from axis orders, tokens written one by one.

Nothing here uses rayk: what the kernels are compared with is built independently. All memory that no
token owns, the null block included, holds NaN in every floating type (bytes 0xFF).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

AXIS_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
NUM_LAYERS = 2


def layer_view(
    order: str, *, blocks: int, heads: int, slots: int, content: int, dtype: torch.dtype, layer: int = 1
) -> Tensor:
    """The [B, H, N, C] view of one layer in a poisoned int8 buffer laid out in this axis order."""
    sizes = {"L": NUM_LAYERS, "B": blocks, "H": heads, "N": slots, "C": content}
    buffer = torch.full((math.prod(sizes.values()) * dtype.itemsize,), -1, dtype=torch.int8)
    strides, step = {}, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
    return torch.as_strided(
        buffer.view(dtype),
        tuple(sizes[axis] for axis in "BHNC"),
        tuple(strides[axis] for axis in "BHNC"),
        layer * strides["L"],
    )


@dataclass
class Batch:
    """A step: per request (tokens of this step, tokens in all), and dense keys and values to check with."""

    requests: Sequence[tuple[int, int]]
    q: Tensor
    """[T, Q, Dk]"""
    keys: list[Tensor]
    """Per request [tokens, H, Dk]."""
    values: list[Tensor]
    """Per request [tokens, H, Dv]."""
    kv_index: list[int]
    window: int | None
    cache: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    """[T] int64 slots of this step's tokens."""

    @property
    def query_start_loc(self) -> Tensor:
        starts = [0]
        for num_queries, _ in self.requests:
            starts.append(starts[-1] + num_queries)
        return torch.tensor(starts, dtype=torch.int32)

    @property
    def seq_lens(self) -> Tensor:
        return torch.tensor([total for _, total in self.requests], dtype=torch.int32)

    @property
    def head_size_k(self) -> int:
        return self.q.shape[-1]

    def seen(self, request: int, query: int) -> range:
        """Positions that a request's query-th token of this step sees."""
        num_queries, total = self.requests[request]
        position = total - num_queries + query
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return range(first, position + 1)

    def arguments(self) -> tuple[Tensor, ...]:
        """Positional arguments of paged_attention."""
        return (
            self.q,
            self.cache,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            torch.tensor(self.kv_index),
        )


def make_batch(
    requests: Sequence[tuple[int, int]],
    *,
    order: str = "LBNHC",
    block_size: int = 16,
    kernel_block_size: int | None = None,
    kv_heads: int = 2,
    kv_index: Sequence[int] = (0, 0, 1, 1),
    head_size_k: int = 16,
    head_size_v: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    marks: bool = False,
    store_new: bool = True,
    seed: int = 0,
) -> Batch:
    """Random keys and values in shuffled blocks; with `marks`, q = 0 and values one-hot.

    Blocks wholly outside every query's window have table entry 0. `store_new` False leaves this step's
    tokens out of the cache.
    """
    generator = torch.Generator().manual_seed(seed)
    slots = kernel_block_size or block_size
    ratio = block_size // slots
    num_managed = 2 + sum(-(-total // block_size) for _, total in requests)
    cache = layer_view(
        order,
        blocks=num_managed * ratio,
        heads=kv_heads,
        slots=slots,
        content=head_size_k + head_size_v,
        dtype=dtype,
    )
    num_tokens = sum(n for n, _ in requests)
    q = torch.randn(num_tokens, len(kv_index), head_size_k, generator=generator).to(dtype)
    batch = Batch(
        requests,
        torch.zeros_like(q) if marks else q,
        [],
        [],
        list(kv_index),
        window,
        cache,
        torch.zeros(len(requests), max(-(-t // slots) for _, t in requests) + 1, dtype=torch.int32),
        torch.empty(num_tokens, dtype=torch.int64),
    )
    free = (torch.randperm(num_managed - 1, generator=generator) + 1).tolist()
    packed = 0
    for r, (num_queries, total) in enumerate(requests):
        batch.keys.append(torch.randn(total, kv_heads, head_size_k, generator=generator).to(dtype))
        values = torch.randn(total, kv_heads, head_size_v, generator=generator)
        if marks:
            bucket = torch.randint(head_size_v, (total, kv_heads), generator=generator)
            values = torch.nn.functional.one_hot(bucket, head_size_v).float()
        batch.values.append(values.to(dtype))
        first_live = batch.seen(r, 0).start
        blocks = [free.pop() if b >= first_live // block_size else 0 for b in range(-(-total // block_size))]
        for position in range(total):
            managed = blocks[position // block_size]
            if managed == 0:
                continue
            offset = position % block_size
            block, slot = managed * ratio + offset // slots, offset % slots
            batch.block_table[r, position // slots] = block
            is_new = position >= total - num_queries
            if is_new:
                batch.slot_mapping[packed] = block * slots + slot
                packed += 1
            if position < first_live or (is_new and not store_new):
                continue
            for head in range(kv_heads):
                cache[block, head, slot, :head_size_k] = batch.keys[r][position, head]
                cache[block, head, slot, head_size_k:] = batch.values[r][position, head]
    assert packed == num_tokens
    return batch


def dense_attention(
    batch: Batch,
    dtype: torch.dtype,
    scale: float,
    *,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """[T, Q, Dv] by plain eager torch in `dtype`, from the dense keys and values.

    A sink is one more column of scores, whose weight is dropped.
    """
    rows = []
    start = 0
    for r, (num_queries, total) in enumerate(batch.requests):
        keys = batch.keys[r].to(dtype)[:, batch.kv_index].transpose(0, 1)
        values = batch.values[r].to(dtype)[:, batch.kv_index].transpose(0, 1)
        hidden = torch.ones(num_queries, total, dtype=torch.bool)
        for i in range(num_queries):
            seen = batch.seen(r, i)
            hidden[i, seen.start : seen.stop] = False
        q = batch.q[start : start + num_queries].to(dtype).transpose(0, 1)
        scores = q @ keys.mT * scale
        if soft_cap is not None:
            scores = (scores / soft_cap).tanh() * soft_cap
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.to(dtype).view(-1, 1, 1).expand(-1, num_queries, 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., :total]
        rows.append((weights @ values).transpose(0, 1))
        start += num_queries
    return torch.cat(rows)


def count_marks(batch: Batch) -> Tensor:
    """[T, Q, Dv] how many tokens that each query sees have each mark, by adding up what it sees."""
    counts = []
    for r, (num_queries, _) in enumerate(batch.requests):
        marks = (batch.values[r] != 0).long()
        for i in range(num_queries):
            counts.append(marks[list(batch.seen(r, i))].sum(0)[list(batch.kv_index)])
    return torch.stack(counts)


def num_seen(batch: Batch) -> Tensor:
    """[T, 1, 1] how many tokens each query sees."""
    seen = [len(batch.seen(r, i)) for r, (n, _) in enumerate(batch.requests) for i in range(n)]
    return torch.tensor(seen).view(-1, 1, 1)
