"""Grouped products one by one: the definition, and what runs on a CPU."""

from __future__ import annotations

import torch

from rayk.kernels.quantise import Quantised
from rayk.kernels.scaled_matmul import ScaledWeight, quantise_inputs
from rayk.kernels.scaled_matmul.reference import scaled_matmul_reference


def grouped_matmul_reference(
    x: torch.Tensor, weights: torch.Tensor | ScaledWeight, ends: torch.Tensor, biases: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(weights, ScaledWeight):
        return _scaled(x, weights, ends, biases)
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


def _scaled(
    x: torch.Tensor, weights: ScaledWeight, ends: torch.Tensor, biases: torch.Tensor | None
) -> torch.Tensor:
    out = x.new_empty(len(x), weights.num_outputs)
    data, scales = quantise_inputs(x, weights, impl="reference")
    assert scales is not None
    scales = scales.expand(len(x), -1)
    start = 0
    for group, stop in enumerate(ends.tolist()):
        if start < stop:
            inputs = Quantised(data[start:stop], scales[start:stop])
            bias = None if biases is None else biases[group]
            out[start:stop] = scaled_matmul_reference(inputs, weights.of_expert(group), bias, x.dtype)
        start = stop
    return out
