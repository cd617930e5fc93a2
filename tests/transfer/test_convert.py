"""Conversion on receive: every pair of formats against float64, its proof, and its waiting for room."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch

from rayk.kernels.quantise import Quantised, quantise
from rayk.kv.caches import allocate
from rayk.kv.formats import FORMATS
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec, SlidingWindowSpec
from rayk.parallel.shard import EngineShape
from rayk.transfer import convert, wire
from rayk.transfer.convert import conversion_bound
from rayk.transfer.handshake import describe_cache
from rayk.transfer.layer_view import make_layer_view
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.plan import consecutive_tables
from rayk.transfer.rank import TransferRank
from rayk.transfer.token_classes import ONE_CLASS, TokenClasses, common_classes
from rayk.transfer.verify import fetch_rows
from rayk.types.errors import HandshakeMismatch, KVMismatch, TransferError
from tests.each import each
from tests.markers import one_per
from tests.transfer.cluster import FINGERPRINT

NAMES = ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e4m3_token_head", "nvfp4")
HEADS, HEAD_SIZE, LAYERS, TOKENS, WINDOW = 2, 32, 3, 29, 10
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCALES = (
    {layer: (0.03 * (layer + 1), 0.05 * (layer + 1)) for layer in range(LAYERS)},
    {layer: (0.02 * (layer + 1), 0.07 * (layer + 1)) for layer in range(LAYERS)},
)
"""Of the producer's layers and of the consumer's."""


class Side:
    """An engine without a model: layer 1 slides."""

    def __init__(
        self,
        name: str,
        side: int,
        shape: EngineShape,
        network: LocalNetwork,
        classes: TokenClasses = ONE_CLASS,
        **settings: Any,
    ) -> None:
        block_size, layout = settings.get("block_size", 8), settings.get("layout", "BHLNC")
        common = (block_size, HEADS, HEAD_SIZE, HEAD_SIZE, name, 4)
        specs = {
            (layer, "attention"): SlidingWindowSpec(*common, WINDOW)
            if layer == 1
            else FullAttentionSpec(*common)
            for layer in range(LAYERS)
        }
        self.name, self.side = name, side
        self.groups = group_layers(specs, dcp=shape.dcp)
        self.ranks: list[TransferRank] = []
        for rank in range(shape.num_ranks):
            geometry = plan_rank(
                self.groups,
                LAYOUTS[layout],
                shape=shape,
                rank=rank,
                num_blocks=settings.get("num_blocks", 40),
            )
            caches = allocate(geometry, torch.device("cpu"), fill=0x5A)
            units = geometry.groups[0].fields[0].units
            views = [
                make_layer_view(
                    layer,
                    group,
                    wire.field_views(group, caches.view(layer), {"k": units, "v": units}),
                    shape.share(rank).tokens,
                )
                for group, kept in zip(self.groups, geometry.groups, strict=True)
                for layer in kept.layers
            ]
            agent = LocalAgent(f"{'pd'[side]}{rank}", network, settings.get("delay_polls", 0))
            is_scaled = FORMATS[name].has_layer_scales
            description = describe_cache(
                agent,
                caches,
                engine="pd"[side],
                fingerprint=FINGERPRINT,
                kv_scales=SCALES[side] if is_scaled else {},
                token_classes=classes,
            )
            self.ranks.append(TransferRank(agent, caches, views, description))

    def scale(self, layer: int, of: str) -> float:
        scaled = FORMATS[self.name].has_layer_scales
        return SCALES[self.side][layer]["kv".index(of)] if scaled else 1.0

    def tables(self, first_block: int = 0) -> list[list[int]]:
        plain = consecutive_tables(self.ranks[0]._caches.geometry, TOKENS)
        return [[b + first_block if b else 0 for b in table] for table in plain]

    def write(self, tables: list[list[int]], seed: int = 0) -> None:
        """Random values, quantised as the format says."""
        generator = torch.Generator().manual_seed(seed)
        for layer, of in itertools.product(range(LAYERS), "kv"):
            values = torch.randn(HEADS, TOKENS, HEAD_SIZE, generator=generator)
            values *= torch.rand(HEADS, TOKENS, 1, generator=generator) + 0.1
            stored = quantise(values, FORMATS[self.name], self.scale(layer, of), impl="reference")
            for rank in self.ranks:
                view = next((v for v in rank._views if v.layer == layer), None)
                if view is None:
                    continue
                ids, slots, positions = view.places(tables[view.group.index], TOKENS)
                for field in view.fields:
                    if field.name not in (of, f"{of}_scale"):
                        continue
                    data = stored.data if field.name == of else stored.scales
                    assert data is not None
                    rows = data[list(field.units)][:, positions].transpose(0, 1).contiguous()
                    field.view.view(torch.uint8)[ids, :, slots] = rows.view(torch.uint8)

    def values(self, tables: list[list[int]]) -> dict[tuple[int, str, int], np.ndarray]:
        """(layer, k or v, head) -> what the live rows stand for, float64 [rows, elements]."""
        found: dict[tuple[int, str, int], np.ndarray] = {}
        for rank in self.ranks:
            for view in rank._views:
                rows, live = fetch_rows(view, tables[view.group.index], TOKENS), view.live_rows(TOKENS)
                for (name, unit), raw in rows.items():
                    if name in ("k", "v"):
                        scales = rows.get((f"{name}_scale", unit))
                        whole = found.setdefault(
                            (view.layer, name, unit), np.full((len(live), HEAD_SIZE), np.nan)
                        )
                        at = view.held_rows(TOKENS) - live.start
                        whole[at] = self._decode(view.layer, name, raw, scales)
        return found

    def _decode(self, layer: int, of: str, raw: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        """By what the formats are, in float64."""
        data = torch.from_numpy(np.array(raw))
        if self.name == "nvfp4":
            codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)
            elements = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
            assert scales is not None
            blocks = torch.from_numpy(np.array(scales)).view(torch.float8_e4m3fn).double().numpy()
            return elements * np.repeat(blocks, 16, axis=1) * self.scale(layer, of)
        dtype = torch.float8_e4m3fn if self.name.startswith("fp8") else getattr(torch, self.name)
        values = data.view(dtype).double().numpy()
        if scales is not None:
            return values * torch.from_numpy(np.array(scales)).view(torch.float32).double().numpy()
        return values * self.scale(layer, of)


class Link:
    """A producer connected to a consumer."""

    def __init__(
        self,
        names: tuple[str, str],
        tp: tuple[int, int] = (1, 1),
        *settings: dict[str, Any],
        shapes: tuple[EngineShape, EngineShape] | None = None,
    ) -> None:
        """`shapes`: instead of `tp`."""
        network = LocalNetwork()
        own, shapes = settings or ({}, {}), shapes or (EngineShape(tp[0]), EngineShape(tp[1]))
        classes = common_classes(shapes)
        self.p, self.d = (Side(names[i], i, shapes[i], network, classes, **own[i]) for i in range(2))
        descriptions = [[r.description for r in side.ranks] for side in (self.p, self.d)]
        for rank in (*self.d.ranks, *self.p.ranks):
            rank.connect(*descriptions)

    def ticket(self, tables: list[list[int]], request_id: str = "r") -> Any:
        for rank in self.p.ranks:
            rank.lease(f"lease-{request_id}", time.monotonic_ns() + 60_000_000_000)
        return self.p.ranks[0].make_ticket(
            request_id=request_id,
            lease_id=f"lease-{request_id}",
            num_tokens=TOKENS,
            block_tables=tables,
            digests=[r.digests(TOKENS, tables) for r in self.p.ranks],
        )

    def start(self, ticket: Any, tables: list[list[int]], deadline_s: float = 60.0) -> None:
        for rank in self.d.ranks:
            rank.start(ticket, tables, time.monotonic_ns() + int(deadline_s * 1e9))

    def poll(self) -> list[Any]:
        now = time.monotonic_ns()
        for rank in self.p.ranks:
            rank.poll(now)
        return [o for rank in self.d.ranks for o in rank.poll(now)]

    def finish(self, count: int) -> list[Any]:
        found: list[Any] = []
        until = time.monotonic() + 60
        while len(found) < count:
            assert time.monotonic() < until, f"{len(found)} of {count} outcomes"
            found += self.poll()
        return found

    def run(self) -> tuple[list[Any], list[list[int]], list[list[int]]]:
        """One request: outcomes, and both sides' tables."""
        tables, own = self.p.tables(3), self.d.tables(5)
        self.p.write(tables)
        self.start(self.ticket(tables), own)
        return self.finish(len(self.d.ranks)), tables, own


PAIRS = [(a, b) for a in NAMES for b in NAMES if a != b]


@each("names", PAIRS, ids="-".join)
def test_every_pair_of_formats_is_within_its_bound(names: tuple[str, str]) -> None:
    turn = PAIRS.index(names)
    tp = ((1, 2), (2, 1), (2, 2))[turn % 3]
    layouts = list(LAYOUTS)
    # LHBNC holds groups of one shape only, as these are.
    settings = tuple(
        {"layout": layouts[(turn + 2 * i) % len(layouts)], "block_size": (8, 16, 24)[(turn + i) % 3]}
        for i in range(2)
    )
    link = Link(names, tp, *settings)
    outcomes, tables, own = link.run()
    assert all(o.ok for o in outcomes), outcomes
    assert all(row.convert_ns > 0 for o in outcomes for row in o.rows)
    sent, got = link.p.values(tables), link.d.values(own)
    assert set(sent) == set(got) == set(itertools.product(range(LAYERS), "kv", range(HEADS)))
    for (layer, of, head), values in sent.items():
        found = got[layer, of, head]
        assert len(values) == (TOKENS if layer != 1 else WINDOW - 1)
        scale = link.d.scale(layer, of)
        bound = conversion_bound(FORMATS[names[0]], values, FORMATS[names[1]], scale)
        assert (np.abs(found - values) <= bound).all(), (layer, of, head)
        assert np.abs(found - values).max() <= 0.2 * np.abs(values).max(), "and the bound means something"
    assert (
        link.d.ranks[0]._links["p"].wire.num_free_blocks
        == link.d.ranks[0]._links["p"].wire._pool.num_blocks - 1
    )


ONE = EngineShape()
UNLIKE = {
    "1-4x2": (ONE, EngineShape(4, 2)),
    "4x2-1": (EngineShape(4, 2), ONE),
    "1-4x2-of-blocks": (ONE, EngineShape(4, 2, 8)),
    "4x2-of-blocks-4x2": (EngineShape(4, 2, 8), EngineShape(4, 2)),
    "4x2-4x2-of-2-in-stages": (EngineShape(4, 2), EngineShape(4, 2, 2, (1, 2))),
    "stages-4x2": (EngineShape(1, stages=(2, 1)), EngineShape(4, 2, 4)),
}
"""Two heads, each on two ranks of four, which deal their tokens. Where these are dealt by eights, blocks of 8
tokens arrive in blocks of 16."""


@one_per()
@pytest.mark.parametrize("shapes", UNLIKE.values(), ids=list(UNLIKE))
@pytest.mark.parametrize("names", [("float32", "nvfp4"), ("fp8_e4m3_token_head", "bfloat16")], ids="-".join)
def test_formats_are_converted_whoever_deals_tokens(
    names: tuple[str, str], shapes: tuple[EngineShape, EngineShape]
) -> None:
    link = Link(names, shapes=shapes)
    outcomes, tables, own = link.run()
    assert all(o.ok for o in outcomes), outcomes
    sent, got = link.p.values(tables), link.d.values(own)
    assert set(sent) == set(got) == set(itertools.product(range(LAYERS), "kv", range(HEADS)))
    for (layer, of, head), values in sent.items():
        bound = conversion_bound(FORMATS[names[0]], values, FORMATS[names[1]], link.d.scale(layer, of))
        assert (np.abs(got[layer, of, head] - values) <= bound).all(), (layer, of, head)
    for rank in link.d.ranks:
        wired = rank._links["p"].wire
        assert wired is not None
        assert wired.num_free_blocks == wired._pool.num_blocks - 1


def test_the_bound_is_reached_nearly() -> None:
    """It is no wider than it must be: some value is off by half of it."""
    for names in (("float32", "fp8_e4m3"), ("float32", "nvfp4"), ("float32", "bfloat16")):
        link = Link(names)
        _, tables, own = link.run()
        sent, got = link.p.values(tables), link.d.values(own)
        share = max(
            (
                np.abs(got[k] - v)
                / conversion_bound(FORMATS[names[0]], v, FORMATS[names[1]], link.d.scale(*k[:2]))
            ).max()
            for k, v in sent.items()
        )
        assert 0.5 < share <= 1, names


def test_other_layer_scales_of_one_format_are_refused() -> None:
    """Equal bytes would stand for other values."""
    with pytest.raises(HandshakeMismatch, match="kv_scales"):
        Link(("fp8_e4m3", "fp8_e4m3"))


def test_what_arrives_wrong_is_named_before_it_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(("fp8_e4m3_token_head", "bfloat16"), (1, 1))
    tables, own = link.p.tables(3), link.d.tables(5)
    link.p.write(tables)
    ticket = link.ticket(tables)
    view = next(v for v in link.p.ranks[0]._views if v.layer == 2)
    ids, slots, _ = view.places(tables[view.group.index], TOKENS)
    scales = next(f for f in view.fields if f.name == "v_scale").view.view(torch.uint8)
    scales[ids[7], 1, slots[7], 2] ^= 4
    link.start(ticket, own)
    (outcome,) = link.finish(1)
    assert isinstance(outcome.error, KVMismatch)
    scales[ids[7], 1, slots[7], 2] ^= 4
    fetched = {
        layer: link.p.ranks[0].fetch_rows(layer, g.index, tables[g.index], TOKENS)
        for g in link.p.groups
        for layer in g.layers
    }
    (found,) = link.d.ranks[0].diagnose_all("r", [fetched])
    assert (found.layer, found.field, found.head, found.token) == (2, "v_scale", 1, 7)
    assert found.classification == "one flipped bit in byte 2 of token 7"
    link.d.ranks[0].release_now("r")
    wired = link.d.ranks[0]._links["p"].wire
    assert wired is not None
    assert wired.num_free_blocks == wired._pool.num_blocks - 1


@pytest.mark.parametrize("fault", ["values", "places"])
def test_a_wrong_conversion_is_named(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Digest 1 has nothing to object: what arrived is right."""
    if fault == "values":

        def shifted(values: torch.Tensor, *args: Any, impl: str | None = None) -> Quantised:
            return quantise(values if impl == "reference" else values.roll(1, -1), *args, impl="reference")

        monkeypatch.setattr(convert, "quantise", shifted)
    else:
        real = convert._store

        def store(view: Any, name: str, places: Any, values: torch.Tensor) -> None:
            real(view, name, places, values.roll(1, 0) if view.layer == 2 else values)

        monkeypatch.setattr(convert, "_store", store)
    link = Link(("float32", "fp8_e4m3"), (2, 1))
    outcomes, _, _ = link.run()
    error = outcomes[0].error
    assert isinstance(error, KVMismatch)
    assert error.classification.startswith("converted wrongly: digests differ")
    found = link.d.ranks[0].diagnose_all("r", [{}, {}])
    first = found[0]
    assert (first.layer, first.field, first.head, first.token) == (0 if fault == "values" else 2, "k", 0, 0)
    assert first.classification.startswith("converted wrongly: ")
    if fault == "places":
        assert "rows shifted: token t holds token t-1" in first.classification


def test_a_request_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire cache holds one request; the next begins when it is over, in the order they came."""
    one = sum(len([b for b in t if b]) for t in Link(("float32", "fp8_e4m3")).p.tables())
    monkeypatch.setattr(wire, "num_wire_blocks", lambda *_: 1 + one)
    link = Link(("float32", "fp8_e4m3"), (1, 1), {}, {"delay_polls": 3})
    sent = []
    for i in range(3):
        tables, own = link.p.tables(3 + 7 * i), link.d.tables(5 + 7 * i)
        link.p.write(tables, seed=i)
        link.start(link.ticket(tables, f"r{i}"), own)
        sent.append((tables, own))
    assert len(link.d.ranks[0]._active) == 1
    outcomes = link.finish(3)
    assert [o.request_id for o in outcomes] == ["r0", "r1", "r2"]
    assert all(o.ok for o in outcomes)
    tables, own = sent[0]
    got = link.d.values(own)
    for key, values in link.p.values(tables).items():
        assert np.abs(got[key] - values).max() <= 0.1 * np.abs(values).max()


def test_a_request_that_waits_too_long_or_never_fits_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sum(len([b for b in t if b]) for t in Link(("float32", "fp8_e4m3")).p.tables())
    monkeypatch.setattr(wire, "num_wire_blocks", lambda *_: 1 + one)
    link = Link(("float32", "fp8_e4m3"), (1, 1), {}, {"delay_polls": 1 << 30})
    tables, own = link.p.tables(3), link.d.tables(5)
    link.p.write(tables)
    link.start(link.ticket(tables, "first"), own)
    link.start(link.ticket(tables, "late"), own, deadline_s=0.0)
    link.start(link.ticket(tables, "cancelled"), own)
    link.d.ranks[0].cancel("cancelled")
    found = {o.request_id: o.error for o in link.finish(2)}
    assert isinstance(found["late"], TransferError)
    assert "waiting for room in the wire cache" in str(found["late"])
    assert "cancelled" in str(found["cancelled"])

    monkeypatch.setattr(wire, "num_wire_blocks", lambda *_: one)
    small = Link(("float32", "fp8_e4m3"))
    small.p.write(tables)
    small.start(small.ticket(tables), own)
    (outcome,) = small.finish(1)
    assert f"{TOKENS} tokens arrive in {one} blocks, the wire cache has {one - 1}" in str(outcome.error)
