"""Rows that arrived in the producer's format become rows of the consumer's; and the proof that they did.

Digest 1 covers what arrived, in the wire cache, against the producer's. Then every layer is dequantised and
quantised anew, element by element as the two formats define it (kernels.quantise), and digest 2 of the
consumer's own pages is compared with that of a reference conversion of the same rows.

How far off a converted value is from what the producer keeps: `conversion_bound`. From the value that the
producer quantised, its own format's bound comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from rayk.kernels.quantise import Quantised, dequantise, quantise
from rayk.kv.caches import FieldView
from rayk.kv.format_bounds import Floats, error_bound
from rayk.kv.formats import FORMATS, KVFormat
from rayk.kv.specs import with_block_size
from rayk.transfer.diagnose import first_difference, join_rows
from rayk.transfer.digest_words import whole_sources
from rayk.transfer.handshake import engine_scales
from rayk.transfer.layer_view import LayerView
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.verify import (
    CHUNK_ROWS,
    CanonicalViews,
    Rows,
    compare_digests,
    compute_digests,
    digest_mismatch,
    fetch_rows,
)
from rayk.transfer.wire import WireCache
from rayk.transfer.wire_queue import Queued
from rayk.types.errors import KVMismatch
from rayk.types.rows import TransferRow

Scales = Mapping[int, tuple[float, float]]
"""Layer -> those of keys and values, as a handshake tells them; 1 for layers that are absent."""
Clock = Callable[[], int]


def conversion_bound(source: KVFormat, values: Floats, target: KVFormat, scale: float = 1.0) -> Floats:
    """Return the most by which a converted value is off from `values` [..., elements], those that the
    source's rows stand for. `scale`: the target layer's, where its format has one.

    The target's own bound, and what the way through float32 rounds: 2^-24 of the value.
    """
    float32_error = 2.0**-23 * np.abs(values) if source.is_quantised or target.is_quantised else 0.0
    bound: Floats = error_bound(target, values, scale) * (1 + 2.0**-20) + float32_error
    return bound


@dataclass(frozen=True, eq=False)
class Conversion:
    """Converts from one producer engine's format to this rank's own. Views are in canonical order."""

    wire: CanonicalViews
    own: CanonicalViews
    wire_scales: Scales
    own_scales: Scales

    def __post_init__(self) -> None:
        ours, theirs = ([(v.layer, v.group.spec.part) for v in side] for side in (self.wire, self.own))
        assert ours == theirs, "the same caches on both sides"

    def run(
        self,
        wire_tables: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        num_tokens: int,
        first_row: int = 0,
    ) -> None:
        """Convert a request's live rows, from `first_row` on, into its own blocks."""
        for wire, own in zip(self.wire, self.own, strict=True):
            source = wire.places(wire_tables[wire.group.index], num_tokens, first_row)
            target = own.places(tables[own.group.index], num_tokens, first_row)
            for part in _chunks(len(source[0])):
                rows = _gather(wire, tuple(p[part] for p in source))
                for name, values in self._convert(wire, own, rows).items():
                    _store(own, name, tuple(p[part] for p in target), values)

    def check(
        self,
        request_id: str,
        wire_tables: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        num_tokens: int,
        rows_per_group: int,
        first_row: int = 0,
    ) -> KVMismatch | None:
        """Digest 2: of the own pages, all layers in one launch, against a reference conversion of what
        arrived, layer by layer: nowhere is there memory for a second copy of all of it."""
        what = num_tokens, rows_per_group, first_row
        found = compute_digests(self.own, tables, *what)
        expected = np.zeros_like(found)
        for index in range(len(self.own)):
            view, table = self._reference(index, wire_tables, num_tokens, first_row)
            alone = CanonicalViews([view], self.own.caches, self.own.classes)
            expected += compute_digests(alone, _tables(view, table), *what)
        wrong = compare_digests(self.own, expected[None], found, whole_sources(self.own.lanes), *what)
        if not wrong:
            return None
        mismatch = digest_mismatch(request_id, self.own, wrong, *what)
        mismatch.classification = f"converted wrongly: {mismatch.classification}"
        return mismatch

    def reference_rows(
        self, index: int, wire_tables: Sequence[Sequence[int]], num_tokens: int, first_row: int = 0
    ) -> Rows:
        """Return what the rows of own view `index` should be, by the reference conversion; zeros of tokens
        that are not on this rank."""
        reference, table = self._reference(index, wire_tables, num_tokens, first_row)
        rows = fetch_rows(reference, table, num_tokens, first_row)
        live = reference.live_rows(num_tokens)
        positions = np.arange(max(live.start, first_row), live.stop, dtype=np.int64)
        return join_rows(positions, [(reference.held_rows(num_tokens, first_row), rows)])

    def _reference(
        self, index: int, wire_tables: Sequence[Sequence[int]], num_tokens: int, first_row: int
    ) -> tuple[LayerView, list[int]]:
        """Return a dense cache with a layer's live rows from `first_row` on, and its block table. Its blocks
        are as short as can be: of one token, or of one turn where tokens are dealt."""
        wire, own = self.wire[index], self.own[index]
        source = wire.places(wire_tables[wire.group.index], num_tokens, first_row)
        parts = [
            self._convert(wire, own, _gather(wire, tuple(p[part] for p in source)), impl="reference")
            for part in _chunks(len(source[0]))
        ]
        turn = own.tokens.period
        per_block = own.tokens.count(turn)
        start = max(own.live_rows(num_tokens).start, first_row)
        first_block, before = start // turn, own.tokens.count(start % turn)
        num_blocks = -(-(before + len(source[0])) // per_block)
        group = replace(own.group, spec=with_block_size(own.group.spec, turn))
        views = []
        for seen in own.fields:
            dense = [part[seen.name] for part in parts]
            rows = torch.cat(dense) if dense else seen.view[:0, :, 0]
            values = seen.view.new_zeros(num_blocks * per_block, *rows.shape[1:])
            values[before : before + len(rows)] = rows
            blocks = values.view(num_blocks, per_block, *rows.shape[1:]).transpose(1, 2)
            views.append(FieldView(seen.name, blocks, seen.units))
        table = [0] * first_block + list(range(num_blocks))
        return LayerView(own.layer, group, tuple(views), own.tokens), table

    def _convert(
        self, wire: LayerView, own: LayerView, rows: dict[str, torch.Tensor], impl: str | None = None
    ) -> dict[str, torch.Tensor]:
        """Convert rows [n, units, elements] by field to the own format."""
        if wire.group.spec.dtype == own.group.spec.dtype:
            return rows
        formats = FORMATS[wire.group.spec.dtype], FORMATS[own.group.spec.dtype]
        scales = (side.get(own.layer, (1.0, 1.0)) for side in (self.wire_scales, self.own_scales))
        converted: dict[str, torch.Tensor] = {}
        sides = [name for name in rows if not name.endswith("_scale")]
        for side, wire_scale, own_scale in zip(sides, *scales, strict=True):
            stored = Quantised(rows[side], rows.get(f"{side}_scale"))
            values = dequantise(stored, formats[0], wire_scale, impl=impl)
            made = quantise(values, formats[1], own_scale, impl=impl)
            converted[side] = made.data
            if made.scales is not None:
                converted[f"{side}_scale"] = made.scales
        return converted


@dataclass(eq=False)
class Converting:
    """One request's conversion: it arrives in blocks of the wire cache."""

    conversion: Conversion
    wire: WireCache
    wire_tables: Sequence[Sequence[int]]
    tables: Sequence[Sequence[int]]
    """Tables of the rank's own blocks."""
    first_row: int = 0
    """Rows before it are in the rank's own blocks already."""
    is_wrong: bool = False
    """What arrived was right; what was made of it is not."""

    def finish(
        self, ticket: TransferTicket, rows_per_group: int, rows: Sequence[TransferRow], clock: Clock
    ) -> KVMismatch | None:
        """Convert what arrived and was proven, and prove the result; `rows` are told how long that took."""
        began = clock()
        self.conversion.run(self.wire_tables, self.tables, ticket.num_tokens, self.first_row)
        converted = clock()
        mismatch = self.conversion.check(
            ticket.request_id,
            self.wire_tables,
            self.tables,
            ticket.num_tokens,
            rows_per_group,
            self.first_row,
        )
        self.is_wrong = mismatch is not None
        for row in rows:
            row.convert_ns = converted - began
            row.digest_ns += clock() - converted
        return mismatch

    def diagnose(self, request_id: str, num_tokens: int, first_row: int = 0) -> list[KVMismatch]:
        """Return the first wrong byte of each of the own caches that is not what arrived, converted."""
        found = []
        for index, own in enumerate(self.conversion.own):
            expected = self.conversion.reference_rows(index, self.wire_tables, num_tokens, first_row)
            rows = fetch_rows(own, self.tables[own.group.index], num_tokens, first_row)
            mismatch = first_difference(request_id, own, num_tokens, expected, rows, first_row)
            if mismatch is not None:
                mismatch.classification = f"converted wrongly: {mismatch.classification}"
                mismatch.found_rows = ()  # no row of the producer's
                found.append(mismatch)
        return found

    def give_back(self) -> None:
        """Nothing arrives any more, and nobody looks into it."""
        self.wire.give_back(self.wire_tables)


def begin_converting(queued: Queued, own_scales: Scales) -> Converting:
    """Return what makes rows of the own views of those that arrive in the wire cache, for a request that has
    room there."""
    link, wire = queued.link, queued.link.wire
    assert wire is not None, "nothing is converted"
    conversion = Conversion(link.views, link.own_views, engine_scales(link.producers), own_scales)
    return Converting(conversion, wire, queued.wire_tables, queued.block_tables, queued.first_row)


def _chunks(num_rows: int) -> Iterator[slice]:
    borders = [*range(0, num_rows, CHUNK_ROWS), num_rows]
    return (slice(a, b) for a, b in pairwise(borders))


def _gather(view: LayerView, places: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Gather [n, units, elements] by field."""
    blocks, slots, _ = places
    return {f.name: f.view[blocks, :, slots] for f in view.fields}


def _store(view: LayerView, name: str, places: tuple[torch.Tensor, ...], values: torch.Tensor) -> None:
    """Write rows as bytes: not every dtype can be written to scattered places."""
    blocks, slots, _ = places
    seen = next(f for f in view.fields if f.name == name)
    assert values.dtype == seen.view.dtype, f"{name}: {values.dtype} into a page of {seen.view.dtype}"
    seen.view.view(torch.uint8)[blocks, :, slots] = values.contiguous().view(torch.uint8)


def _tables(view: LayerView, table: list[int]) -> list[list[int]]:
    """Return tables by group index of which only the view's own is used."""
    return [table] * (view.group.index + 1)
