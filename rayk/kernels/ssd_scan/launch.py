"""ssd_scan on a GPU: chooses the kernel and its tiles.

A step of one token each is a walk, whose grid depends on no data, so that a CUDA graph can capture it.
Float32 steps walk too, since tensor cores would keep only some bits. Other batches go by chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.segments import Segments
from rayk.kernels.ssd_scan.triton import ssd_chunk_kernel, ssd_walk_kernel
from rayk.kernels.target import Target, current_target

WALK_ELEMENTS = 4096
"""States per walking program, 32 a thread."""
MIN_TILE = 16
"""Smallest tile edge that tensor cores multiply."""


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
    tiles: ChunkTiles | None = None,
) -> torch.Tensor:
    """`tiles` is for tests."""
    assert x.stride(2) == b.stride(2) == c.stride(2) == dt.stride(1) == 1, "last axes must be dense"
    assert state.dtype == a.dtype == d.dtype == dt_bias.dtype == torch.float32
    out_dtype = torch.float32 if INTERPRETED else x.dtype
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    if len(x) == 0:
        return out.to(x.dtype)
    arguments = segments.kernel_arguments | {
        "x": x,
        "dt": dt,
        "a": a,
        "b": b,
        "c": c,
        "d": d,
        "dt_bias": dt_bias,
        "group_index": group_index,
        "out": out,
        "state": state,
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
    if tiles is None and not segments.is_single_step and x.dtype != torch.float32:
        tiles = choose_chunk_tiles(current_target(), b.shape[2])
    with launching():
        if tiles is None:
            _walk(arguments)
        else:
            _chunk(arguments, tiles)
    return out.to(x.dtype)


class ChunkTiles(NamedTuple):
    """The part of a head that a program takes at once. Nothing spills: make kernels shows it."""

    tokens: int
    channels: int
    padded_state: int
    num_warps: int
    precision: str
    """Input precision of float32 products. tf32 keeps as many bits as 16-bit inputs have; AMD's matrix cores
    and the interpreter multiply float32 exactly."""


def choose_chunk_tiles(target: Target, state_size: int) -> ChunkTiles | None:
    """Choose tiles by the registers that a state of this size and its operands take; None if a walk is
    better."""
    padded = max(MIN_TILE, triton.next_power_of_2(state_size))
    if padded > 256 or (target.is_amd and padded < 64):
        return None  # vector registers would spill, or scalar ones
    precision = "ieee" if INTERPRETED or target.is_amd else "tf32"
    if padded > 128 or target.is_amd:
        return ChunkTiles(MIN_TILE, MIN_TILE, padded, 4, precision)
    return ChunkTiles(32, 32, padded, 8, precision)


def _walk(arguments: dict[str, Any]) -> None:
    head_size = arguments["HEAD"]
    padded_n = triton.next_power_of_2(arguments["STATE"])
    tile_p = min(max(1, WALK_ELEMENTS // padded_n), triton.next_power_of_2(head_size))
    grid = (len(arguments["read_slots"]), arguments["HEADS"], triton.cdiv(head_size, tile_p))
    ssd_walk_kernel[grid](**arguments, PADDED_N=padded_n, TILE_P=tile_p, num_warps=4)


def _chunk(arguments: dict[str, Any], tiles: ChunkTiles) -> None:
    num_tiles = triton.cdiv(arguments["HEAD"], tiles.channels)
    ssd_chunk_kernel[len(arguments["read_slots"]), arguments["HEADS"], num_tiles](
        **arguments,
        PADDED_N=tiles.padded_state,
        TILE_P=tiles.channels,
        CHUNK=tiles.tokens,
        PRECISION=tiles.precision,
        WIDEN=INTERPRETED,
        num_warps=tiles.num_warps,
        num_stages=1,
    )
