"""Alternating updates on a GPU: a program does all streams of a token.

Rounding is that of the same steps in torch, as in pointwise.triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rayk.kernels.elements import rounded, tanh
from rayk.kernels.interpreter import launching, widened


@triton.jit
def _route(
    p_x,
    norm,
    router,
    eps,
    scale,
    o_s,
    o_d,
    STREAMS: tl.constexpr,
    SIZE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """What a router makes of the row at p_x: one number per stream at o_s, zeros beyond."""
    m = o_d < SIZE
    b = tl.load(p_x + o_d, mask=m, other=0.0).to(tl.float32)
    b *= tl.rsqrt(tl.sum(b * b, 0) / SIZE + eps)
    b = rounded(b * tl.load(norm + o_d, mask=m, other=0.0), TYPE)
    b = rounded(b * scale, TYPE)
    b_routed = tl.zeros([o_s.shape[0]], tl.float32)
    for i in tl.static_range(STREAMS):
        row = tl.load(router + i * SIZE + o_d, mask=m, other=0.0).to(tl.float32)
        b_routed = tl.where(o_s == i, tl.sum(b * row, 0), b_routed)
    return rounded(tanh(rounded(b_routed, TYPE)), TYPE)


@triton.jit
def predict_streams_kernel(
    streams,
    norm,
    router,
    predictor,
    out,
    eps,
    scale,
    stride_s,
    stride_t,
    out_stride_s,
    ACTIVE: tl.constexpr,
    STREAMS: tl.constexpr,
    PADDED_S: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (tokens,)."""
    TYPE: tl.constexpr = out.dtype.element_ty
    i_t = tl.program_id(0).to(tl.int64)
    o_s, o_d = tl.arange(0, PADDED_S), tl.arange(0, PADDED)
    m_s, m = o_s < STREAMS, o_d < SIZE
    p_x = streams + i_t * stride_t
    b_routed = _route(p_x + ACTIVE * stride_s, norm, router, eps, scale, o_s, o_d, STREAMS, SIZE, TYPE)
    for to in tl.static_range(STREAMS):
        b_sum = tl.zeros([PADDED], tl.float32)
        for i in tl.static_range(STREAMS):
            p_row = predictor + (to * STREAMS + i) * STREAMS
            b_row = tl.load(p_row + o_s, mask=m_s, other=0.0).to(tl.float32)
            weight = rounded(tl.sum(b_row * b_routed, 0), TYPE)
            b_sum += weight * tl.load(p_x + i * stride_s + o_d, mask=m, other=0.0).to(tl.float32)
        b_own = tl.load(p_x + to * stride_s + o_d, mask=m, other=0.0).to(tl.float32)
        b_out = b_own + rounded(b_sum, TYPE)
        tl.store(out + to * out_stride_s + i_t * SIZE + o_d, b_out.to(TYPE), mask=m)


@triton.jit
def correct_streams_kernel(
    predicted,
    computed,
    norm,
    router,
    corrector,
    out,
    eps,
    scale,
    stride_s,
    stride_t,
    computed_stride,
    out_stride_s,
    ACTIVE: tl.constexpr,
    STREAMS: tl.constexpr,
    PADDED_S: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Grid: (tokens,)."""
    TYPE: tl.constexpr = out.dtype.element_ty
    i_t = tl.program_id(0).to(tl.int64)
    o_s, o_d = tl.arange(0, PADDED_S), tl.arange(0, PADDED)
    m_s, m = o_s < STREAMS, o_d < SIZE
    p_x = predicted + i_t * stride_t
    p_computed = computed + i_t * computed_stride
    b_routed = _route(p_computed, norm, router, eps, scale, o_s, o_d, STREAMS, SIZE, TYPE)
    b_new = tl.load(p_computed + o_d, mask=m, other=0.0).to(tl.float32)
    b_new -= tl.load(p_x + ACTIVE * stride_s + o_d, mask=m, other=0.0).to(tl.float32)
    b_new = rounded(b_new, TYPE)
    for to in tl.static_range(STREAMS):
        b_row = tl.load(corrector + to * STREAMS + o_s, mask=m_s, other=0.0).to(tl.float32)
        weight = rounded(rounded(tl.sum(b_row * b_routed, 0), TYPE) + 1.0, TYPE)
        b_own = tl.load(p_x + to * stride_s + o_d, mask=m, other=0.0).to(tl.float32)
        b_out = b_own + rounded(b_new * weight, TYPE)
        tl.store(out + to * out_stride_s + i_t * SIZE + o_d, b_out.to(TYPE), mask=m)


def predict_triton(
    streams: torch.Tensor, router: Any, predictor: torch.Tensor, *, active: int
) -> torch.Tensor:
    """`router` is a StreamRouter."""
    dtype, streams, predictor = streams.dtype, widened(streams), widened(predictor)
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if streams.shape[1]:
        with launching():
            predict_streams_kernel[streams.shape[1],](
                streams=streams, predictor=predictor, out=out, **_common(streams, router, out, active)
            )
    return out.to(dtype)


def correct_triton(
    predicted: torch.Tensor, computed: torch.Tensor, router: Any, corrector: torch.Tensor, *, active: int
) -> torch.Tensor:
    """`router` is a StreamRouter."""
    dtype, predicted, computed, corrector = predicted.dtype, *map(widened, (predicted, computed, corrector))
    assert computed.stride(1) == 1, "dense rows"
    out = torch.empty(predicted.shape, dtype=predicted.dtype, device=predicted.device)
    if predicted.shape[1]:
        with launching():
            correct_streams_kernel[predicted.shape[1],](
                predicted=predicted,
                computed=computed,
                corrector=corrector,
                out=out,
                computed_stride=computed.stride(0),
                **_common(predicted, router, out, active),
            )
    return out.to(dtype)


def _common(streams: torch.Tensor, router: Any, out: torch.Tensor, active: int) -> dict[str, Any]:
    """List the arguments of both kernels."""
    num_streams, _, size = streams.shape
    assert streams.stride(2) == 1, "dense rows"
    assert router.weight.is_contiguous(), "dense weights"
    assert router.weight.shape == (num_streams, size), (router.weight.shape, streams.shape)
    padded = triton.next_power_of_2(size)
    return {
        "norm": router.norm,
        "router": widened(router.weight),
        "eps": router.eps,
        "scale": router.scale,
        "stride_s": streams.stride(0),
        "stride_t": streams.stride(1),
        "out_stride_s": out.stride(0),
        "ACTIVE": active,
        "STREAMS": num_streams,
        "PADDED_S": triton.next_power_of_2(num_streams),
        "SIZE": size,
        "PADDED": padded,
        "num_warps": min(16, max(4, padded // 512)),
    }
