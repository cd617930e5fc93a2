"""Matrix products of groups of rows, each with a matrix of its own: what experts compute."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812

from rayk.kernels.dispatch import default_impl, implementation
from rayk.kernels.grouped_matmul.reference import grouped_matmul_reference
from rayk.kernels.scaled_matmul import ScaledWeight

ALIGNMENT_BYTES = 16
"""What torch's grouped product wants every row of its operands to start at a multiple of."""


def grouped_matmul(
    x: torch.Tensor,
    weights: torch.Tensor | ScaledWeight,
    ends: torch.Tensor,
    biases: torch.Tensor | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Rows ends[e - 1] to ends[e] of x [N, I], times weights[e] [I, O], plus biases[e] [O]: [N, O]. Rows from
    the last end on are undefined.

    weights [E, I, O] have one dense axis, or are kept in fp8 (rows of W: [E, O, I]); x is then quantised as
    scaled_matmul does. ends is int32 [E], ascending. `impl`: reference, which waits for the device; triton;
    or torch (its own grouped product, which takes no weights in fp8). The last two read only the matrices of
    groups that have rows, and their launches depend on shapes alone. None takes reference on a CPU, else
    torch where its product does not wait, else triton.
    """
    count, num_in = weights.values.mT.shape[:2] if isinstance(weights, ScaledWeight) else weights.shape[:2]
    assert x.shape[1] == num_in, (x.shape, num_in)
    assert len(ends) == count, (ends.shape, count)
    assert ends.dtype == torch.int32, ends.dtype
    if impl is None:
        on_device = default_impl(x.is_cuda) == "triton"
        impl = "reference" if not on_device else "torch" if _torch_fits(x, weights) else "triton"
    if impl == "torch":
        assert isinstance(weights, torch.Tensor), "torch's product takes no weights in fp8"
        return _grouped_matmul_torch(x, weights, ends, biases)
    if impl == "reference":
        return grouped_matmul_reference(x, weights, ends, biases)
    return implementation("grouped_matmul", impl)(x, weights, ends, biases)


def _grouped_matmul_torch(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, biases: torch.Tensor | None
) -> torch.Tensor:
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    out: torch.Tensor = product(x.contiguous(), weights, offs=ends)
    if biases is None:
        return out
    rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
    groups = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
    return out.add_(biases.index_select(0, groups))


def _torch_fits(x: torch.Tensor, weights: torch.Tensor | ScaledWeight) -> bool:
    """Tell whether torch runs a kernel of its own; it would loop over the groups and wait for their ends."""
    if isinstance(weights, ScaledWeight) or x.dtype != torch.bfloat16 or not _has_kernel(x.device):
        return False
    rows = (x.shape[1], *(size for size in weights.stride() if size != 1))
    return all(size * x.element_size() % ALIGNMENT_BYTES == 0 for size in rows)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    if not (hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")) or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)
