"""Starts the kernels that quantise and dequantise dense rows on a GPU."""

from __future__ import annotations

import torch
import triton

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.quantise.reference import E4M3, Quantised, dequantise_reference
from rayk.kernels.quantise.triton import dequantise_rows_kernel, quantise_rows_kernel
from rayk.kv.formats import NVFP4_BLOCK, KVFormat

TILE_ELEMENTS = 2048
"""Elements per program."""


def quantise_triton(values: torch.Tensor, kv_format: KVFormat, scale: float) -> Quantised:
    if not kv_format.is_quantised:
        return Quantised(values.to(getattr(torch, kv_format.storage)), None)
    *axes, size = values.shape
    blocks, device = kv_format.scales == "block", values.device
    assert not blocks or size % NVFP4_BLOCK == 0, f"heads of {size} elements are not whole blocks"
    data = torch.empty(*axes, size // 2 if blocks else size, dtype=torch.uint8, device=device)
    scales = None
    if blocks:
        scales = torch.empty(*axes, size // NVFP4_BLOCK, dtype=torch.uint8, device=device)
    elif kv_format.scales == "token_head":
        scales = torch.empty(*axes, 1, dtype=torch.float32, device=device)
    num_rows, padded = values.numel() // size, max(NVFP4_BLOCK, triton.next_power_of_2(size))
    if num_rows:
        rows = max(1, TILE_ELEMENTS // padded)
        with launching():
            quantise_rows_kernel[(triton.cdiv(num_rows, rows),)](
                # The interpreter misreads the smallest bf16 values.
                (values.float() if INTERPRETED else values).contiguous(),
                data,
                scales,
                num_rows,
                scale,
                D=size,
                PADDED=padded,
                ROWS=rows,
                SCALES=kv_format.scales,
                num_warps=min(16, max(4, rows * padded // TILE_ELEMENTS * 4)),
            )
    if blocks:
        assert scales is not None
        return Quantised(data, scales.view(E4M3))
    return Quantised(data.view(E4M3), scales)


def dequantise_triton(
    stored: Quantised, kv_format: KVFormat, scale: float, dtype: torch.dtype | None
) -> torch.Tensor:
    if dtype == torch.float64 or not kv_format.is_quantised:
        return dequantise_reference(stored, kv_format, scale, dtype)
    data, scales = stored.data.contiguous().view(torch.uint8), stored.scales
    *axes, width = data.shape
    size = width * 2 if kv_format.scales == "block" else width
    values = torch.empty(*axes, size, dtype=torch.float32, device=data.device)
    if scales is not None:
        scales = scales.contiguous()
        scales = scales.view(torch.uint8) if scales.dtype == E4M3 else scales
    num_rows, padded = values.numel() // size, triton.next_power_of_2(size)
    if num_rows:
        rows = max(1, TILE_ELEMENTS // padded)
        with launching():
            dequantise_rows_kernel[(triton.cdiv(num_rows, rows),)](
                data,
                scales,
                values,
                num_rows,
                scale,
                D=size,
                PADDED=padded,
                ROWS=rows,
                SCALES=kv_format.scales,
            )
    return values.to(dtype or torch.float32)
