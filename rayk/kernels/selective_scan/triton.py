"""selective_scan on a GPU: one program per (request, tile of channels) walks through the request's tokens.

The state stays in registers; a token's inputs are loaded while the one before it is computed. A step of one
token each is a walk of one: the grid depends on no data, so that a CUDA graph can capture it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rayk.kernels.interpreter import INTERPRETED, launching
from rayk.kernels.segments import Segments

TILE_ELEMENTS = 512
"""States per program, 16 a thread."""


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)) in float32, exact also where exp(x) is tiny.

    log(1 + e) = 2 atanh(e / (2 + e)); its argument is at most 1/3 here, so that 9 terms are enough.
    """
    b_e = tl.exp(-tl.abs(b_x))
    b_s = b_e / (2.0 + b_e)
    b_square = b_s * b_s
    b_sum = b_square * 0.0 + 1.0 / 17
    for i in tl.static_range(8):
        b_sum = b_sum * b_square + 1.0 / (15 - 2 * i)
    return tl.maximum(b_x, 0.0) + 2.0 * b_s * b_sum


@triton.jit
def _load_token(x, dt, b, c, z, i_t, o_c, o_n, m_c, m_n, strides, HAS_Z: tl.constexpr):
    """A token's x, dt, b, c, z in float32; without z, x stands in its place."""
    b_x = tl.load(x + i_t * strides[0] + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_dt = tl.load(dt + i_t * strides[1] + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_b = tl.load(b + i_t * strides[2] + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_c = tl.load(c + i_t * strides[3] + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_z = b_x
    if HAS_Z:
        b_z = tl.load(z + i_t * strides[4] + o_c, mask=m_c, other=0.0).to(tl.float32)
    return b_x, b_dt, b_b, b_c, b_z


@triton.jit
def selective_scan_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    z,
    out,
    state,
    query_start_loc,
    read_slots,
    segment_start_loc,
    segment_ends,
    write_slots,
    x_stride_t,
    dt_stride_t,
    b_stride_t,
    c_stride_t,
    z_stride_t,
    stride_b,
    stride_u,
    num_channels,
    CHANNELS: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_N: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_Z: tl.constexpr,
):
    """Scan CHANNELS channels per unit. Grid: (requests, channel tiles)."""
    i_r = tl.program_id(0)
    o_c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    o_n = tl.arange(0, PADDED_N)
    m_c = o_c < num_channels
    m_n = o_n < STATE
    m_state = m_c[:, None] & m_n[None, :]
    b_a = tl.load(a + o_c[:, None] * STATE + o_n[None, :], mask=m_state, other=0.0)
    b_d = tl.load(d + o_c, mask=m_c, other=0.0)
    b_bias = tl.load(dt_bias + o_c, mask=m_c, other=0.0)

    p_unit = state + ((o_c // CHANNELS).to(tl.int64) * stride_u + (o_c % CHANNELS) * STATE)[:, None]
    p_unit += o_n[None, :]
    slot = tl.load(read_slots + i_r)
    b_h = tl.load(p_unit + slot * stride_b, mask=m_state & (slot >= 0), other=0.0)

    i_t = tl.load(query_start_loc + i_r).to(tl.int64)
    stop = tl.load(query_start_loc + i_r + 1)
    i_s = tl.load(segment_start_loc + i_r)
    end = tl.load(segment_ends + i_s)
    strides = (x_stride_t, dt_stride_t, b_stride_t, c_stride_t, z_stride_t)
    b_x, b_dt, b_b, b_c, b_z = _load_token(x, dt, b, c, z, i_t, o_c, o_n, m_c, m_n, strides, HAS_Z)
    while i_t < stop:
        # The last turn loads its own token again.
        i_next = tl.minimum(i_t + 1, stop - 1)
        n_x, n_dt, n_b, n_c, n_z = _load_token(x, dt, b, c, z, i_next, o_c, o_n, m_c, m_n, strides, HAS_Z)
        b_dt = softplus(b_dt + b_bias)
        b_h = tl.exp(b_dt[:, None] * b_a) * b_h + (b_dt * b_x)[:, None] * b_b[None, :]
        b_y = tl.sum(b_h * b_c[None, :], 1) + b_d * b_x
        if HAS_Z:
            b_y *= b_z / (1.0 + tl.exp(-b_z))
        tl.store(out + i_t * num_channels + o_c, b_y.to(out.dtype.element_ty), mask=m_c)
        i_t += 1
        if i_t == end:
            slot = tl.load(write_slots + i_s)
            if slot >= 0:
                tl.store(p_unit + slot * stride_b, b_h, mask=m_state)
            if i_t < stop:
                i_s += 1
                end = tl.load(segment_ends + i_s)
        b_x, b_dt, b_b, b_c, b_z = n_x, n_dt, n_b, n_c, n_z


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
) -> torch.Tensor:
    rows = [x, dt, b, c] + ([] if z is None else [z])
    assert all(t.stride(1) == 1 for t in rows), "channels and states must be dense"
    assert a.is_contiguous(), "a must be dense"
    assert state.dtype == a.dtype == d.dtype == dt_bias.dtype == torch.float32
    num_tokens, num_channels = x.shape
    state_size = a.shape[1]
    out_dtype = torch.float32 if INTERPRETED else x.dtype
    out = torch.empty(num_tokens, num_channels, dtype=out_dtype, device=x.device)
    if num_tokens == 0:
        return out.to(x.dtype)
    padded_n = triton.next_power_of_2(state_size)
    tile_c = min(max(1, TILE_ELEMENTS // padded_n), triton.next_power_of_2(num_channels))
    with launching():
        selective_scan_kernel[(len(segments.read_slots), triton.cdiv(num_channels, tile_c))](
            *(x, dt, a, b, c, d, dt_bias, z, out, state),
            **segments.kernel_arguments,
            x_stride_t=x.stride(0),
            dt_stride_t=dt.stride(0),
            b_stride_t=b.stride(0),
            c_stride_t=c.stride(0),
            z_stride_t=0 if z is None else z.stride(0),
            stride_b=state.stride(0),
            stride_u=state.stride(1),
            num_channels=num_channels,
            CHANNELS=state.shape[2],
            STATE=state_size,
            PADDED_N=padded_n,
            TILE_C=tile_c,
            HAS_Z=z is not None,
            num_warps=1,
        )
    return out.to(x.dtype)
