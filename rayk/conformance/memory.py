"""One rank's cache under a connector, and a mirror of its expected contents.

Bytes that nobody wrote are POISON. This file plays the engine: it writes a request's KV through the views
that kernels would use, and reads what arrived through them. The rest of the buffer is compared with the
mirror, so that every byte that a connector must not touch is checked too.
"""

from __future__ import annotations

import numpy as np
import torch

from rayk.conformance.oracle import content
from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.caches import CanonicalKVCaches, allocate
from rayk.kv.geometry import GENERATION_BYTES, RankGeometry
from rayk.transfer.connector import KVRequest
from rayk.transfer.connectors import layer_views
from rayk.transfer.diagnose import first_difference
from rayk.transfer.layer_view import LayerView
from rayk.transfer.verify import Rows, fetch_rows

POISON = (0xA5, 0x5A)
"""Initial fill of the (producer's, consumer's) cache."""
REUSED = (0xE7, 0x3C)
"""What the engine writes into blocks that it reuses."""
STAMPS = {
    POISON[0]: "what the producer's memory holds beside the request: read from another place",
    REUSED[
        0
    ]: "what the engine wrote into the producer's blocks once the connector had reported that they may "
    "be reused: reported too early",
    POISON[1]: "what was there before: never written, or reported before the bytes were there",
    REUSED[1]: "what was there before: never written, or reported before the bytes were there",
}


class RankMemory:
    def __init__(self, geometry: RankGeometry, side: int) -> None:
        self._side = side
        poison = np.array(POISON[side], dtype=np.uint8).view(np.int8)
        self.caches: CanonicalKVCaches = allocate(geometry, torch.device("cpu"), fill=int(poison))
        self._mirror = self.caches.buffer.clone()
        self._views = list(layer_views(self.caches))
        self._lent: dict[str, KVRequest] = {}
        self._were_lent: set[int] = set()
        """Blocks that some request has had."""

    def lend(self, request: KVRequest) -> None:
        """Allocate the request's blocks."""
        self._were_lent |= set(self._hand_out(request))
        self._lent[request.request_id] = request

    def fill(self, request: KVRequest, seed: int) -> None:
        """Write the request's live rows, as its layers' kernels would."""
        for view in self._views:
            table = request.block_ids[view.group.index]
            block_ids, rows, _ = view.places(table, request.num_tokens)
            wanted = _held(view, _expected(view, seed, request.num_tokens), request.num_tokens)
            for field in view.fields:
                for slot, unit in enumerate(field.units):
                    raw = torch.from_numpy(wanted[field.name, unit].copy())
                    field.view.view(torch.uint8)[block_ids, slot, rows] = raw
        for start, stop in self._extents(request):
            self._mirror[start:stop] = self.caches.buffer[start:stop]

    def wrong_content(self, request_id: str, seed: int) -> str:
        """Say what is wrong with the request's live rows; empty if every byte is right."""
        request = self._lent[request_id]
        for view in self._views:
            expected = _expected(view, seed, request.num_tokens)
            found = fetch_rows(view, request.block_ids[view.group.index], request.num_tokens)
            mismatch = first_difference(request.request_id, view, request.num_tokens, expected, found)
            if mismatch is not None:
                reason = f"{mismatch} ({mismatch.num_bytes_mismatched} of {mismatch.num_bytes_checked} bytes)"
                return reason + _stamps(_held(view, expected, request.num_tokens), found)
        return ""

    def take_back(self, request_id: str) -> None:
        """Free the request's blocks; the engine reuses and overwrites them at once."""
        request = self._lent.pop(request_id)
        self._hand_out(request)
        stamp = int(np.array(REUSED[self._side], dtype=np.uint8).view(np.int8))
        for start, stop in self._extents(request):
            self.caches.buffer[start:stop] = stamp
            self._mirror[start:stop] = stamp

    def wrong_elsewhere(self) -> str:
        """Say what was written outside lent blocks; empty if nothing was."""
        changed = self.caches.buffer != self._mirror
        for request in self._lent.values():
            for start, stop in self._extents(request):
                changed[start:stop] = False
        places = changed.nonzero().reshape(-1)
        if not len(places):
            return ""
        return f"{len(places)} bytes changed outside the blocks of any request; {self._name(int(places[0]))}"

    def changed_while_lent(self, request_id: str) -> str:
        """Say what a connector changed in blocks of a producer rank, which it only reads."""
        for start, stop in self._extents(self._lent[request_id]):
            changed = (self.caches.buffer[start:stop] != self._mirror[start:stop]).nonzero().reshape(-1)
            if len(changed):
                return f"the connector wrote into blocks that it sends; {self._name(start + int(changed[0]))}"
        return ""

    def _hand_out(self, request: KVRequest) -> list[int]:
        """Bump the generations of the request's blocks, which are returned."""
        blocks = sorted({b for table in request.block_ids for b in table} - {NULL_BLOCK})
        self.caches.generations[blocks] += 1
        start = self.caches.geometry.generations_offset
        self._mirror[start:] = self.caches.buffer[start:]
        return blocks

    def _name(self, byte: int) -> str:
        geometry = self.caches.geometry
        found = int(self.caches.buffer[byte]) & 0xFF
        was = int(self._mirror[byte]) & 0xFF
        what = f"first byte {byte} of the buffer, 0x{was:02x} became 0x{found:02x}"
        if byte >= geometry.generations_offset:
            return f"{what}: generation of block {(byte - geometry.generations_offset) // GENERATION_BYTES}"
        coordinates = geometry.describe(byte)
        if not coordinates:
            return f"{what}: padding"
        c = coordinates[0]
        if any(c.block in table for request in self._lent.values() for table in request.block_ids):
            block = f"block {c.block} of the request"
        elif c.block == NULL_BLOCK:
            block = "the null block"
        elif c.block in self._were_lent:
            block = f"block {c.block}, after its request was reported"
        else:
            block = f"block {c.block}, which no request has had"
        return f"{what}: {block} (layer {c.layer}, {c.field}, unit {c.unit}, row {c.row})"

    def _extents(self, request: KVRequest) -> list[tuple[int, int]]:
        """Byte ranges [start, stop) of the request's blocks in the buffer, group by group."""
        base = self.caches.buffer.data_ptr()
        extents = []
        for references, table in zip(self.caches.references, request.block_ids, strict=True):
            for reference in references:
                tensor = self.caches.tensors[reference.tensor]
                first = tensor.data_ptr() - base + reference.offset
                for block in set(table) - {NULL_BLOCK}:
                    start = first + block * tensor.stride(0)
                    extents.append((start, start + reference.num_bytes))
        return extents


def _expected(view: LayerView, seed: int, num_tokens: int) -> Rows:
    """Return the live rows of every unit of a layer's cache."""
    live = view.live_rows(num_tokens)
    return {
        (field.name, unit): content(seed, view.layer, field, unit, live)
        for field in view.group.spec.fields()
        for unit in range(field.units)
    }


def _held(view: LayerView, rows: Rows, num_tokens: int) -> Rows:
    """Return those of the live rows whose tokens lie on the rank."""
    chosen = view.held_rows(num_tokens) - view.live_rows(num_tokens).start
    return {key: values[chosen] for key, values in rows.items()}


def _stamps(expected: Rows, found: Rows) -> str:
    """Tell where wrong bytes came from, if most of them are a fill of the engine."""
    wrong = [found[key][found[key] != expected[key]] for key in found]
    values, counts = np.unique(np.concatenate(wrong), return_counts=True)
    by_value: dict[int, int] = dict(zip(values.tolist(), counts.tolist(), strict=True))
    # A single byte may equal a stamp by chance, but not most of them.
    told = [text for stamp, text in STAMPS.items() if by_value.get(stamp, 0) * 2 > counts.sum()]
    return f"; they hold {told[0]}" if told else ""
