"""Merges attention over parts of a sequence's keys into attention over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_partials(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Merge outs [T, Q, Dv], each with the logs of its sums of exponents [T, Q], in the order given.

    No key may be in two parts. `sinks` [Q] float32 are scores of one more key each, with a value of zeros, as
    in `paged_attention`. Where no part sees a key, the result is zeros.
    """
    stacked = torch.stack(tuple(lses))  # [parts, T, Q]
    top = stacked.amax(0)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(top.dtype))
    # Keep -inf - -inf out of the exponent.
    top = top.clamp(min=torch.finfo(top.dtype).min)
    weights = (stacked - top).exp_()
    total = weights.sum(0)
    if sinks is not None:
        total += torch.exp(sinks.to(top.dtype) - top)
    merged = torch.zeros_like(outs[0])
    for out, weight in zip(outs, weights, strict=True):
        merged += out * weight.unsqueeze(-1)
    return merged / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
