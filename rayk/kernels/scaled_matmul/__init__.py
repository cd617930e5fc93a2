"""Matrix products in fp8: with matrices that are kept as a checkpoint stores them, e4m3 values and scales.

Inputs are quantised first, by the scheme that the checkpoint states. Rounding and sums are as in `reference`.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812

from rayk.kernels.dispatch import default_impl, implementation
from rayk.kernels.quantise import Quantised, quantise
from rayk.kernels.scaled_matmul.weight import ScaledWeight, can_stack, stacked_weight
from rayk.kv.formats import FORMATS

__all__ = [
    "ScaledWeight",
    "can_stack",
    "kernel_takes",
    "multiplies_e4m3",
    "quantise_inputs",
    "scaled_matmul",
    "stacked_weight",
]

ALIGNMENT = 16
"""What torch's product wants both sizes of a matrix to be multiples of."""
SMALLEST_TILE = 32
"""Columns that an instruction for e4m3 adds up."""
TILE = 128


def scaled_matmul(
    x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None = None, *, impl: str | None = None
) -> torch.Tensor:
    """Quantise x [T, I], multiply it by the transposed weight [O, I], and add the bias [O]: [T, O] in x's
    dtype.

    `impl`: reference; torch (torch._scaled_mm, for scales of whole matrices, rows and tokens); or triton.
    None takes reference on a CPU, else torch where it has such a product, else triton.
    """
    assert x.shape[1] == weight.num_inputs, (x.shape, weight.values.shape)
    on_device = default_impl(x.is_cuda) == "triton"
    if impl is None:
        impl = "reference" if not on_device else "torch" if _torch_fits(x, weight) else "triton"
    inputs = quantise_inputs(x, weight, impl="triton" if on_device or impl == "triton" else "reference")
    if impl == "torch":
        return _scaled_matmul_torch(inputs, weight, bias, x.dtype)
    return implementation("scaled_matmul", impl)(inputs, weight, bias, x.dtype)


def quantise_inputs(x: torch.Tensor, weight: ScaledWeight, *, impl: str | None = None) -> Quantised:
    """Return e4m3 values [T, I] of x [T, I] (any row stride; columns up to a whole group may follow them) and
    their float32 scales: [T, groups], [T, 1] or, static, [1, 1].

    A dynamic scale is the largest magnitude / 448, at least the smallest normal float32.
    """
    if weight.inputs == "static":
        one = torch.full((1, 1), weight.input_scale, dtype=torch.float32, device=x.device)
        return Quantised(quantise(x, FORMATS["fp8_e4m3"], weight.input_scale, impl=impl).data, one)
    size = min(weight.block[1], x.shape[1]) if weight.inputs == "group" else x.shape[1]
    if x.shape[1] % size:
        x = F.pad(x, (0, -x.shape[1] % size))
    num_rows, width = x.shape
    groups = x.reshape(num_rows, width // size, size)
    data, scales = quantise(groups, FORMATS["fp8_e4m3_token_head"], impl=impl)
    assert scales is not None
    return Quantised(data.view(num_rows, width), scales.squeeze(-1))


def multiplies_e4m3(device: torch.device) -> bool:
    """Tell whether the device has instructions that multiply e4m3 (this kind of it)."""
    if device.type != "cuda":
        return False
    from rayk.kernels.target import target_named

    if torch.version.hip:
        return target_named(
            torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        ).multiplies_e4m3
    major, minor = torch.cuda.get_device_capability(device)
    return target_named(f"sm_{major}{minor}").multiplies_e4m3


def kernel_takes(weight_block: tuple[int, int], num_inputs: int) -> bool:
    """Tell whether the kernel's tiles fit blocks of these rows and columns."""
    columns = weight_block[1]
    return columns >= num_inputs or columns % TILE == 0 or columns in (SMALLEST_TILE, 2 * SMALLEST_TILE)


def _scaled_matmul_torch(
    inputs: Quantised, weight: ScaledWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Sums are float32 (`use_fast_accum` is off); torch rounds once, before the bias where rows have
    scales."""
    assert not weight.has_column_blocks, "torch._scaled_mm takes no blocks of columns"
    x_scales, w_scales = inputs.scales, weight.scales.mT
    assert x_scales is not None
    if x_scales.numel() > 1 or w_scales.numel() > 1:
        # Either both have one scale, or both have one a row.
        x_scales = x_scales.expand(len(inputs.data), 1).contiguous()
        w_scales = weight.scales.repeat_interleave(weight.block[0], 0)[: weight.num_outputs].mT.contiguous()
    out: torch.Tensor = torch._scaled_mm(
        inputs.data, weight.values.mT, x_scales, w_scales, out_dtype=dtype, use_fast_accum=False
    )
    return out if bias is None else out.add_(bias)


def _torch_fits(x: torch.Tensor, weight: ScaledWeight) -> bool:
    if x.dtype != torch.bfloat16 or weight.has_column_blocks or torch.version.hip:
        return False
    has_sizes = weight.num_inputs % ALIGNMENT == 0 and weight.num_outputs % ALIGNMENT == 0
    return has_sizes and _has_product(x.device)


@functools.cache
def _has_product(device: torch.device) -> bool:
    """Rows' scales need a GPU of the generation that first had them."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
