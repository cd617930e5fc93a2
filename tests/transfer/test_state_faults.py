"""Planted faults in states: caught by the digests, then named by field, unit and what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayk.kv import maps
from rayk.kv.caches import FieldView
from rayk.kv.fields import ITEMSIZE
from rayk.kv.geometry import FieldGeometry, GroupGeometry
from rayk.transfer import plan as plan_module
from rayk.transfer.layer_view import make_layer_view
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.plan import TransferPlan
from rayk.transfer.staging import StagingSettings
from rayk.types.errors import KVMismatch
from tests.transfer.cluster import Pair, Shape, make_engine
from tests.transfer.test_verify import TOKENS, diagnose, run, where

LAST = TOKENS - 1
"""The position of the state."""
MAMBA = Shape(family="mamba2", tp=(1, 2), layouts=("BHLNC", "BLNHC"))
ONE_GROUP = replace(MAMBA, family="mamba2-1-group")
FALCON = replace(MAMBA, family="falcon_h1", num_blocks=(60, 60))
"""Each layer has attention (group 0) and a state (group 1)."""

Fields = dict[str, FieldGeometry]


def change_source(monkeypatch: pytest.MonkeyPatch, change: Callable[[Fields, FieldGeometry], FieldGeometry]):
    """The map takes another geometry of a field than the source's own: match_rows asks for source and
    destination in turn."""
    original = maps._rows
    calls: list[str] = []

    def rows(group: GroupGeometry, field: FieldGeometry, *args: Any) -> Any:
        calls.append(field.field.name)
        by_name = {f.field.name: f for f in group.fields}
        chosen = change(by_name, field) if len(calls) % 2 == 1 else field
        return original(group, chosen, *args)

    monkeypatch.setattr(maps, "_rows", rows)


def swap_b_and_c(fields: Fields, field: FieldGeometry) -> FieldGeometry:
    other = {"conv_b": "conv_c", "conv_c": "conv_b"}.get(field.field.name)
    return field if other is None else replace(field, offset=fields[other].offset)


def next_tap(fields: Fields, field: FieldGeometry) -> FieldGeometry:
    is_conv = field.field.taps > 0
    return replace(field, offset=field.offset + is_conv * ITEMSIZE[field.field.dtype])


def next_group_of_b(fields: Fields, field: FieldGeometry) -> FieldGeometry:
    is_b = field.field.name == "conv_b"
    return replace(field, offset=field.offset + is_b * field.unit_stride)


def late_states(fields: Fields, field: FieldGeometry) -> FieldGeometry:
    """By a twelfth of a row: each of 12 parts then holds the next, which no slice does."""
    is_state = field.field.name == "ssm"
    return replace(field, offset=field.offset + is_state * 8)


@pytest.mark.parametrize(
    ("shape", "plant", "place", "why"),
    [
        (MAMBA, swap_b_and_c, (0, 0, "conv_b", 0), "conv_b and conv_c swapped"),
        (ONE_GROUP, swap_b_and_c, (0, 0, "conv_b", 0), "conv_b and conv_c swapped"),
        (FALCON, swap_b_and_c, (0, 1, "conv_b", 0), "conv_b and conv_c swapped"),
        (MAMBA, next_tap, (0, 0, "conv_x", 0), "taps shifted by one: tap i of each channel holds tap i+1"),
        (FALCON, next_tap, (0, 1, "conv_x", 0), "taps shifted by one: tap i of each channel holds tap i+1"),
        (MAMBA, next_group_of_b, (0, 0, "conv_b", 0), "group 0 holds group 1 of the producer"),
        (MAMBA, late_states, (0, 0, "ssm", 0), "bytes shifted: byte b holds byte b+8"),
    ],
    ids=["b-c", "b-c-1-group", "b-c-falcon", "tap", "tap-falcon", "group", "late"],
)
@pytest.mark.parametrize("layouts", [("BHLNC", "BLNHC"), ("LBHNC", "BLHNC")], ids="-".join)
def test_faults_of_the_map_are_named(monkeypatch, shape, plant, place, why, layouts):
    change_source(monkeypatch, plant)
    pair, outcomes, tables = run(replace(shape, layouts=layouts))
    found = diagnose(pair, outcomes[0], 0, tables)
    assert where(found) == (*place, LAST)
    assert found.classification == why
    # The other rank's first wrong unit is its own first one (of one group, the same).
    other = diagnose(pair, outcomes[1], 1, tables)
    assert (other.field, other.classification.split()[0]) == (place[2], why.split()[0])


def test_a_state_of_key_heads_is_named(monkeypatch):
    """Gated delta nets: q and k swapped."""

    def swap(fields: Fields, field: FieldGeometry) -> FieldGeometry:
        other = {"conv_q": "conv_k", "conv_k": "conv_q"}.get(field.field.name)
        return field if other is None else replace(field, offset=fields[other].offset)

    change_source(monkeypatch, swap)
    pair, outcomes, tables = run(replace(MAMBA, family="qwen3_next", num_blocks=(60, 60)))
    found = diagnose(pair, outcomes[1], 1, tables)
    assert (found.field, found.head, found.classification) == ("conv_q", 3, "conv_q and conv_k swapped")


def test_latent_and_rope_of_mla_are_named(monkeypatch):
    def late(fields: Fields, field: FieldGeometry) -> FieldGeometry:
        is_rope = field.field.name == "rope"
        return replace(field, offset=field.offset - is_rope * 2)

    change_source(monkeypatch, late)
    pair, outcomes, tables = run(replace(MAMBA, family="deepseek_v3"))
    found = diagnose(pair, outcomes[0], 0, tables)
    assert where(found) == (0, 0, "rope", 0, 0)
    assert found.classification == "bytes shifted: byte b holds byte b-2"


# B and C cut as if each rank held a share of the channels


def share_of_b_and_c(
    reads_part: Callable[[int, int], int], writes_part: Callable[[int, int], int], parts: int
):
    """match_rows that moves one of `parts` of each B and C, and only of one unit: (consumer or producer rank,
    part) by whom is asked."""
    original = plan_module.match_rows

    def match(source: GroupGeometry, destination: GroupGeometry, units: Any, **rows: int) -> maps.Runs:
        whole = {name: own_units for name, own_units in units.items() if name not in ("conv_b", "conv_c")}
        runs = [original(source, destination, whole, **rows)] if whole else []
        for name in {"conv_b", "conv_c"} & set(units):
            cut = original(source, destination, {name: units[name]}, **rows)
            unit_bytes = source.field(name).field.row_bytes
            assert set(cut.lengths.tolist()) == {unit_bytes}, "one run per layer and unit"
            size = unit_bytes // parts
            here, there = reads_part(*_ranks[-1]) * size, writes_part(*_ranks[-1]) * size
            runs.append(
                maps.Runs(cut.source + here, cut.destination + there, np.full_like(cut.lengths, size))
            )
        return maps.Runs(
            *(np.concatenate([getattr(r, c) for r in runs]) for c in ("source", "destination", "lengths"))
        )

    return match


_ranks: list[tuple[int, int]] = []


def know_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the planted match_rows know for whom it works: (producer rank, consumer rank)."""
    original = TransferPlan._pattern

    def pattern(self: TransferPlan, read: Any, *rows: int) -> Any:
        _ranks.append((read.producer_rank, self.consumer.tp_rank))
        return original(self, read, *rows)

    monkeypatch.setattr(TransferPlan, "_pattern", pattern)


def test_b_and_c_read_as_shards_of_a_replica(monkeypatch):
    """D at TP 2 takes its half of what it needs whole, and puts it where a shard of its own would start."""
    know_ranks(monkeypatch)
    halves = share_of_b_and_c(lambda p, d: d, lambda p, d: 0, 2)
    monkeypatch.setattr(plan_module, "match_rows", halves)
    pair, outcomes, tables = run(ONE_GROUP)
    texts = []
    for rank in (0, 1):
        found = diagnose(pair, outcomes[rank], rank, tables)
        assert where(found) == (0, 0, "conv_b", 0, LAST)
        texts.append(found.classification)
    assert texts == [
        "sliced as if sharded 2 ways: part 0 of group 0 is all that came",
        "sliced as if sharded 2 ways: part 0 of group 0 holds its part 1",
    ]
    # x and the states are right.
    assert {w.field_index for o in outcomes.values() for w in o.wrong_words} == {1, 2}


def test_b_and_c_gathered_from_ranks_that_hold_them_whole(monkeypatch):
    """D at TP 1 takes the first half from each of two ranks, as if those were shards."""
    know_ranks(monkeypatch)
    plan = plan_module.plan_transfer

    def from_both(producers: Any, consumer: Any, turn: int = 0) -> TransferPlan:
        good = plan(producers, consumer, turn)
        b_and_c = {"conv_b": (0,), "conv_c": (0,)}
        return replace(good, reads=tuple(replace(r, units={**r.units, **b_and_c}) for r in good.reads))

    monkeypatch.setattr(plan_module, "plan_transfer", from_both)
    monkeypatch.setattr("rayk.transfer.link.plan_transfer", from_both)
    halves = share_of_b_and_c(lambda p, d: 0, lambda p, d: p, 2)
    monkeypatch.setattr(plan_module, "match_rows", halves)
    pair, outcomes, tables = run(replace(ONE_GROUP, tp=(2, 1)))
    found = diagnose(pair, outcomes[0], 0, tables)
    assert where(found) == (0, 0, "conv_b", 0, LAST)
    assert found.classification == "sliced as if sharded 2 ways: part 1 of group 0 holds its part 0"


# What was left in a page


def skip_group(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    original = TransferPlan.lower
    monkeypatch.setattr(
        TransferPlan,
        "lower",
        lambda self, *args, **rows: [r for r in original(self, *args, **rows) if r.group != group],
    )


@pytest.mark.parametrize(("shape", "group"), [(MAMBA, 0), (FALCON, 1)], ids=["mamba2", "falcon_h1"])
def test_a_state_never_written(monkeypatch, shape, group):
    if shape is MAMBA:  # a session reads something
        shape = replace(shape, family="bamba")
    skip_group(monkeypatch, group)
    pair, outcomes, tables = run(shape)
    found = diagnose(pair, outcomes[1], 1, tables)
    assert where(found) == (0, group, "conv_x", 12, LAST)
    assert found.classification == f"block 0 of the sequence never written: token {LAST} holds only 0x5a"


def test_the_state_of_the_previous_request_in_a_reused_page(monkeypatch):
    shape = replace(FALCON, state_block_sizes=(64, 16))
    network = LocalNetwork()
    pair = Pair(*(make_engine(shape, side, lambda n: LocalAgent(n, network)) for side in (0, 1)))
    pair.connect()
    outcomes, _ = pair.transfer(shape.values(TOKENS, seed=1), "old")
    assert all(o.ok for o in outcomes.values())
    skip_group(monkeypatch, 1)
    outcomes, _ = pair.transfer(shape.values(TOKENS, seed=2), "r")
    found = diagnose(pair, outcomes[0], 0, pair.producer.tables(TOKENS))
    assert where(found) == (0, 1, "conv_x", 0, LAST)
    assert found.classification == (
        f"block 1 of the sequence missing: token {LAST} holds stale or foreign content"
    )
    fields = {w.field_index for w in outcomes[0].wrong_words}
    assert fields == {0, 1, 2, 3}, "taps and states alike; attention (group 0) is right"
    assert {w.group for w in outcomes[0].wrong_words} == {1}


# Dtypes


def test_a_view_of_another_dtype_is_refused():
    shape = replace(MAMBA, tp=(1, 1))
    network = LocalNetwork()
    engine = make_engine(shape, 0, lambda n: LocalAgent(n, network))
    (group,) = engine.groups()
    views = {v.name: v for v in engine.views(0, group, 1)}
    good = make_layer_view(1, group, list(views.values())[::-1])
    assert [f.name for f in good.fields] == ["conv_x", "conv_b", "conv_c", "ssm"], "in the page's order"
    ssm = views["ssm"]
    for other in (torch.bfloat16, torch.int32):
        wrong = replace(ssm, view=ssm.view.view(other))
        with pytest.raises(AssertionError, match="layer 1 state, ssm: seen as .*, the page holds float32"):
            make_layer_view(1, group, [*(v for n, v in views.items() if n != "ssm"), wrong])
    narrow = FieldView("ssm", ssm.view[..., :-1], ssm.units)
    with pytest.raises(AssertionError, match="layer 1 state, ssm: rows of 92 bytes, 96"):
        make_layer_view(1, group, [*(v for n, v in views.items() if n != "ssm"), narrow])


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("ssm", torch.bfloat16, "stored through a view of bfloat16: the page holds float32"),
        ("conv_b", torch.float16, "stored through a view of float16: the page holds bfloat16"),
        ("conv_x", torch.float32, "stored through a view of float32: the page holds bfloat16"),
    ],
    ids=lambda v: str(v).split()[0],
)
def test_values_stored_through_a_view_of_another_dtype(name: str, dtype: torch.dtype, why: str):
    """They have landed right; then the consumer rewrites unit 2 of layer 1 in another dtype."""

    class Rewriting(LocalAgent):
        pair: Pair | None = None

        def poll(self, transfer: Any) -> Any:
            state = super().poll(transfer)
            if self.pair is not None and state.name == "DONE":
                engine, self.pair = self.pair.consumer, None
                (group,) = engine.groups()
                view = next(v.view for v in engine.views(0, group, 1) if v.name == name)
                (table,) = engine.tables(TOKENS)
                row = view[table[0], 2, 0]
                as_other = row.to(dtype).view(torch.uint8)[: row.numel() * row.element_size()]
                row.view(torch.uint8)[: len(as_other)] = as_other
            return state

    network = LocalNetwork()
    shape = replace(MAMBA, tp=(1, 1))
    # What it does to pages when a read is done is not to be repacked over.
    direct = StagingSettings("never")
    pair = Pair(*(make_engine(shape, s, lambda n: Rewriting(n, network), staging=direct) for s in (0, 1)))
    pair.connect()
    pair.consumer.agents[0].pair = pair
    outcomes, _ = pair.transfer(shape.values(TOKENS))
    assert isinstance(outcomes[0].error, KVMismatch)
    assert len(outcomes[0].wrong_words) == 1
    found = diagnose(pair, outcomes[0], 0, pair.producer.tables(TOKENS))
    assert where(found) == (1, 0, name, 2, LAST)
    assert found.classification == why


# The guesses themselves: nothing is said that the bytes do not show


def test_a_few_wrong_bytes_of_a_state_are_not_called_foreign():
    class Scratching(LocalAgent):
        pair: Pair | None = None

        def poll(self, transfer: Any) -> Any:
            state = super().poll(transfer)
            if self.pair is not None and state.name == "DONE":
                engine, self.pair = self.pair.consumer, None
                (group,) = engine.groups()
                view = next(v.view for v in engine.views(0, group, 0) if v.name == "ssm")
                (table,) = engine.tables(TOKENS)
                view[table[0], 5, 0, -1] = 123.456
            return state

    network = LocalNetwork()
    shape = replace(MAMBA, tp=(1, 1))
    # What it does to pages when a read is done is not to be repacked over.
    direct = StagingSettings("never")
    pair = Pair(*(make_engine(shape, s, lambda n: Scratching(n, network), staging=direct) for s in (0, 1)))
    pair.connect()
    pair.consumer.agents[0].pair = pair
    outcomes, _ = pair.transfer(shape.values(TOKENS))
    found = diagnose(pair, outcomes[0], 0, pair.producer.tables(TOKENS))
    assert where(found) == (0, 0, "ssm", 5, LAST)
    assert found.classification in {f"other content in {n} bytes of token {LAST}" for n in (3, 4)}
    assert found.num_bytes_mismatched in (3, 4)
