"""Reads tiles of rows from pages of any format, on a GPU.

`SCALES` is KVFormat.scales. Quantised pages are read as bytes, many at once, and decoded in registers (see
quantise.triton); elements times block scales, like e4m3, are exact in bf16 and fp16, so tensor cores lose
nothing. The caller applies the layer's scales to scores and weighted values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rayk.kernels.quantise.triton import decode_e2m1, decode_e4m3


@triton.jit
def _load(p_row, m_row, o_d, SIZE: tl.constexpr, IS_MASKED: tl.constexpr):
    """Load the first SIZE of o_d in each row; zeros beyond, and outside m_row [KEYS] if IS_MASKED."""
    pointers = p_row[:, None] + o_d[None, :]
    if IS_MASKED:
        b_data = tl.load(pointers, mask=m_row[:, None] & (o_d < SIZE)[None, :], other=0)
    elif o_d.shape[0] > SIZE:
        b_data = tl.load(pointers, mask=(o_d < SIZE)[None, :], other=0)
    else:
        b_data = tl.load(pointers)
    return b_data


@triton.jit
def _elements(b_byte, DTYPE: tl.constexpr, HAS_E4M3: tl.constexpr):
    """Decode bytes of e4m3, by the device's own instruction if it has one."""
    b_value = b_byte.to(tl.float8e4nv, bitcast=True) if HAS_E4M3 else decode_e4m3(b_byte)
    return b_value.to(DTYPE)


@triton.jit
def load_rows(
    p_row,
    b_scale,
    m_row,
    DTYPE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SCALES: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    WIDEN: tl.constexpr,
    APART: tl.constexpr,
):
    """Load rows at p_row [KEYS]: [KEYS, PADDED] in DTYPE, or float32 to WIDEN. Zeros beyond SIZE elements
    and, if IS_MASKED, outside m_row [KEYS]. b_scale [KEYS]: per-(head, token) scales, None to leave them
    out. APART: what loads bytes does not choose how tensor cores hold their elements."""
    TO: tl.constexpr = tl.float32 if WIDEN else DTYPE
    if SCALES == "block":
        b_byte = _load(p_row, m_row, tl.arange(0, PADDED // 2), SIZE // 2, IS_MASKED).to(tl.int32)
        b_code = _load(p_row + SIZE // 2, m_row, tl.arange(0, PADDED // 16), SIZE // 16, IS_MASKED)
        b_block = _elements(b_code, tl.float32, HAS_E4M3)
        b_rows = tl.join(decode_e2m1(b_byte & 15), decode_e2m1(b_byte >> 4))
        b_rows = tl.reshape(b_rows, p_row.shape[0], PADDED // 16, 16) * b_block[:, :, None]
        b_rows = tl.reshape(b_rows, p_row.shape[0], PADDED)
    else:
        b_rows = _load(p_row, m_row, tl.arange(0, PADDED), SIZE, IS_MASKED)
        if SCALES == "token_head" and b_scale is not None:
            b_rows = _elements(b_rows, tl.float32, HAS_E4M3) * b_scale[:, None]
        elif SCALES != "none":
            b_rows = _elements(b_rows, TO, HAS_E4M3)
    if SCALES == "block" or (SCALES != "none" and APART):
        # A sum of one value each, which hides the bytes from Triton's choice of what a lane multiplies: it
        # would take 4 values in a row for a byte, at the price of registers, and 8 for a byte split in two,
        # which comes out wrong: of 16 keys there are but 4 for each lane.
        b_rows = tl.sum(b_rows[:, :, None], 2)
    return b_rows.to(TO)
