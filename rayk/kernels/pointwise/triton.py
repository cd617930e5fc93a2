"""Pointwise steps on a GPU: a program does a few rows in one pass.

Rounding is that of the same steps in torch: float32 inside, and a rounded result wherever torch would have
made a tensor (not in the interpreter, whose bfloat16 is no number).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rayk.kernels.elements import rounded, sigmoid
from rayk.kernels.interpreter import launching, widened
from rayk.kernels.pointwise.reference import GateThreshold

TILE_ELEMENTS = 2048
"""Elements per program, unless a row has more."""
MAX_ROW = 1 << 15
"""Longest row of a norm: it stays in registers."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit(do_not_specialize=("num_rows",))
def rms_norm_kernel(
    x,
    added,
    weight,
    total,
    out,
    num_rows,
    num_heads,
    eps,
    x_stride_t,
    x_stride_h,
    added_stride,
    weight_stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_R: tl.constexpr,
    ADDS: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid: (tiles of rows, token by token). A sum goes to `total` first."""
    o_r = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    o_d = tl.arange(0, PADDED)
    m = (o_r < num_rows)[:, None] & (o_d < SIZE)[None, :]
    i_t, i_h = o_r // num_heads, o_r % num_heads
    p_out = o_r[:, None] * SIZE + o_d[None, :]
    p_x = (i_t * x_stride_t + i_h * x_stride_h)[:, None] + o_d[None, :]
    b = tl.load(x + p_x, mask=m, other=0.0).to(tl.float32)
    if ADDS:
        b += tl.load(added + (o_r * added_stride)[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
        b = rounded(b, total.dtype.element_ty)
        tl.store(total + p_out, b.to(total.dtype.element_ty), mask=m)
    if CENTRED:
        b = tl.where(m, b - (tl.sum(b, 1) / SIZE)[:, None], 0.0)
    b *= tl.rsqrt(tl.sum(b * b, 1) / SIZE + eps)[:, None]
    if WEIGHS:
        if not WIDE:
            b = rounded(b, out.dtype.element_ty)
        b *= tl.load(weight + (i_h * weight_stride)[:, None] + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    tl.store(out + p_out, b.to(out.dtype.element_ty), mask=m)


@triton.jit
def _normed(values, weight, p_w, m, factor, TYPE: tl.constexpr, WEIGHS: tl.constexpr, WIDE: tl.constexpr):
    values *= factor
    if WEIGHS:
        if not WIDE:
            values = rounded(values, TYPE)
        values *= tl.load(weight + p_w, mask=m, other=0.0).to(tl.float32)
    return rounded(values, TYPE)


@triton.jit(do_not_specialize=("num_rows",))
def rotate_kernel(
    x,
    weight,
    cos,
    sin,
    out,
    num_rows,
    num_heads,
    eps,
    x_stride_t,
    x_stride_h,
    weight_stride,
    out_stride_t,
    out_stride_h,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    TILE_R: tl.constexpr,
    NORMS: tl.constexpr,
    WEIGHS: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Grid: (tiles of rows, token by token). What turns with element i is i + HALF, or its neighbour in
    pairs. ROUNDS: products are rounded before they are added."""
    TYPE: tl.constexpr = out.dtype.element_ty
    o_r = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    m_r = (o_r < num_rows)[:, None]
    i_t, i_h = o_r // num_heads, o_r % num_heads
    p_x, p_w = (i_t * x_stride_t + i_h * x_stride_h)[:, None], (i_h * weight_stride)[:, None]
    o_d = tl.arange(0, PADDED_HALF)[None, :]
    m = m_r & (o_d < HALF)
    o_a, o_b = o_d, o_d + HALF
    if PAIRS_IN:
        o_a, o_b = 2 * o_d, 2 * o_d + 1
    b_a = tl.load(x + p_x + o_a, mask=m, other=0.0).to(tl.float32)
    b_b = tl.load(x + p_x + o_b, mask=m, other=0.0).to(tl.float32)
    o_rest = 2 * HALF + tl.arange(0, PADDED_REST)[None, :]
    m_rest = m_r & (o_rest < SIZE)
    b_rest = tl.load(x + p_x + o_rest, mask=m_rest, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(b_a * b_a + b_b * b_b, 1) + tl.sum(b_rest * b_rest, 1)
        factor = tl.rsqrt(squares / SIZE + eps)[:, None]
        b_a = _normed(b_a, weight, p_w + o_a, m, factor, TYPE, WEIGHS, WIDE)
        b_b = _normed(b_b, weight, p_w + o_b, m, factor, TYPE, WEIGHS, WIDE)
        b_rest = _normed(b_rest, weight, p_w + o_rest, m_rest, factor, TYPE, WEIGHS, WIDE)
    p_angle = (i_t * HALF)[:, None] + o_d
    b_cos = tl.load(cos + p_angle, mask=m, other=0.0).to(tl.float32)
    b_sin = tl.load(sin + p_angle, mask=m, other=0.0).to(tl.float32)
    if ROUNDS:
        b_first = rounded(b_a * b_cos, TYPE) - rounded(b_b * b_sin, TYPE)
        b_second = rounded(b_b * b_cos, TYPE) + rounded(b_a * b_sin, TYPE)
    else:
        b_first = b_a * b_cos - b_b * b_sin
        b_second = b_b * b_cos + b_a * b_sin
    o_a, o_b = o_d, o_d + HALF
    if PAIRS_OUT:
        o_a, o_b = 2 * o_d, 2 * o_d + 1
    p_out = out + (i_t * out_stride_t + i_h * out_stride_h)[:, None]
    tl.store(p_out + o_a, b_first.to(TYPE), mask=m)
    tl.store(p_out + o_b, b_second.to(TYPE), mask=m)
    tl.store(p_out + o_rest, b_rest.to(TYPE), mask=m_rest)


@triton.jit
def gate_sums_kernel(gate, sums, size, stride, TILE_D: tl.constexpr):
    """Grid: (rows,)."""
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, TILE_D)
    b_sum = tl.zeros([TILE_D], tl.float64)
    b_squares = tl.zeros([TILE_D], tl.float64)
    for at in range(0, size, TILE_D):
        m = at + o_d < size
        b = tl.load(gate + i_t * stride + at + o_d, mask=m, other=0.0).to(tl.float32).to(tl.float64)
        b_sum += b
        b_squares += b * b
    tl.store(sums + 2 * i_t, tl.sum(b_sum, 0))
    tl.store(sums + 2 * i_t + 1, tl.sum(b_squares, 0))


@triton.jit
def _cut(b_gate, p_sums, m_r, num_gates, quantile, TYPE: tl.constexpr):
    b_mean = tl.load(p_sums, mask=m_r, other=0.0) / num_gates
    b_square = tl.load(p_sums + 1, mask=m_r, other=0.0) / num_gates
    b_deviation = tl.sqrt(tl.maximum(b_square - b_mean * b_mean, 0.0))
    b_quantile = rounded(tl.zeros_like(b_mean).to(tl.float32) + quantile, TYPE)
    b_excess = rounded(b_deviation.to(TYPE).to(tl.float32) * b_quantile, TYPE)
    b_at = rounded(b_mean.to(TYPE).to(tl.float32) + b_excess, TYPE)
    return tl.maximum(rounded(b_gate - b_at[:, None], TYPE), 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=("num_rows",))
def gated_kernel(
    gate_up,
    sums,
    out,
    num_rows,
    size,
    stride,
    num_gates,
    quantile,
    TILE_R: tl.constexpr,
    TILE_D: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CUTS: tl.constexpr,
):
    """Grid: (tiles of rows, tiles of columns)."""
    o_r = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    o_d = tl.program_id(1) * TILE_D + tl.arange(0, TILE_D)
    m = (o_r < num_rows)[:, None] & (o_d < size)[None, :]
    p = gate_up + (o_r * stride)[:, None] + o_d[None, :]
    b_gate = tl.load(p, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p + size, mask=m, other=0.0).to(tl.float32)
    if CUTS:
        b_gate = _cut(b_gate, sums + 2 * o_r, o_r < num_rows, num_gates, quantile, out.dtype.element_ty)
    if ACTIVATION == "silu":
        b_gate *= sigmoid(b_gate)
    else:
        # Half of one more than a tanh is a sigmoid.
        b_gate *= sigmoid(1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate))
    b_out = rounded(b_gate, out.dtype.element_ty) * b_up
    tl.store(out + o_r[:, None] * size + o_d[None, :], b_out.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=("num_rows",))
def gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    num_rows,
    num_groups,
    eps,
    x_stride,
    gate_stride,
    weight_stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE_R: tl.constexpr,
    ORDER: tl.constexpr,
    WEIGHS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Grid: (tiles of groups, token by token)."""
    TYPE: tl.constexpr = out.dtype.element_ty
    o_r = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    o_d = tl.arange(0, PADDED)[None, :]
    m = (o_r < num_rows)[:, None] & (o_d < SIZE)
    i_t, i_g = o_r // num_groups, o_r % num_groups
    b = tl.load(x + (i_t * x_stride + i_g * SIZE)[:, None] + o_d, mask=m, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + (i_t * gate_stride + i_g * SIZE)[:, None] + o_d, mask=m, other=0.0).to(tl.float32)
    b_gate *= sigmoid(b_gate)
    if ORDER != "norm_gate":
        b *= b_gate
    if ORDER != "plain":
        factor = tl.rsqrt(tl.sum(b * b, 1) / SIZE + eps)[:, None]
        b *= factor
        if WEIGHS:
            if not WIDE:
                b = rounded(b, TYPE)
            b *= tl.load(weight + (i_g * weight_stride)[:, None] + o_d, mask=m, other=0.0).to(tl.float32)
        if not WIDE:
            b = rounded(b, TYPE)
    if ORDER == "norm_gate":
        b *= b_gate
    tl.store(out + o_r[:, None] * SIZE + o_d, b.to(TYPE), mask=m)


def is_taken(x: torch.Tensor) -> bool:
    """Tell whether the kernels take x: [T, D] or [T, H, D], rows dense and not too long."""
    return x.dtype in _DTYPES and x.dim() in (2, 3) and x.stride(-1) == 1 and x.shape[-1] <= MAX_ROW


def norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    wide: bool,
    centred: bool = False,
    added: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum (x itself if nothing is `added`) and its norm."""
    dtype, before = x.dtype, x
    x, added, weight = widened(x), widened(added), widened(weight)
    num_heads, stride_h = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    assert added is None or (added.shape == x.shape and x.dim() == 2 and added.stride(1) == 1)
    assert weight is None or weight.stride(-1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if added is None else torch.empty_like(out)
    num_rows, size = x.numel() // x.shape[-1], x.shape[-1]
    padded = triton.next_power_of_2(size)
    tile_r = max(1, TILE_ELEMENTS // padded)
    if num_rows:
        with launching():
            rms_norm_kernel[(triton.cdiv(num_rows, tile_r),)](
                x,
                added,
                weight,
                total,
                out,
                num_rows,
                num_heads,
                eps,
                x.stride(0),
                stride_h,
                0 if added is None else added.stride(0),
                weight.stride(0) if weight is not None and weight.dim() == 2 else 0,
                SIZE=size,
                PADDED=padded,
                TILE_R=tile_r,
                ADDS=added is not None,
                CENTRED=centred,
                WEIGHS=weight is not None,
                WIDE=wide,
                num_warps=_num_warps(tile_r * padded),
            )
    return before if added is None else total.to(dtype), out.to(dtype)


def gated_norm_triton(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    group_size: int,
    eps: float,
    order: str,
    wide: bool,
) -> torch.Tensor:
    dtype = x.dtype
    x, gate, weight = widened(x), widened(gate), widened(weight)
    assert gate.stride(1) == 1, "dense rows"
    num_groups = x.shape[1] // group_size
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(group_size)
    tile_r = max(1, TILE_ELEMENTS // padded)
    if x.numel():
        with launching():
            gated_norm_kernel[(triton.cdiv(len(x) * num_groups, tile_r),)](
                x,
                gate,
                weight,
                out,
                len(x) * num_groups,
                num_groups,
                eps,
                x.stride(0),
                gate.stride(0),
                group_size if weight is not None and weight.numel() > group_size else 0,
                SIZE=group_size,
                PADDED=padded,
                TILE_R=tile_r,
                ORDER=order,
                WEIGHS=weight is not None,
                WIDE=wide,
                num_warps=_num_warps(tile_r * padded),
            )
    return out.to(dtype)


def rotate_triton(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    pairs: bool = False,
    into_halves: bool = False,
    norm: tuple[torch.Tensor | None, float, bool] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`norm`: weight, eps and whether it is wide, of a norm of each head before it turns. `pairs`: an element
    turns with its neighbour, and `into_halves` says that they part."""
    num_tokens, num_heads, size = x.shape
    half = cos.shape[-1]
    assert cos.is_contiguous(), "dense angles"
    assert sin.is_contiguous(), "dense angles"
    weight, eps, wide = norm or (None, 0.0, False)
    dtype, given = x.dtype, out
    x, weight, cos, sin = widened(x), widened(weight), widened(cos), widened(sin)
    if out is None or out.dtype != x.dtype:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert out.shape == x.shape, (out.shape, x.shape)
    assert out.stride(2) == 1, "dense rows"
    padded, padded_rest = triton.next_power_of_2(half), triton.next_power_of_2(max(1, size - 2 * half))
    # Pairs go by way of shared memory: with all elements at once, heads of 64 spill on sm_100.
    tile_elements = TILE_ELEMENTS // 2 if pairs else TILE_ELEMENTS
    tile_r = max(1, tile_elements // triton.next_power_of_2(size))
    if x.numel():
        with launching():
            rotate_kernel[(triton.cdiv(num_tokens * num_heads, tile_r),)](
                x,
                weight,
                cos,
                sin,
                out,
                num_tokens * num_heads,
                num_heads,
                eps,
                x.stride(0),
                x.stride(1),
                weight.stride(0) if weight is not None and weight.dim() == 2 else 0,
                out.stride(0),
                out.stride(1),
                SIZE=size,
                HALF=half,
                PADDED_HALF=padded,
                PADDED_REST=padded_rest,
                TILE_R=tile_r,
                NORMS=norm is not None,
                WEIGHS=weight is not None,
                WIDE=wide,
                PAIRS_IN=pairs,
                PAIRS_OUT=pairs and not into_halves,
                ROUNDS=not pairs or into_halves,
                num_warps=_num_warps(tile_r * padded),
            )
    return out.to(dtype) if given is None or given is out else given.copy_(out)


def gate_sums_triton(gate: torch.Tensor) -> torch.Tensor:
    gate = widened(gate)
    sums = torch.empty(len(gate), 2, dtype=torch.float64, device=gate.device)
    if len(gate):
        tile = min(triton.next_power_of_2(gate.shape[1]), TILE_ELEMENTS)
        with launching():
            gate_sums_kernel[len(gate),](gate, sums, gate.shape[1], gate.stride(0), TILE_D=tile, num_warps=4)
    return sums


def gated_triton(gate_up: torch.Tensor, activation: str, cut: GateThreshold | None = None) -> torch.Tensor:
    dtype, gate_up = gate_up.dtype, widened(gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert activation in ("silu", "gelu_tanh"), activation
    assert cut is None or cut.sums.is_contiguous(), "dense sums"
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    tile_d = min(triton.next_power_of_2(size), TILE_ELEMENTS // 2)
    tile_r = TILE_ELEMENTS // 2 // tile_d
    if out.numel():
        with launching():
            gated_kernel[(triton.cdiv(num_rows, tile_r), triton.cdiv(size, tile_d))](
                gate_up,
                None if cut is None else cut.sums,
                out,
                num_rows,
                size,
                gate_up.stride(0),
                1.0 if cut is None else float(cut.num_gates),
                0.0 if cut is None else cut.quantile,
                TILE_R=tile_r,
                TILE_D=tile_d,
                ACTIVATION=activation,
                CUTS=cut is not None,
                num_warps=4,
            )
    return out.to(dtype)


def _num_warps(num_elements: int) -> int:
    """32 elements a thread; 16 of long rows, where 32 spilled on sm_100."""
    return 16 if num_elements >= 8192 else max(4, num_elements // 1024)
