"""Quantises and dequantises tiles of rows on a GPU; a row is one head of one token, D elements.

e4m3 and e2m1 are encoded and decoded by integer arithmetic: not every GPU has them (or this kind of e4m3),
and Triton's interpreter narrows wrongly. A code shifted into a float16 is the value up to a power of two, the
smallest values included, since float16 conversions never flush. `SCALES` is KVFormat.scales.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x):
    """The e4m3 code of float32 x as int32: nearest, ties to even, saturating at 448; NaN stays NaN."""
    b_bits = x.to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    # Bits of positive floats are ordered as they are; 0x43E00000 is 448.
    b_clipped = tl.minimum(b_size, 0x43E00000)
    b_normal = ((b_clipped + 0x7FFFF + ((b_clipped >> 20) & 1)) >> 20) - (120 << 3)
    # Added to 2^14, whose unit in the last place is 2^-9, the smallest values round where they should.
    b_lifted = b_clipped.to(tl.float32, bitcast=True) + 16384.0
    b_subnormal = b_lifted.to(tl.int32, bitcast=True) - 0x46800000
    b_code = tl.where(b_clipped < 0x3C800000, b_subnormal, b_normal)
    b_code = tl.where(b_size > 0x7F800000, 0x7F, b_code)
    return b_code | ((b_bits >> 24) & 0x80)


@triton.jit
def decode_e4m3(b_code):
    """Decode e4m3 codes (uint8 or int32) to float32."""
    b_code = b_code.to(tl.int32)
    b_half = (((b_code & 0x80) << 8) | ((b_code & 0x7F) << 7)).to(tl.int16)
    b_value = b_half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((b_code & 0x7F) == 0x7F, float("nan"), b_value)


@triton.jit
def encode_e2m1(x):
    """Encode float32 x as e2m1 codes (0 to 15) in int32: nearest, ties to even, saturating at 6."""
    b_size = tl.abs(x)
    b_code = (b_size > 0.25).to(tl.int32) + (b_size >= 0.75).to(tl.int32) + (b_size > 1.25).to(tl.int32)
    b_code += (b_size >= 1.75).to(tl.int32) + (b_size > 2.5).to(tl.int32)
    b_code += (b_size >= 3.5).to(tl.int32) + (b_size > 5.0).to(tl.int32)
    return b_code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def decode_e2m1(b_code):
    """Decode e2m1 codes (0 to 15, int32) to float32."""
    b_half = (((b_code & 8) << 12) | ((b_code & 7) << 9)).to(tl.int16)
    return b_half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _largest(x, axis: tl.constexpr):
    """The largest magnitude along an axis; NaN if there is one, which a float maximum would skip."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.float32, bitcast=True)


@triton.jit
def _load(p_x, mask):
    """Load as float32, infinities as NaN."""
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    return tl.where(tl.abs(b_x) == float("inf"), float("nan"), b_x)


@triton.jit
def quantise_tile(
    p_values,
    p_data,
    p_scales,
    m_row,
    scale,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Quantise the rows at p_values [ROWS] into p_data [ROWS] (uint8), and their scales, if any, into
    p_scales [ROWS]: float32, or bytes of e4m3 per block."""
    if SCALES == "block":
        o_block = tl.arange(0, PADDED // 16)
        o_d = o_block[:, None] * 16 + tl.arange(0, 16)[None, :]
        m_block = m_row[:, None] & (o_block < D // 16)[None, :]
        b_x = _load(p_values[:, None, None] + o_d[None, :, :], m_block[:, :, None])
        b_code = encode_e4m3(tl.div_rn(_largest(b_x, 2), 6.0 * scale))
        tl.store(p_scales[:, None] + o_block[None, :], b_code.to(tl.uint8), mask=m_block)
        b_divisor = (decode_e4m3(b_code) * scale)[:, :, None]
        # A block of (nearly) zeros has a scale of zero.
        b_quotient = tl.div_rn(b_x, tl.where(b_divisor == 0.0, 1.0, b_divisor) + tl.zeros_like(b_x))
        b_codes = encode_e2m1(tl.where(b_divisor == 0.0, 0.0, b_quotient))
        b_low, b_high = tl.split(tl.reshape(b_codes, b_codes.shape[0], PADDED // 16, 8, 2))
        o_byte = o_block[:, None] * 8 + tl.arange(0, 8)[None, :]
        b_bytes = (b_low | (b_high << 4)).to(tl.uint8)
        tl.store(p_data[:, None, None] + o_byte[None, :, :], b_bytes, mask=m_block[:, :, None])
    else:
        o_d = tl.arange(0, PADDED)
        m_d = m_row[:, None] & (o_d < D)[None, :]
        b_x = _load(p_values[:, None] + o_d[None, :], m_d)
        if SCALES == "token_head":
            b_scale = tl.div_rn(_largest(b_x, 1), 448.0)
            # Not a maximum, which would pass over NaN. The least is the smallest normal float32.
            b_scale = tl.where(b_scale < 1.1754943508222875e-38, 1.1754943508222875e-38, b_scale)
            tl.store(p_scales, b_scale, mask=m_row)
            b_x = tl.div_rn(b_x, b_scale[:, None] + tl.zeros_like(b_x))
        else:
            b_x = tl.div_rn(b_x, scale + tl.zeros_like(b_x))
        tl.store(p_data[:, None] + o_d[None, :], encode_e4m3(b_x).to(tl.uint8), mask=m_d)


@triton.jit(do_not_specialize=("num_rows",))
def quantise_rows_kernel(
    values,
    data,
    scales,
    num_rows,
    scale,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Write data [num_rows, bytes] and scales of values [num_rows, D], all dense. Grid: (tiles of rows,)."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_row = o_row < num_rows
    DATA: tl.constexpr = D // 2 if SCALES == "block" else D
    p_scales = data + o_row
    if SCALES == "block":
        p_scales = scales + o_row * (D // 16)
    elif SCALES == "token_head":
        p_scales = scales + o_row
    quantise_tile(values + o_row * D, data + o_row * DATA, p_scales, m_row, scale, D, PADDED, SCALES)


@triton.jit(do_not_specialize=("num_rows",))
def dequantise_rows_kernel(
    data,
    scales,
    values,
    num_rows,
    scale,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Write values [num_rows, D] float32: the inverse of quantise_rows_kernel. Grid: (tiles of rows,)."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d = tl.arange(0, PADDED)
    m_row = o_row < num_rows
    m_d = m_row[:, None] & (o_d < D)[None, :]
    if SCALES == "block":
        b_byte = tl.load(data + (o_row * (D // 2))[:, None] + (o_d // 2)[None, :], mask=m_d, other=0)
        b_x = decode_e2m1((b_byte.to(tl.int32) >> ((o_d % 2) * 4)[None, :]) & 15)
        b_scale = tl.load(scales + (o_row * (D // 16))[:, None] + (o_d // 16)[None, :], mask=m_d, other=0)
        b_x = b_x * decode_e4m3(b_scale) * scale
    else:
        b_x = decode_e4m3(tl.load(data + (o_row * D)[:, None] + o_d[None, :], mask=m_d, other=0))
        if SCALES == "token_head":
            b_x = b_x * tl.load(scales + o_row, mask=m_row, other=0.0)[:, None]
        else:
            b_x = b_x * scale
    tl.store(values + (o_row * D)[:, None] + o_d[None, :], b_x, mask=m_d)
