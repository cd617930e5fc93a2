"""Alternating updates in torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def predict_reference(streams: torch.Tensor, routed: torch.Tensor, predictor: torch.Tensor) -> torch.Tensor:
    """routed: [T, S]"""
    num_streams = streams.shape[0]
    weights = F.linear(routed, predictor).view(-1, num_streams, num_streams)
    return streams + torch.matmul(weights, streams.transpose(0, 1)).transpose(0, 1)


def correct_reference(
    predicted: torch.Tensor,
    computed: torch.Tensor,
    routed: torch.Tensor,
    corrector: torch.Tensor,
    *,
    active: int,
) -> torch.Tensor:
    """routed: [T, S]"""
    weights = F.linear(routed, corrector) + 1.0
    return predicted + (computed - predicted[active]) * weights.t()[:, :, None]
