"""copy_runs by plain indexing on any device: the definition, and the fallback without a compiler."""

from __future__ import annotations

import torch

from rayk.kernels.copy_runs.table import RunTable

_CHUNK_BYTES = 1 << 20
"""Bytes indexed at once; the index takes eight times as many."""


def copy_runs_reference(
    source: torch.Tensor, destination: torch.Tensor, runs: RunTable, blocks: torch.Tensor
) -> None:
    """`blocks` is int64 [2, n]: source's, destination's."""
    for length in sorted(set(runs.host[2].tolist())):
        start, to, _, stride, to_stride = runs.rows[:, runs.rows[2] == length]
        starts = (start[:, None] + blocks[0] * stride[:, None]).reshape(-1, 1)
        to_starts = (to[:, None] + blocks[1] * to_stride[:, None]).reshape(-1, 1)
        for first in range(0, length, _CHUNK_BYTES):
            bytes_ = torch.arange(first, min(first + _CHUNK_BYTES, length), device=source.device)
            step = max(1, _CHUNK_BYTES // len(bytes_))
            for begin in range(0, len(starts), step):
                part = slice(begin, begin + step)
                destination[to_starts[part] + bytes_] = source[starts[part] + bytes_]
