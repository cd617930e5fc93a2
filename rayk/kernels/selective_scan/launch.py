"""selective_scan on a GPU: chooses kernels and their tiles.

The grid of a step without long prompts depends on no data, so that a CUDA graph can capture it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.segments import Segments
from rayk.kernels.selective_scan.triton import (
    selective_scan_chunk_kernel,
    selective_scan_kernel,
    selective_scan_states_kernel,
)
from rayk.kernels.target import current_target

TILE_ELEMENTS = 512
"""States per program that goes through a request, 16 a thread."""
CHUNK_TILE_ELEMENTS = 1024
"""States per program that goes through a chunk, 32 a thread."""
CHUNK_TOKENS = 64


def selective_scan_triton(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    z: torch.Tensor | None,
    state: torch.Tensor,
    segments: Segments,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
) -> torch.Tensor:
    """`chunk_tokens` is for tests."""
    rows = [x, dt, b, c] + ([] if z is None else [z])
    assert all(t.stride(1) == 1 for t in rows), "channels and states must be dense"
    assert a.is_contiguous(), "a must be dense"
    assert state.dtype == a.dtype == d.dtype == dt_bias.dtype == torch.float32
    num_tokens, num_channels = x.shape
    out_dtype = torch.float32 if INTERPRETED else x.dtype
    out = torch.empty(num_tokens, num_channels, dtype=out_dtype, device=x.device)
    if num_tokens == 0:
        return out.to(x.dtype)
    state_size = a.shape[1]
    padded_n = triton.next_power_of_2(state_size)
    tokens: dict[str, Any] = {
        "x": x,
        "dt": dt,
        "b": b,
        "c": c,
        "d": d,
        "dt_bias": dt_bias,
        "z": z,
        "out": out,
        "x_stride_t": x.stride(0),
        "dt_stride_t": dt.stride(0),
        "b_stride_t": b.stride(0),
        "c_stride_t": c.stride(0),
        "z_stride_t": 0 if z is None else z.stride(0),
        "HAS_Z": z is not None,
    }
    slots = segments.kernel_arguments | {
        "state": state,
        "stride_b": state.stride(0),
        "stride_u": state.stride(1),
        "CHANNELS": state.shape[2],
    }
    sizes = {"a": a, "num_channels": num_channels, "STATE": state_size, "PADDED_N": padded_n}
    padded_c = triton.next_power_of_2(num_channels)
    tile_c = min(max(1, TILE_ELEMENTS // padded_n), padded_c)
    num_tiles, num_requests = triton.cdiv(num_channels, tile_c), len(segments.read_slots)
    by_chunks = segments.longest_run > chunk_tokens
    with launching():
        if by_chunks:
            chunks = segments.chunks(chunk_tokens)
            num_chunks = len(chunks.bounds)
            chunk_tile = min(max(1, CHUNK_TILE_ELEMENTS // padded_n), padded_c)
            chunk_grid = (num_chunks, triton.cdiv(num_channels, chunk_tile))
            new: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
            passed_on = {
                "chunk_states": torch.empty(num_chunks, state_size, num_channels, **new),
                "times": torch.empty(num_chunks, num_channels, **new),
            }
            of_chunks = tokens | sizes | passed_on | {"bounds": chunks.bounds, "TILE_C": chunk_tile}
            selective_scan_chunk_kernel[chunk_grid](
                **of_chunks | {"HAS_Z": False}, FROM_ZERO=True, num_warps=1
            )
            selective_scan_states_kernel[num_tiles, num_requests](
                **slots,
                **sizes,
                **passed_on,
                first_chunks=chunks.first,
                TILE_C=tile_c,
                CHUNK=chunk_tokens,
                STAGES=1 if current_target().is_amd else 4,
                num_warps=1,
            )
            selective_scan_chunk_kernel[chunk_grid](**of_chunks, FROM_ZERO=False, num_warps=1)
        if not by_chunks or segments.has_stepwise:
            selective_scan_kernel[num_requests, num_tiles](
                **tokens, **slots, **sizes, TILE_C=tile_c, TAKES="steps" if by_chunks else "any", num_warps=1
            )
    return out.to(x.dtype)
