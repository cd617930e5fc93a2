"""ssd_scan on a GPU: chooses the kernel and its tiles.

Requests that go token by token walk; the grid of a step of these alone depends on no data, so that a CUDA
graph can capture it. Float32 steps walk too, since tensor cores would keep only some bits. Others go by
chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.segments import Segments
from rayk.kernels.ssd_scan.triton import (
    ssd_decay_kernel,
    ssd_output_kernel,
    ssd_states_kernel,
    ssd_walk_kernel,
)
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
    if not segments.longest_run:
        tiles = None
    elif tiles is None and x.dtype != torch.float32:
        tiles = choose_chunk_tiles(current_target(), x.shape[1], x.shape[2], b.shape[2])
    arguments = {
        "x": x,
        "dt": dt,
        "a": a,
        "b": b,
        "c": c,
        "d": d,
        "dt_bias": dt_bias,
        "group_index": group_index,
        "x_stride_t": x.stride(0),
        "x_stride_h": x.stride(1),
        "dt_stride_t": dt.stride(0),
        "b_stride_t": b.stride(0),
        "b_stride_g": b.stride(1),
        "c_stride_t": c.stride(0),
        "c_stride_g": c.stride(1),
        "HEADS": x.shape[1],
        "HEAD": x.shape[2],
        "STATE": b.shape[2],
    }
    slots = segments.kernel_arguments | {
        "state": state,
        "stride_b": state.stride(0),
        "stride_h": state.stride(1),
    }
    with launching():
        if tiles is not None:
            _run_chunks(arguments, slots, out, segments, tiles)
        if tiles is None or segments.has_stepwise:
            _walk(arguments | slots, out, takes="steps" if tiles else "any")
    return out.to(x.dtype)


class ChunkTiles(NamedTuple):
    """What a program takes at once. Nothing spills: make kernels shows it."""

    channels: int
    """Channels of a head per program that carries a state; likewise `states`."""
    states: int
    tokens: int = 64
    output_channels: int = 64
    """Channels of a head per program that takes a chunk's outputs; it loads output_states of their states at
    a time."""
    output_states: int = 64
    num_warps: int = 4
    stages: int = 1
    """Tiles of which a program has loads under way."""
    operand: torch.dtype | None = None
    """Data type of computed operands; None takes the inputs', or float32 in the interpreter."""


def choose_chunk_tiles(target: Target, num_heads: int, head_size: int, state_size: int) -> ChunkTiles | None:
    """Choose tiles of which one request's heads give each multiprocessor one; None if a walk is better."""
    channels = min(64, max(MIN_TILE, triton.next_power_of_2(head_size)))
    states = min(128, max(MIN_TILE, triton.next_power_of_2(state_size)))
    if target.is_amd:
        if states < 64:
            return None  # vector registers would spill
        # With larger ones scalar registers would.
        return ChunkTiles(channels, MIN_TILE, 64, channels, min(64, states // 2))
    # Not more states than channels. With more (heads of 16 with states of 24, and of 32 with 64), ptxas 12.8
    # computes the descriptor of x's tile from a register that nothing writes, see find_unwritten.
    output_channels, output_states = channels, min(channels, states)

    def is_short() -> bool:
        tiles: int = triton.cdiv(head_size, channels) * triton.cdiv(state_size, states)
        return num_heads * tiles < target.num_multiprocessors

    # A state goes from chunk to chunk one after the other: only tiles of it can go to more multiprocessors.
    while states > 32 and is_short():
        states //= 2
    while channels > MIN_TILE and is_short():
        channels //= 2
    # Others hold all operands in registers.
    num_warps = 4 if target.has_warp_group_mma else 8
    return ChunkTiles(channels, states, 64, output_channels, output_states, num_warps, stages=3)


def _walk(arguments: dict[str, Any], out: torch.Tensor, *, takes: str) -> None:
    head_size = arguments["HEAD"]
    padded_n = triton.next_power_of_2(arguments["STATE"])
    tile_p = min(max(1, WALK_ELEMENTS // padded_n), triton.next_power_of_2(head_size))
    grid = (len(arguments["read_slots"]), arguments["HEADS"], triton.cdiv(head_size, tile_p))
    ssd_walk_kernel[grid](**arguments, out=out, PADDED_N=padded_n, TILE_P=tile_p, TAKES=takes, num_warps=4)


def _run_chunks(
    arguments: dict[str, Any],
    slots: dict[str, Any],
    out: torch.Tensor,
    segments: Segments,
    tiles: ChunkTiles,
) -> None:
    """Fill the rows of out of requests that go by runs."""
    x = arguments["x"]
    num_tokens, num_heads, head_size = x.shape
    state_size = arguments["STATE"]
    chunks = segments.chunks(tiles.tokens)
    num_chunks = len(chunks.bounds)
    dtype = tiles.operand or (torch.float32 if INTERPRETED else x.dtype)
    befores = torch.empty(num_chunks, num_heads, head_size, state_size, dtype=dtype, device=x.device)
    weights, decays = (
        torch.empty(rows, num_heads, dtype=torch.float32, device=x.device)
        for rows in (num_tokens, num_chunks)
    )
    passed_on = {"weights": weights, "decays": decays, "bounds": chunks.bounds, "befores": befores}
    every = arguments | slots | passed_on | {"first_chunks": chunks.first, "out": out, "CHUNK": tiles.tokens}

    def launch(kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
        named = every | options
        options = {name: named[name] for name in kernel.arg_names} | {
            name: value for name, value in options.items() if name.startswith("num_")
        }
        kernel[grid](**options)

    tile_h = min(16, triton.next_power_of_2(num_heads))
    launch(ssd_decay_kernel, (num_chunks, triton.cdiv(num_heads, tile_h)), TILE_H=tile_h, num_warps=4)
    num_tiles = triton.cdiv(head_size, tiles.channels) * triton.cdiv(state_size, tiles.states)
    launch(
        ssd_states_kernel,
        (num_tiles, num_heads, len(slots["read_slots"])),
        TILE_P=tiles.channels,
        TILE_N=tiles.states,
        num_warps=tiles.num_warps,
        num_stages=tiles.stages,
    )
    launch(
        ssd_output_kernel,
        (num_chunks, num_heads, triton.cdiv(head_size, tiles.output_channels)),
        TILE_P=tiles.output_channels,
        TILE_N=tiles.output_states,
        num_warps=tiles.num_warps,
        num_stages=tiles.stages,
    )
