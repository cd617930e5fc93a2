"""gated_delta_rule on a GPU: chooses kernels and their tiles, and allocates what they pass on."""

from __future__ import annotations

from typing import Any

import torch
import triton

from rayk.kernels.gated_delta_rule.tiles import DeltaTiles, choose_tiles
from rayk.kernels.gated_delta_rule.triton import (
    gated_delta_output_kernel,
    gated_delta_solve_kernel,
    gated_delta_states_kernel,
    gated_delta_tokens_kernel,
)
from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.segments import Segments
from rayk.kernels.target import current_target

MAX_KEY_SIZE = 256
"""The widest key that the tiles hold."""


def gated_delta_rule_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    key_index: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
    tiles: DeltaTiles | None = None,
) -> torch.Tensor:
    """Of a step that goes token by token, use only the tensors and the maxima of `segments`. `tiles` is for
    tests."""
    num_tokens, num_heads, value_size = v.shape
    key_size = k.shape[-1]
    assert key_size <= MAX_KEY_SIZE, key_size
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    out_dtype = torch.float32 if INTERPRETED else v.dtype
    out = torch.empty(num_tokens, num_heads, value_size, dtype=out_dtype, device=v.device)
    padded_v = max(16, triton.next_power_of_2(value_size))
    by_token = not segments.longest_run or v.dtype == torch.float32
    tiles = tiles or choose_tiles(
        current_target(),
        key_size=key_size,
        padded_v=padded_v,
        num_heads=num_heads,
        by_token=by_token,
    )
    common: dict[str, Any] = {
        "k": k,
        "key_index": key_index,
        "num_heads": num_heads,
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
    } | _strides(k=k)
    slots = segments.kernel_arguments | {
        "state": state,
        "stride_b": state.stride(0),
        "stride_h": state.stride(1),
    }
    by_chunks = tiles.tokens > 1 and segments.longest_run > 0
    with launching():
        if by_chunks:
            _run_chunks(common, slots, q, v, g, beta, out, segments, scale=scale, tiles=tiles)
        if not by_chunks or segments.has_stepwise:
            values = min(tiles.values, 32 if key_size <= 128 else 16)
            padded_k = max(16, triton.next_power_of_2(key_size))
            grid = (len(segments.read_slots), num_heads, triton.cdiv(value_size, values))
            gated_delta_tokens_kernel[grid](
                **common,
                **slots,
                **_strides(q=q, v=v, g=g, beta=beta),
                q=q,
                v=v,
                g=g,
                beta=beta,
                out=out,
                scale=float(scale),
                PADDED_K=padded_k,
                TILE_V=values,
                TAKES="steps" if by_chunks else "any",
                # Threads with two elements of a small state each would be so many that registers spill.
                num_warps=min(4, padded_k * values // 128),
                num_stages=1,
            )
    return out.to(v.dtype)


def _run_chunks(
    common: dict[str, Any],
    slots: dict[str, Any],
    q: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
    tiles: DeltaTiles,
) -> None:
    """Fill the rows of out of requests that go by runs."""
    num_tokens, num_heads, value_size = v.shape
    key_size = common["KEY_SIZE"]
    assert key_size == triton.next_power_of_2(key_size) >= 16, key_size
    chunks = segments.chunks(tiles.tokens)
    num_chunks = len(chunks.bounds)
    dtype = tiles.operand or (torch.float32 if INTERPRETED else v.dtype)

    def passed_on(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=v.device)

    changes = passed_on(num_tokens, num_heads, value_size)
    from_state = passed_on(num_tokens, num_heads, key_size, dtype=dtype)
    befores = passed_on(num_chunks, num_heads, key_size, value_size, dtype=dtype)
    key_scales, decays = passed_on(num_tokens, num_heads), passed_on(num_chunks, num_heads)
    common = common | {"changes": changes, "CHUNK": tiles.tokens}
    padded_v = max(16, triton.next_power_of_2(value_size))
    # AMD's compiler knows no such limit.
    limit = {"maxnreg": tiles.solve_registers} if tiles.solve_registers else {}
    gated_delta_solve_kernel[num_chunks, num_heads](
        **common,
        **limit,
        **_strides(v=v, g=g, beta=beta),
        v=v,
        g=g,
        beta=beta,
        bounds=chunks.bounds,
        from_state=from_state,
        key_scales=key_scales,
        decays=decays,
        TILE_V=min(padded_v, tiles.output_values),
        PRECISION=tiles.precision,
        num_warps=tiles.num_warps,
        num_stages=tiles.stages,
    )
    gated_delta_states_kernel[triton.cdiv(value_size, tiles.values), num_heads, len(slots["read_slots"])](
        **common,
        **slots,
        from_state=from_state,
        key_scales=key_scales,
        decays=decays,
        befores=befores,
        first_chunks=chunks.first,
        TILE_V=tiles.values,
        num_warps=tiles.state_warps,
        num_stages=tiles.stages,
    )
    output_values = min(padded_v, tiles.output_values)
    gated_delta_output_kernel[num_chunks, num_heads, triton.cdiv(value_size, output_values)](
        **common,
        **_strides(q=q, g=g),
        q=q,
        g=g,
        bounds=chunks.bounds,
        befores=befores,
        out=out,
        scale=float(scale),
        TILE_V=output_values,
        num_warps=tiles.num_warps,
        num_stages=tiles.stages,
    )


def _strides(**tensors: torch.Tensor) -> dict[str, int]:
    """Name the strides of a token and of a head, as arguments of the kernels."""
    strides: dict[str, int] = {}
    for name, tensor in tensors.items():
        strides |= {f"{name}_stride_t": tensor.stride(0), f"{name}_stride_h": tensor.stride(1)}
    return strides
