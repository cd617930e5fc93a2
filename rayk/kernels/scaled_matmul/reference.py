"""Products of quantised inputs with matrices kept in e4m3, in plain torch: the definition.

Products of values are exact and summed in float32 by blocks of columns, from zero each; a block's sum is
multiplied by the two scales, and the blocks' sums are added up in float32, then the bias, and rounded once.

Legend: T tokens, O outputs, I inputs, C blocks of columns.
"""

from __future__ import annotations

import torch

from rayk.kernels.quantise import Quantised
from rayk.kernels.scaled_matmul.weight import ScaledWeight


def scaled_matmul_reference(
    inputs: Quantised, weight: ScaledWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    out = sum_blocks(inputs, weight)
    if bias is not None:
        out += bias.to(out.dtype)
    return out.to(dtype)


def sum_blocks(inputs: Quantised, weight: ScaledWeight, wide: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the products [T, O] before they are rounded. In float64 (`wide`) they tell how exact those in
    float32 are."""
    codes, x_scales = inputs
    assert x_scales is not None, "inputs have scales"
    rows = torch.arange(weight.num_outputs, device=codes.device) // weight.block[0]
    w_scales = weight.scales.to(wide)[rows]
    if not weight.has_column_blocks:
        return codes.to(wide) @ weight.values.to(wide).T * x_scales.to(wide) * w_scales[:, 0]
    width = weight.block[1]
    out = torch.zeros(len(codes), weight.num_outputs, dtype=wide, device=codes.device)
    for start in range(0, weight.num_inputs, width):
        part = slice(start, min(start + width, weight.num_inputs))
        product = codes[:, part].to(wide) @ weight.values[:, part].to(wide).T
        x_scale = x_scales[:, start // width if weight.inputs == "group" else 0].to(wide)
        out += product * x_scale[:, None] * w_scales[:, start // width]
    return out
