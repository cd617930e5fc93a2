"""The digest in plain torch: int64 arithmetic that wraps, on CPU or CUDA.

Definition. All arithmetic is modulo 2^64; `>>` shifts zeros in. With

    mix(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
             x ^= x >> 27;  x *= 0x94D049BB133111EB
             x ^= x >> 31                              (splitmix64's finaliser, a bijection)
    G = 0x9E3779B97F4A7C15

the coordinate (layer, field, unit) has the key  K = mix(mix(mix(S + G ^ layer) + G ^ field) + G ^ unit),
S = 0x7261796B64696765, where `a + G ^ b` means (a + G) XOR b. A row, the absolute token position, has
K_row = mix(K + G ^ row), and the word at index i of a row has I_i = mix(~G ^ i). The digest of a
(field, unit, row group) is

    the sum, over the group's rows and their words w_i, of  mix(w_i ^ (K_row + I_i)).

A row of a field is num_elems * itemsize bytes, taken as little-endian words of 8 bytes when 8 divides
that, else of 4, 2 or 1, each sign-extended to 64 bits. Nothing else enters: no layout, block, slot or rank.
So digests of disjoint sets of units or rows are parts of one whole: they are compared, or added, freely.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

CPU = torch.device("cpu")
MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SEED = 0x7261796B64696765
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
_WORD_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_EXPONENTS = {
    torch.float64: 0x7FF0 << 48,
    torch.float32: 0x7F80 << 16,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float8_e4m3fn: 0x7F,
}
"""Exponent bits, all set in NaN and infinity; e4m3 has only NaN, with every bit but the sign set."""
_CHUNK_WORDS = 1 << 15
"""Words mixed at once: few enough that the passes over them stay in a core's own cache."""


def mix64(x: int) -> int:
    """Mix one Python int with splitmix64's finaliser."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * _MUL_1) & MASK64
    x = ((x ^ (x >> 27)) * _MUL_2) & MASK64
    return x ^ (x >> 31)


@functools.lru_cache(maxsize=1 << 12)
def coordinate_keys(
    layer: int, field_id: int, units: tuple[int, ...], device: torch.device = CPU
) -> torch.Tensor:
    """K of (layer, field, unit) for each unit: int64 [H], read-only. Cached to avoid copies to the device."""
    key = _SEED
    for index in (layer, field_id):
        key = mix64(((key + _GOLDEN) & MASK64) ^ index)
    of_field = signed((key + _GOLDEN) & MASK64)
    return mix64_tensor(torch.tensor(units, dtype=torch.int64) ^ of_field).to(device)


def mix64_tensor(x: torch.Tensor) -> torch.Tensor:
    """Apply splitmix64's finaliser to an int64 tensor in place and return it."""
    scratch = torch.empty_like(x)
    for shift, factor in ((30, _MUL_1), (27, _MUL_2), (31, None)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        # int64 shifts copies of the sign in; clear them.
        scratch &= (1 << (64 - shift)) - 1
        x ^= scratch
        if factor is not None:
            x *= signed(factor)
    return x


def not_finite_bits(dtype: torch.dtype, word: int) -> tuple[int, int]:
    """Return (mask, step) for words of `word` bytes: (word & mask) + step sets an element's highest bit
    exactly if the element is NaN or infinite. Both are 0 for integers."""
    exponent = _EXPONENTS.get(dtype, 0)
    mask = sum(exponent << 8 * start for start in range(0, word, dtype.itemsize))
    return mask, sum((exponent & -exponent) << 8 * start for start in range(0, word, dtype.itemsize))


def digest_rows_reference(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    layer: int,
    units: Sequence[int],
    fields: Sequence[tuple[int, int, int]],
    rows_per_group: int,
    first_group: int,
    num_groups: int,
    not_finite: torch.Tensor,
) -> torch.Tensor:
    """Work on the view's own device; set not_finite [1] to 1 if a value of these rows is NaN or infinite."""
    device = kv_cache.device
    out = torch.zeros(len(fields), len(units), num_groups, dtype=torch.int64, device=device)
    groups = rows // rows_per_group - first_group
    for f, (field_id, start, num_elems) in enumerate(fields):
        row_bytes = num_elems * kv_cache.element_size()
        word_dtype = _WORD_DTYPES[word_bytes(row_bytes)]
        num_words = row_bytes // word_bytes(row_bytes)
        mask, bit = not_finite_bits(kv_cache.dtype, word_bytes(row_bytes))
        key_H = coordinate_keys(layer, field_id, tuple(units), device) + signed(_GOLDEN)
        index_W = torch.arange(num_words, device=device) ^ ~signed(_GOLDEN)
        mix64_tensor(index_W)
        step = max(1, _CHUNK_WORDS // (len(units) * num_words))
        for begin in range(0, len(rows), step):
            part = slice(begin, begin + step)
            # Indexing copies into fresh dense memory [n, H, num_elems], which any word type may view.
            values = kv_cache[block_ids[part], :, slots[part], start : start + num_elems]
            # Flat: an axis of one may keep a stride that no other word type can have.
            words = values.reshape(-1).view(word_dtype).view(*values.shape[:2], -1).to(torch.int64)
            not_finite |= (((words & mask) + bit) & signed(mask + bit)).any()
            key_nH = mix64_tensor(key_H ^ rows[part].unsqueeze(1))
            words ^= key_nH.unsqueeze(2) + index_W
            out[f].index_add_(1, groups[part], mix64_tensor(words).sum(2).T)
    return out


def word_bytes(row_bytes: int) -> int:
    """Size of the words that a field's row is read in."""
    return next(size for size in _WORD_DTYPES if row_bytes % size == 0)


def signed(x: int) -> int:
    """Read the bits of the unsigned x as an int64."""
    return x - (1 << 64) if x >> 63 else x
