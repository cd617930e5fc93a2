"""The content of every byte, computed from its canonical coordinate alone: independent of layout, block table
and TP size.

A byte is a hash of (request's seed, layer, field, unit, token, byte of the row), so that mixing up layers,
heads, tokens, K and V or requests always shows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayk.kv.fields import FIELD_IDS, PageField

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def content(seed: int, layer: int, field: PageField, unit: int, tokens: range) -> Bytes:
    """uint8 [tokens, row_bytes] of one unit of a field; `tokens` are absolute positions."""
    key = np.uint64(0)
    for part in (seed, layer, FIELD_IDS[field.name], unit):
        key = _mix(np.array([key + np.uint64(part + 1)], dtype=np.uint64))[0]
    rows = _mix(np.arange(tokens.start, tokens.stop, dtype=np.uint64) + key)
    num_words = -(-field.row_bytes // 8)
    words = _mix(rows[:, None] + np.arange(num_words, dtype=np.uint64) * np.uint64(_MULTIPLIERS[0]))
    return words.view(np.uint8).reshape(len(rows), -1)[:, : field.row_bytes]


def _mix(words: Words) -> Words:
    """Spread every bit over the word (the finaliser of splitmix64, public domain)."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(_MULTIPLIERS[0])
        words = (words ^ (words >> np.uint64(30))) * np.uint64(_MULTIPLIERS[1])
        words = (words ^ (words >> np.uint64(27))) * np.uint64(_MULTIPLIERS[2])
        mixed: Words = words ^ (words >> np.uint64(31))
    return mixed
