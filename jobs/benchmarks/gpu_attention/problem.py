"""Batches to time attention on: dense keys and values, the same in a paged cache, and the right answer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """A batch: (query tokens, tokens in all) of each request. Heads as on one rank."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_kv_heads: int = 8
    group: int = 4
    head_size: int = 128
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    block_size: int = 16

    @property
    def is_decode(self) -> bool:
        return all(n == 1 for n, _ in self.requests)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.requests)) == 1

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.group

    def num_bytes(self, itemsize: int) -> int:
        """What must be read and written: keys and values that some query sees, queries, result."""
        reach = self.window or sys.maxsize
        keys = sum(min(total, reach - 1 + n) for n, total in self.requests)
        tokens = sum(n for n, _ in self.requests)
        per_token = self.num_kv_heads * keys + self.num_query_heads * tokens
        return 2 * per_token * self.head_size * itemsize

    @property
    def flop(self) -> int:
        """Of q . k and of weights . values, over the keys that each query sees."""
        reach = self.window or sys.maxsize
        seen = sum(min(p + 1, reach) for n, total in self.requests for p in range(total - n, total))
        return 4 * seen * self.num_query_heads * self.head_size

    def small(self) -> Shape:
        requests = tuple((max(1, n // 64), max(2, total // 64)) for n, total in self.requests[-4:])
        window = None if self.window is None else self.window // 16
        name = f"{self.name}, shrunk"
        return replace(self, name=name, requests=requests, num_kv_heads=2, head_size=32, window=window)


class Problem:
    """Tensors of a shape: dense keys and values, and the same in shuffled blocks of a paged cache."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.shape = shape
        self.scale = shape.head_size**-0.5
        heads, size, slots = shape.num_kv_heads, shape.head_size, shape.block_size
        self.query_lens = [n for n, _ in shape.requests]
        self.totals = [total for _, total in shape.requests]
        self.q = torch.randn(sum(self.query_lens), shape.num_query_heads, size, **options)
        self.keys = [torch.randn(total, heads, size, **options) for total in self.totals]
        self.values = [torch.randn(total, heads, size, **options) for total in self.totals]
        self.sinks = torch.randn(shape.num_query_heads, device=device) if shape.has_sinks else None
        self.kv_index = torch.arange(shape.num_query_heads, device=device) // shape.group

        self.num_pages = [-(-total // slots) for total in self.totals]
        ids = torch.randperm(sum(self.num_pages), dtype=torch.int32, device=device) + 1
        self.pages = list(ids.split(self.num_pages))
        # NHD memory, seen as [B, H, N, 2 D]; block 0 is nobody's.
        by_token = torch.zeros(len(ids) + 1, slots, heads, 2 * size, **options)
        self.cache = by_token.transpose(1, 2)
        self.block_table = torch.zeros(len(self.pages), max(self.num_pages), dtype=torch.int32, device=device)
        for r, pages in enumerate(self.pages):
            self.block_table[r, : len(pages)] = pages
            content = torch.cat([self.keys[r], self.values[r]], -1)
            tokens = torch.arange(len(content), device=device)
            by_token[pages[tokens // slots].long(), tokens % slots] = content
        starts = torch.tensor([0, *self.query_lens]).cumsum(0)
        self.query_start_loc = starts.to(device, torch.int32)
        self.seq_lens = torch.tensor(self.totals, dtype=torch.int32, device=device)

    @property
    def on_cuda(self) -> bool:
        return self.q.is_cuda

    def seen(self, r: int) -> Tensor:
        """[queries, keys] True where a query of request r sees a key."""
        last = torch.arange(self.totals[r] - self.query_lens[r], self.totals[r], device=self.q.device)
        keys = torch.arange(self.totals[r], device=self.q.device)
        seen = keys <= last.unsqueeze(1)
        if self.shape.window is not None:
            seen &= keys > last.unsqueeze(1) - self.shape.window
        return seen


def eager(problem: Problem) -> Tensor:
    """[T, Q, D] float32: what every path is compared with. One KV head at a time, to bound the memory."""
    shape, rows = problem.shape, []
    for r, q in enumerate(problem.q.float().split(problem.query_lens)):
        seen, heads = problem.seen(r), []
        for h in range(shape.num_kv_heads):
            members = slice(h * shape.group, (h + 1) * shape.group)
            keys, values = problem.keys[r][:, h].float(), problem.values[r][:, h].float()
            scores = q[:, members].transpose(0, 1) @ keys.T * problem.scale  # [G, n, keys]
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if problem.sinks is not None:
                sink = problem.sinks[members].view(-1, 1, 1).expand(-1, len(q), 1)
                scores = torch.cat([scores, sink], -1)
            heads.append(scores.softmax(-1)[..., : len(keys)] @ values)
        rows.append(torch.cat(heads).transpose(0, 1))
    return torch.cat(rows)
