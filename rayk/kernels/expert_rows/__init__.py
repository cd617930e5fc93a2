"""Rows of tokens in the order of their experts, and back: what stands around the experts' products.

A token has K copies, one for each chosen expert. T tokens, N = T * K copies, D elements of a row.
"""

from __future__ import annotations

import torch

from rayk.kernels.dispatch import default_impl
from rayk.kernels.expert_rows.reference import combine_rows_reference, gather_rows_reference

__all__ = ["combine_rows", "gather_rows"]


def gather_rows(
    x: torch.Tensor,
    order: torch.Tensor,
    num_copies: int,
    shares: torch.Tensor | None = None,
    *,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N, D], row i being that of x [T, D] of which order[i] (int64 [N], a permutation) is a copy; and
    places, int64 [N]: where each copy is now.

    `shares` [T, K]: factors of the copies; the product is rounded to x's dtype. `impl`: reference (torch) or
    triton; None takes triton on CUDA.
    """
    assert len(order) == len(x) * num_copies, (order.shape, x.shape, num_copies)
    if _impl(x, impl) == "reference":
        return gather_rows_reference(x, order, num_copies, shares)
    from rayk.kernels.expert_rows.triton import gather_rows_triton

    return gather_rows_triton(x, order, num_copies, shares)


def combine_rows(
    rows: torch.Tensor,
    places: torch.Tensor,
    shares: torch.Tensor | None,
    num_copies: int,
    *,
    num_rows: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Return the sum of each token's K copies, times `shares` [T, K]: [T, D] in the dtype of rows [N, D],
    rounded once.

    `places` is as gather_rows returned it. `num_rows`, an int32 of one element: rows from there on are not
    read and count as zero; None: there are none. `impl` is as of gather_rows.
    """
    if _impl(rows, impl) == "reference":
        return combine_rows_reference(rows, places, shares, num_copies, num_rows)
    from rayk.kernels.expert_rows.triton import combine_rows_triton

    return combine_rows_triton(rows, places, shares, num_copies, num_rows)


def _impl(x: torch.Tensor, impl: str | None) -> str:
    assert impl in (None, "reference", "triton"), f"unknown implementation {impl!r}"
    return impl or ("triton" if default_impl(x.is_cuda) == "triton" else "reference")
