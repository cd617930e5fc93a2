"""Rows of experts in torch: the definition."""

from __future__ import annotations

import torch


def gather_rows_reference(
    x: torch.Tensor, order: torch.Tensor, num_copies: int, shares: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.index_select(0, order // num_copies)
    if shares is not None:
        rows = (rows * shares.flatten().index_select(0, order).unsqueeze(1)).to(x.dtype)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows, places


def combine_rows_reference(
    rows: torch.Tensor,
    places: torch.Tensor,
    shares: torch.Tensor | None,
    num_copies: int,
    num_rows: torch.Tensor | None,
) -> torch.Tensor:
    copies = rows.index_select(0, places)
    if num_rows is not None:
        copies = copies.masked_fill((places >= num_rows).unsqueeze(1), 0.0)
    copies = copies.view(-1, num_copies, rows.shape[1])
    if shares is None:
        return copies.sum(1)
    return torch.bmm(shares.unsqueeze(1), copies.to(shares.dtype)).squeeze(1).to(rows.dtype)
