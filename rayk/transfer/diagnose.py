"""Naming the first wrong byte and what went wrong, from the raw rows of both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rayk.transfer.verify import LayerView, Rows
from rayk.types.errors import KVMismatch

Bytes = npt.NDArray[np.uint8]
MAX_ROW_SHIFT = 64
"""Token shifts that are looked for."""


@dataclass(frozen=True, eq=False)
class _Difference:
    """The first wrong (field, unit): its rows on both sides, and everything of the producer's layer."""

    field: str
    unit: int
    expected: Bytes
    found: Bytes
    wrong_rows: npt.NDArray[np.int64]
    """Indices of differing rows, ascending."""
    first_token: int
    """Token position of row 0."""
    block_size: int
    all_expected: Rows
    all_found: Rows

    @property
    def wrong_found(self) -> Bytes:
        """Only the differing rows."""
        return self.found[self.wrong_rows]


def merge_rows(parts: Mapping[int, Rows], sources: Mapping[int, int]) -> Rows:
    """One layer of a whole producer engine: `parts` by producer rank, `sources`: unit -> elected rank.

    Units nobody here reads are taken from any rank that holds them (they only help to classify).
    """
    merged: Rows = {}
    for rank, rows in parts.items():
        for (name, unit), values in rows.items():
            if sources.get(unit, rank) == rank:
                merged.setdefault((name, unit), values)
    return merged


def first_difference(
    request_id: str, view: LayerView, num_tokens: int, expected: Rows, found: Rows
) -> KVMismatch | None:
    """Compare one layer's live rows byte by byte; None when all are equal.

    `expected` holds every unit of the producer's layer, `found` this rank's.
    """
    live = view.group.spec.live_rows(num_tokens)
    num_wrong = sum(int((expected[key] != values).sum()) for key, values in found.items())
    if num_wrong == 0:
        return None
    order = [(name, unit) for name, _, _ in view.fields for unit in sorted(view.head_ids)]
    name, unit = next(key for key in order if not np.array_equal(expected[key], found[key]))
    theirs, ours = expected[name, unit], found[name, unit]
    wrong_rows = np.flatnonzero((theirs != ours).any(axis=1))
    difference = _Difference(
        name, unit, theirs, ours, wrong_rows, live.start, view.group.spec.block_size, expected, found
    )
    return KVMismatch(
        request_id,
        view.layer,
        view.group.index,
        name,
        unit,
        live.start + int(wrong_rows[0]),
        classify(difference),
        num_bytes_checked=sum(v.size for v in found.values()),
        num_bytes_mismatched=num_wrong,
    )


def classify(difference: _Difference) -> str:
    """The first explanation that fits all wrong rows of the first wrong (field, unit)."""
    for explain in _EXPLANATIONS:
        text = explain(difference)
        if text is not None:
            return text
    first, last = _wrong_tokens(difference)
    return f"other content in {len(difference.wrong_rows)} rows between tokens {first} and {last}"


def _flipped_bit(d: _Difference) -> str | None:
    bits = np.unpackbits(d.expected ^ d.found)
    if bits.sum() != 1:
        return None
    row, byte = (int(i[0]) for i in np.nonzero(d.expected != d.found))
    return f"one flipped bit in byte {byte} of token {d.first_token + row}"


def _swapped_fields(d: _Difference) -> str | None:
    for name, unit in d.all_expected:
        if name == d.field or unit != d.unit:
            continue
        other = d.all_expected[name, unit]
        if other.shape == d.expected.shape and np.array_equal(d.wrong_found, other[d.wrong_rows]):
            mine = d.all_found.get((name, unit))
            if mine is not None and np.array_equal(mine[d.wrong_rows], d.expected[d.wrong_rows]):
                return f"{d.field.upper()} and {name.upper()} swapped"
            return f"{d.field.upper()} holds {name.upper()}"
    return None


def _other_head(d: _Difference) -> str | None:
    for (name, unit), other in d.all_expected.items():
        if name == d.field and unit != d.unit and np.array_equal(d.wrong_found, other[d.wrong_rows]):
            return f"head {d.unit} holds head {unit} of the producer"
    return None


def _never_written(d: _Difference) -> str | None:
    values = np.unique(d.wrong_found)
    if len(values) > 1:
        return None
    first, last = _wrong_tokens(d)
    return f"{_blocks(d)}never written: tokens {first} to {last} hold only 0x{int(values[0]):02x}"


def _shifted_rows(d: _Difference) -> str | None:
    num_rows = len(d.expected)
    for shift in sorted(range(-MAX_ROW_SHIFT, MAX_ROW_SHIFT + 1), key=abs):
        sources = d.wrong_rows + shift
        inside = (sources >= 0) & (sources < num_rows)
        # At an edge some wrong rows have no counterpart; most must have one.
        if shift == 0 or inside.sum() * 2 <= len(sources):
            continue
        if np.array_equal(d.found[d.wrong_rows[inside]], d.expected[sources[inside]]):
            return f"rows shifted: token t holds token t{shift:+d}"
    return None


def _shifted_bytes(d: _Difference) -> str | None:
    row_bytes = d.expected.shape[1]
    wrong = d.expected[d.wrong_rows]
    for shift in range(1, row_bytes // 2 + 1):
        if np.array_equal(d.wrong_found[:, :-shift], wrong[:, shift:]):
            return f"bytes shifted: byte b holds byte b+{shift}"
        if np.array_equal(d.wrong_found[:, shift:], wrong[:, :-shift]):
            return f"bytes shifted: byte b holds byte b-{shift}"
    return None


def _missing_block(d: _Difference) -> str | None:
    """Foreign content that fills whole blocks (up to the sequence's end)."""
    blocks = _blocks(d)
    if not blocks:
        return None
    first, last = _wrong_tokens(d)
    return f"{blocks}missing: tokens {first} to {last} hold stale or foreign content"


def _blocks(d: _Difference) -> str:
    """'block i ' or 'blocks i to j ' of the sequence if exactly whole blocks are wrong, else ''."""
    first, last = _wrong_tokens(d)
    end = d.first_token + len(d.expected) - 1
    is_run = last - first + 1 == len(d.wrong_rows)
    starts = first % d.block_size == 0 or first == d.first_token
    if not (is_run and starts and (last == end or (last + 1) % d.block_size == 0)):
        return ""
    i, j = first // d.block_size, last // d.block_size
    return f"block {i} of the sequence " if i == j else f"blocks {i} to {j} of the sequence "


def _wrong_tokens(d: _Difference) -> tuple[int, int]:
    return d.first_token + int(d.wrong_rows[0]), d.first_token + int(d.wrong_rows[-1])


_EXPLANATIONS: tuple[Callable[[_Difference], str | None], ...] = (
    _flipped_bit,
    _never_written,
    _swapped_fields,
    _other_head,
    _shifted_rows,
    _shifted_bytes,
    _missing_block,
)
