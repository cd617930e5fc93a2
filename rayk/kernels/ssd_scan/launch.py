"""ssd_scan on a GPU: which kernel, with which tiles.

A step of one token each is a walk, whose grid depends on no data, so that a CUDA graph can capture it. So is
every step in float32, of which tensor cores would keep only some bits. Other batches go by chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.ssd_scan.triton import ssd_chunk_kernel, ssd_walk_kernel
from rayk.kernels.target import current_target

if TYPE_CHECKING:
    from rayk.kernels.segments import Segments

TILE_ELEMENTS = 4096
"""States of a program, 32 a thread."""
MAX_CHUNK_STATE = 256
"""The products of wider states do not fit the registers."""
MIN_TILE, MAX_TILE = 16, 32
"""Edges of a tile: what tensor cores multiply, and what fits the registers with its operands."""


def ssd_scan_triton(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    group_index: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
    *,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Arguments and result as `ssd_scan`. `chunk_tokens` (0: walk) is for tests."""
    assert x.stride(2) == b.stride(2) == c.stride(2) == dt.stride(1) == 1, "last axes must be dense"
    assert state.dtype == a.dtype == d.dtype == dt_bias.dtype == torch.float32
    out_dtype = torch.float32 if INTERPRETED else x.dtype
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if len(x) == 0:
        return out.to(x.dtype)
    arguments = _arguments(x, dt, b, c, state, segments) | {
        "a": a,
        "d": d,
        "dt_bias": dt_bias,
        "group_index": group_index,
        "out": out,
    }
    if chunk_tokens is None:
        walks = segments.is_single_step or x.dtype == torch.float32 or b.shape[2] > MAX_CHUNK_STATE
        chunk_tokens = 0 if walks else _choose_chunk(b.shape[2])
    with launching():
        if chunk_tokens == 0:
            _walk(arguments)
        else:
            _chunk(arguments, chunk_tokens)
    return out.to(x.dtype)


def _arguments(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
) -> dict[str, Any]:
    """What both kernels are told of the step."""
    return {
        "x": x,
        "dt": dt,
        "b": b,
        "c": c,
        "state": state,
        "query_start_loc": segments.query_start_loc,
        "read_slots": segments.read_slots,
        "segment_start_loc": segments.segment_start_loc,
        "segment_ends": segments.segment_ends,
        "write_slots": segments.write_slots,
        "x_stride_t": x.stride(0),
        "x_stride_h": x.stride(1),
        "dt_stride_t": dt.stride(0),
        "b_stride_t": b.stride(0),
        "b_stride_g": b.stride(1),
        "c_stride_t": c.stride(0),
        "c_stride_g": c.stride(1),
        "stride_b": state.stride(0),
        "stride_h": state.stride(1),
        "HEADS": x.shape[1],
        "HEAD": x.shape[2],
        "STATE": b.shape[2],
    }


def _choose_chunk(state_size: int) -> int:
    """Tokens of a chunk, so that nothing spills (jobs/kernels.py shows it)."""
    return MIN_TILE if state_size > MAX_CHUNK_STATE // 2 or current_target().is_amd else MAX_TILE


def _walk(arguments: dict[str, Any]) -> None:
    head_size = arguments["HEAD"]
    padded_n = triton.next_power_of_2(arguments["STATE"])
    tile_p = min(max(1, TILE_ELEMENTS // padded_n), triton.next_power_of_2(head_size))
    grid = (len(arguments["read_slots"]), arguments["HEADS"], triton.cdiv(head_size, tile_p))
    ssd_walk_kernel[grid](**arguments, PADDED_N=padded_n, TILE_P=tile_p, num_warps=4)


def _chunk(arguments: dict[str, Any], chunk_tokens: int) -> None:
    head_size = arguments["HEAD"]
    padded_n = max(MIN_TILE, triton.next_power_of_2(arguments["STATE"]))
    widest = min(MAX_TILE, triton.next_power_of_2(head_size), TILE_ELEMENTS // padded_n)
    tile_p = max(MIN_TILE, widest)
    grid = (len(arguments["read_slots"]), arguments["HEADS"], triton.cdiv(head_size, tile_p))
    ssd_chunk_kernel[grid](
        **arguments,
        PADDED_N=padded_n,
        TILE_P=tile_p,
        CHUNK=chunk_tokens,
        # tf32 keeps as many bits as 16-bit inputs have. AMD's matrix cores multiply float32 as it is.
        PRECISION="ieee" if current_target().is_amd else "tf32",
        WIDEN=INTERPRETED,
        num_warps=4,
        num_stages=1,
    )
