"""Naming the first wrong byte and what went wrong, from the raw rows of both sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rayk.kv.caches import TORCH_DTYPES
from rayk.kv.fields import ITEMSIZE, PageField
from rayk.transfer.layer_view import LayerView
from rayk.transfer.verify import Rows
from rayk.types.errors import KVMismatch

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
MAX_ROW_SHIFT = 64
"""Token shifts that are looked for."""
MAX_PARTS = 16
MAX_FOREIGN_ROWS = 16
MIN_DISTINCT = 16
"""Values that a block must have to be known again in another order: few values, zeros above all, prove
nothing."""
_FOREIGN, _OTHER = "stale or foreign content", "other content"
MIN_PART_BYTES = 8
"""A unit is looked at in up to so many equal parts, none so small that it equals another by chance."""


@dataclass(frozen=True, eq=False)
class _WrongUnit:
    """The first wrong (field, unit): its rows on both sides, and everything of the producer's layer."""

    page_field: PageField
    unit: int
    expected: Bytes
    found: Bytes
    wrong_rows: npt.NDArray[np.int64]
    """Indices of differing rows, ascending."""
    positions: Ints
    """Token positions of the rows."""
    first_row: int
    """Row 0, counted among all that the rank would hold of a sequence."""
    block_rows: int
    """Rows of a block on the rank."""
    all_expected: Rows
    """Rows at the same positions."""
    all_found: Rows
    whole: Bytes
    """What the unit should hold at all live positions from `whole_start` on, whichever rank they lie on."""
    whole_start: int

    @property
    def field(self) -> str:
        """The field's name."""
        return self.page_field.name

    @property
    def wrong_found(self) -> Bytes:
        """The differing rows alone."""
        return self.found[self.wrong_rows]

    @property
    def wrong_expected(self) -> Bytes:
        """What they should hold."""
        return self.expected[self.wrong_rows]


def join_rows(live: Ints, parts: Sequence[tuple[Ints, Rows]]) -> Rows:
    """Return rows at all `live` positions, ascending: of each part those at its positions, zeros at
    others."""
    joined: Rows = {}
    for positions, rows in parts:
        for key, values in rows.items():
            whole = joined.setdefault(key, np.zeros((len(live), values.shape[1]), dtype=np.uint8))
            whole[np.searchsorted(live, positions)] = values
    return joined


def merge_rows(parts: Mapping[int, Rows], sources: Mapping[tuple[str, int], int]) -> Rows:
    """Return one layer of a whole producer engine: `parts` by producer rank, `sources`: (field, unit) ->
    elected rank.

    Units nobody here reads are taken from any rank that holds them (they only help to classify).
    """
    merged: Rows = {}
    for rank, rows in parts.items():
        for key, values in rows.items():
            if sources.get(key, rank) == rank:
                merged.setdefault(key, values)
    return merged


def first_difference(
    request_id: str, view: LayerView, num_tokens: int, expected: Rows, found: Rows, first_row: int = 0
) -> KVMismatch | None:
    """Compare the live rows of one of a layer's caches, from `first_row` on, byte by byte; None when all are
    equal.

    `expected` holds every unit of the producer's layer at every live position, `found` what this rank has.
    """
    positions, start = view.held_rows(num_tokens, first_row), max(first_row, view.live_rows(num_tokens).start)
    whole = expected
    expected = {key: rows[positions - start] for key, rows in whole.items()}
    num_wrong = sum(int((expected[key] != values).sum()) for key, values in found.items())
    if num_wrong == 0:
        return None
    page_fields = view.group.spec.fields()
    order = [(p, u) for p, f in zip(page_fields, view.fields, strict=True) for u in sorted(f.units)]
    page_field, unit = next(
        (p, u) for p, u in order if not np.array_equal(expected[p.name, u], found[p.name, u])
    )
    theirs, ours = expected[page_field.name, unit], found[page_field.name, unit]
    wrong_rows = np.flatnonzero((theirs != ours).any(axis=1))
    difference = _WrongUnit(
        page_field,
        unit,
        theirs,
        ours,
        wrong_rows,
        positions,
        int(view.tokens.local(positions[0])),
        view.tokens.count(view.group.spec.block_size),
        expected,
        found,
        whole[page_field.name, unit],
        start,
    )
    classification = classify(difference)
    return KVMismatch(
        request_id,
        view.layer,
        view.group.index,
        page_field.name,
        unit,
        int(positions[wrong_rows[0]]),
        classification,
        num_bytes_checked=sum(v.size for v in found.values()),
        num_bytes_mismatched=num_wrong,
        unit_name=page_field.unit_name,
        found_rows=_foreign_rows(difference) if _is_foreign(classification) else (),
        is_tail=_is_tail(difference),
        draft_layer=view.group.draft_number(view.layer),
    )


def classify(difference: _WrongUnit) -> str:
    """Return the first explanation that fits all wrong rows of the first wrong (field, unit)."""
    for explain in _EXPLANATIONS:
        text = explain(difference)
        if text is not None:
            return text
    wrong = int((difference.expected != difference.found).sum())
    return f"{_OTHER} in {wrong} bytes of {_tokens(difference)[0]}"


def _is_foreign(classification: str) -> bool:
    """Tell whether wrong rows hold something that this side cannot explain."""
    return classification.endswith(_FOREIGN) or classification.startswith(_OTHER)


def _foreign_rows(d: _WrongUnit) -> tuple[bytes, ...]:
    """Return the first run of wrong rows, a few of them, no more than a block holds."""
    first = int(d.wrong_rows[0])
    run = int(np.argmin(np.append(np.diff(d.wrong_rows), 0) == 1)) + 1
    left = d.block_rows - (d.first_row + first) % d.block_rows
    return tuple(row.tobytes() for row in d.found[first : first + min(run, left, MAX_FOREIGN_ROWS)])


def _is_tail(d: _WrongUnit) -> bool:
    """Rows are right up to some token, and wrong from there on."""
    first = int(d.wrong_rows[0])
    return first > 0 and len(d.wrong_rows) == len(d.expected) - first


def _flipped_bit(d: _WrongUnit) -> str | None:
    bits = np.unpackbits(d.expected ^ d.found)
    if bits.sum() != 1:
        return None
    row, byte = (int(i[0]) for i in np.nonzero(d.expected != d.found))
    return f"one flipped bit in byte {byte} of token {d.positions[row]}"


def _never_written(d: _WrongUnit) -> str | None:
    values = np.unique(d.wrong_found)
    if len(values) > 1:
        return None
    what = "tail not written" if _is_tail(d) else f"{_blocks(d)}never written"
    return f"{what}: {_hold(d)} only 0x{int(values[0]):02x}"


def _swapped_fields(d: _WrongUnit) -> str | None:
    for name, unit in d.all_expected:
        if name == d.field or unit != d.unit:
            continue
        other = d.all_expected[name, unit]
        if other.shape == d.expected.shape and np.array_equal(d.wrong_found, other[d.wrong_rows]):
            mine = d.all_found.get((name, unit))
            if mine is not None and np.array_equal(mine[d.wrong_rows], d.wrong_expected):
                return f"{_label(d.field)} and {_label(name)} swapped"
            return f"{_label(d.field)} holds {_label(name)}"
    return None


def _other_unit(d: _WrongUnit) -> str | None:
    word = d.page_field.unit_name
    for (name, unit), other in d.all_expected.items():
        if name == d.field and unit != d.unit and np.array_equal(d.wrong_found, other[d.wrong_rows]):
            return f"{word} {d.unit} holds {word} {unit} of the producer"
    return None


def _shifted_rows(d: _WrongUnit) -> str | None:
    for shift in sorted(range(-MAX_ROW_SHIFT, MAX_ROW_SHIFT + 1), key=abs):
        sources = d.positions[d.wrong_rows] + shift - d.whole_start
        inside = (sources >= 0) & (sources < len(d.whole))
        # At an edge some wrong rows have no counterpart; most must have one.
        if shift == 0 or inside.sum() * 2 <= len(sources):
            continue
        if np.array_equal(d.found[d.wrong_rows[inside]], d.whole[sources[inside]]):
            return f"rows shifted: token t holds token t{shift:+d}"
    return None


def _others_rows(d: _WrongUnit) -> str | None:
    """Look for rows that are all of other tokens, each but once, as where the ranks of a side do not deal
    tokens alike."""
    row_of = {row.tobytes(): index for index, row in enumerate(d.whole)}
    held = [row_of.get(row.tobytes()) for row in d.wrong_found]
    if len(row_of) < len(d.whole) or None in held or len(set(held)) < len(held) or held[0] is None:
        return None
    token = int(d.positions[d.wrong_rows[0]])
    return f"rows of other tokens: token {token} holds token {d.whole_start + held[0]}"


def _shifted_taps(d: _WrongUnit) -> str | None:
    """Tell taps of a convolution that moved, whatever came into those that were left free."""
    taps, itemsize = d.page_field.taps, ITEMSIZE[d.page_field.dtype]
    theirs, ours = (
        side.reshape(len(d.wrong_rows), -1, taps, itemsize) if taps else side
        for side in (d.wrong_expected, d.wrong_found)
    )
    for by in range(1, taps):
        how = f"taps shifted by {'one' if by == 1 else by}: tap i of each channel holds tap"
        if np.array_equal(ours[:, :, :-by], theirs[:, :, by:]):
            return f"{how} i+{by}"
        if np.array_equal(ours[:, :, by:], theirs[:, :, :-by]):
            return f"{how} i-{by}"
    return None


def _shifted_bytes(d: _WrongUnit) -> str | None:
    theirs, ours = d.wrong_expected, d.wrong_found
    channel_bytes = d.page_field.taps * ITEMSIZE[d.page_field.dtype]
    for shift in _byte_shifts(theirs[0], ours[0]):
        by = abs(shift)
        later, earlier = (theirs, ours) if shift > 0 else (ours, theirs)
        if np.array_equal(later[:, by:], earlier[:, :-by]):
            if channel_bytes and shift % channel_bytes == 0:
                return f"channels shifted: channel c holds channel c{shift // channel_bytes:+d}"
            return f"bytes shifted: byte b holds byte b{shift:+d}"
    return None


def _byte_shifts(theirs: Bytes, ours: Bytes) -> list[int]:
    """List shifts that may explain a row, up to half of it, the smallest first."""
    most = len(theirs) // 2
    probe = min(8, most)
    found: list[int] = []
    for sign, whole, part in ((1, theirs, ours), (-1, ours, theirs)):
        start, text = part[:probe].tobytes(), whole[: most + probe].tobytes()
        at = text.find(start, 1) if probe else -1
        while at > 0:
            found.append(sign * at)
            at = text.find(start, at + 1)
    return sorted((s for s in found if abs(s) <= most), key=abs)


def _other_dtype(d: _WrongUnit) -> str | None:
    """Look for the right values, stored through a view of another dtype."""
    mine = d.page_field.dtype
    if not TORCH_DTYPES[mine].is_floating_point:
        return None
    values = torch.from_numpy(d.wrong_expected.copy()).view(TORCH_DTYPES[mine])
    for other, dtype in TORCH_DTYPES.items():
        if other == mine or not dtype.is_floating_point:
            continue
        stored = values.to(dtype).view(torch.uint8).numpy()
        size = min(stored.shape[1], d.found.shape[1])
        if np.array_equal(stored[:, :size], d.wrong_found[:, :size]):
            return f"stored through a view of {other}: the page holds {mine}"
    return None


def _sliced(d: _WrongUnit) -> str | None:
    """A unit that a rank needs whole was cut, as if each rank held its share of it."""
    num_elements = d.page_field.row_bytes // ITEMSIZE[d.page_field.dtype]
    most = min(MAX_PARTS, d.page_field.row_bytes // MIN_PART_BYTES)
    for parts in (n for n in range(2, most + 1) if num_elements % n == 0):
        theirs, ours = (side.reshape(len(side), parts, -1) for side in (d.wrong_expected, d.wrong_found))
        how = f"sliced as if sharded {parts} ways: part"
        unit = f"{d.page_field.unit_name} {d.unit}"
        moves = _moves(theirs, ours)
        # All parts by one distance: the row was shifted.
        if len(moves) == 1 or len({i - j for i, j in moves}) > 1:
            return f"{how} {moves[0][0]} of {unit} holds its part {moves[0][1]}"
        if _only_first(theirs, ours):
            return f"{how} 0 of {unit} is all that came"
    return None


def _moves(theirs: Bytes, ours: Bytes) -> list[tuple[int, int]]:
    """Return (i, j): part i, which is wrong, holds part j. Arrays [rows, parts, bytes]."""
    parts = range(theirs.shape[1])
    # Parts of one value, zeros above all, prove nothing.
    wrong = (
        i for i in parts if not np.array_equal(theirs[:, i], ours[:, i]) and len(np.unique(ours[:, i])) > 1
    )
    return [(i, j) for i in wrong for j in parts if np.array_equal(theirs[:, j], ours[:, i])]


def _only_first(theirs: Bytes, ours: Bytes) -> bool:
    """Part 0 is right and the others are not: none of them, and most of their bytes."""
    is_wrong = theirs != ours
    others = is_wrong[:, 1:]
    return not is_wrong[:, 0].any() and bool(others.any(axis=(0, 2)).all()) and others.mean() > 0.5


def _other_order(d: _WrongUnit) -> str | None:
    """Look for blocks that hold the very elements that they should, in other places: of this field, or of all
    fields of the unit together. Of a block that is not full no row shows the other elements."""
    size = d.block_rows
    wrong = (d.first_row + d.wrong_rows) // size
    starts = [int(n) * size - d.first_row for n in np.unique(wrong)]
    full = [range(start, start + size) for start in starts if 0 <= start <= len(d.expected) - size]
    both = [f for f, u in d.all_found if u == d.unit and d.all_expected[f, u].shape == d.expected.shape]
    for fields in ([d.field], both):
        if full and all(_is_reordered(d, fields, rows) for rows in full):
            names = " and ".join(map(_label, fields))
            place = f"tokens {d.positions[full[0].start]} to {d.positions[full[-1].stop - 1]}"
            is_all = len(full) == len(starts)
            others = "" if is_all else "; other wrong tokens are of blocks that are not full"
            return f"same bytes in another order: {place} hold {names} of their blocks rearranged{others}"
    return None


def _is_reordered(d: _WrongUnit, fields: Sequence[str], rows: range) -> bool:
    """Compare the elements of some rows, whatever their order."""
    size = ITEMSIZE[d.page_field.dtype]
    theirs, ours = (
        np.unique(
            np.concatenate([of[f, d.unit][rows.start : rows.stop] for f in fields]).reshape(-1, size),
            axis=0,
            return_counts=True,
        )
        for of in (d.all_expected, d.all_found)
    )
    is_same = all(np.array_equal(a, b) for a, b in zip(theirs, ours, strict=True))
    return is_same and len(theirs[0]) >= MIN_DISTINCT


def _missing_block(d: _WrongUnit) -> str | None:
    """Look for foreign content that fills whole blocks (up to the sequence's end)."""
    blocks = _blocks(d)
    # Where a block is one row, a few wrong bytes of it are not another's content.
    is_most = (d.wrong_expected != d.wrong_found).mean() > 0.5
    if not blocks or not is_most:
        return None
    return f"{blocks}missing: {_hold(d)} {_FOREIGN}"


def _blocks(d: _WrongUnit) -> str:
    """'block i ' or 'blocks i to j ' of the sequence if exactly whole blocks are wrong, else ''."""
    first, last = (d.first_row + int(d.wrong_rows[i]) for i in (0, -1))
    end = d.first_row + len(d.expected) - 1
    is_run = last - first + 1 == len(d.wrong_rows)
    starts = first % d.block_rows == 0 or first == d.first_row
    if not (is_run and starts and (last == end or (last + 1) % d.block_rows == 0)):
        return ""
    i, j = first // d.block_rows, last // d.block_rows
    return f"block {i} of the sequence " if i == j else f"blocks {i} to {j} of the sequence "


def _wrong_tokens(d: _WrongUnit) -> tuple[int, int]:
    return int(d.positions[d.wrong_rows[0]]), int(d.positions[d.wrong_rows[-1]])


def _tokens(d: _WrongUnit) -> tuple[str, str]:
    """Tell which tokens are wrong, and the ending of their verb."""
    first, last = _wrong_tokens(d)
    return (f"token {first}", "s") if first == last else (f"tokens {first} to {last}", "")


def _hold(d: _WrongUnit) -> str:
    tokens, ending = _tokens(d)
    return f"{tokens} hold{ending}"


def _label(field: str) -> str:
    """K and V are known by capitals."""
    return field.upper() if len(field) == 1 else field


_EXPLANATIONS: tuple[Callable[[_WrongUnit], str | None], ...] = (
    _flipped_bit,
    _never_written,
    _swapped_fields,
    _other_unit,
    _shifted_rows,
    _shifted_taps,
    _other_dtype,
    _sliced,
    _shifted_bytes,
    _other_order,
    _others_rows,
    _missing_block,
)
