"""Grouped products one by one: the definition, and what runs on a CPU."""

from __future__ import annotations

import torch


def grouped_matmul_reference(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, biases: torch.Tensor | None
) -> torch.Tensor:
    out = x.new_empty(len(x), weights.shape[2])
    start = 0
    for group, stop in enumerate(ends.tolist()):
        if start < stop:
            rows = slice(start, stop)
            if biases is None:
                torch.mm(x[rows], weights[group], out=out[rows])
            else:
                torch.addmm(biases[group], x[rows], weights[group], out=out[rows])
        start = stop
    return out
