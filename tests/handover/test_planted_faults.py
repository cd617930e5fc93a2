"""Faults planted in store_kv, in the plan and in the page map: each is caught and named by coordinate.

store_kv's are P's: both sides hold the same wrong bytes, so digests agree, and the reference's values tell.
The plan's and the map's are wrong copies: the digests tell, and the rows of both sides name the token.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.attention.backends import paged
from rayk.engine.build import ThreadEngine
from rayk.experiments.compare import ValueComparison, compare_values
from rayk.handover.extension import CaptureExtension
from rayk.handover.handover import TransferHandover
from rayk.kernels.store_kv import store_kv
from rayk.kv import maps
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.tiny import HYBRID
from rayk.parallel.shard import EngineShape
from rayk.transfer import plan as plan_module
from rayk.transfer.plan import BlockReads, TransferPlan
from rayk.types.config import EngineConfig
from rayk.types.errors import KVMismatch
from tests.pd import POISON, Pair, make_request

LAYER = 2
"""Where store_kv goes wrong: neither the first nor the last layer."""
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


def prompt_of(path: Path, index: int = 1) -> list[int]:
    prompt: list[int] = read_marker(path)["probes"][index]["prompt"]
    return prompt


# store_kv


def shifted_heads(
    k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, **kw: Any
) -> None:
    store_kv(k.roll(1, 1), v.roll(1, 1), cache, slots, **kw)


def swapped(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, **kw: Any) -> None:
    store_kv(v, k, cache, slots, **kw)


def last_block_dropped(
    k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, **kw: Any
) -> None:
    block = slots // cache.shape[2]
    store_kv(k, v, cache, torch.where(block == block[-1], -1, slots), **kw)


def plant_in_store_kv(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]) -> None:
    """From now on, the named engine's LAYER stores wrongly. Steps call layers in order."""
    calls: dict[str, int] = {}

    def store(*args: Any, **kw: Any) -> None:
        thread = threading.current_thread().name
        count = calls.get(thread, 0)
        calls[thread] = count + 1
        is_wrong = thread.startswith("p") and count % NUM_LAYERS == LAYER
        (fault if is_wrong else store_kv)(*args, **kw)

    monkeypatch.setattr(paged, "store_kv", store)


STORE_FAULTS = {
    "head": (shifted_heads, "k", 0, 0, "head 0 holds head 1"),
    "swap": (swapped, "k", 0, 0, "K holds V of head 0"),
    "block": (last_block_dropped, "k", 0, 32, "5 tokens were never written"),
}


def compare(pair: Pair, captured: list[Any], reference: Any, prompt: list[int]) -> ValueComparison:
    groups = pair.p.engine.ranks[0].plan.groups
    return compare_values("r", captured, reference.caches(prompt), groups, len(prompt))


@pytest.mark.parametrize("fault", STORE_FAULTS)
def test_wrong_stores_are_named_by_the_references_values(
    qwen3: Path, reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plant, field, head, token, why = STORE_FAULTS[fault]
    plant_in_store_kv(monkeypatch, plant)
    prompt = prompt_of(qwen3)
    # As a worker's memory is: what nobody wrote is zero.
    with Pair.open(qwen3, tp=(1, 2), poison=0) as pair:
        request = make_request("r", prompt, 4)
        prefilled = pair.prefill(request, capture=True)
        # The bytes arrive as P has them: no digest can object.
        assert pair.decode(request, prefilled).error is None
        found = compare(pair, prefilled.info["captured"], reference(qwen3), prompt).mismatch
        assert found is not None
        assert (found.layer, found.group, found.field, found.head, found.token) == (
            LAYER,
            0,
            field,
            head,
            token,
        )
        assert why in found.classification
        pair.check_all_free()


def test_a_rank_whose_cut_is_off_by_one_is_named(qwen3: Path, reference: Callable[..., Any]) -> None:
    """TP 2: rank 1 holds what rank 0 should, under its own head's name."""
    prompt = prompt_of(qwen3)
    with Pair.open(qwen3, tp=(2, 1)) as pair:
        captured = pair.prefill(make_request("r", prompt, 4), capture=True).info["captured"]
        assert compare(pair, captured, reference(qwen3), prompt).mismatch is None
        off_by_one = {
            layer: {(name, 1): values for (name, _), values in rows.items()}
            for layer, rows in captured[0].items()
        }
        found = compare(pair, [captured[0], off_by_one], reference(qwen3), prompt).mismatch
        assert found is not None
        assert (found.layer, found.field, found.head, found.token) == (0, "k", 1, 0)
        assert "head 1 holds head 0" in found.classification


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", ["qwen3", "mistral", "hybrid"])
def test_right_stores_equal_the_references_values(
    checkpoint: Callable[..., Path], reference: Callable[..., Any], model: str, tp: int
) -> None:
    path = checkpoint("qwen3", overrides=dict(HYBRID)) if model == "hybrid" else checkpoint(model)
    prompt = prompt_of(path, 2)
    with Pair.open(path, tp=(tp, 1), max_batch_tokens=64) as pair:
        captured = pair.prefill(make_request("r", prompt, 4), capture=True).info["captured"]
        compared = compare(pair, captured, reference(path), prompt)
        assert compared.mismatch is None
        assert compared.max_error < 1e-3
        num_replicas = max(1, tp // 2)
        live = sum(
            len(group.layers) * len(group.spec.live_rows(len(prompt)))
            for group in pair.p.engine.ranks[0].plan.groups
        )
        assert compared.num_values == live * 2 * 2 * 16 * num_replicas, (
            "rows x (K, V) x heads x size x replicas"
        )


def test_an_aggregated_engine_lets_its_rows_be_seen(qwen3: Path, reference: Callable[..., Any]) -> None:
    """Also of a request that has ended when the copy is made."""
    handover = TransferHandover(engine="e", epoch=1, shape=EngineShape())
    config = EngineConfig(model=str(qwen3), num_blocks=64)
    with ThreadEngine(config, make_extension=CaptureExtension, handover=handover) as engine:
        prompt = prompt_of(qwen3)
        events: Any = queue.SimpleQueue()
        handover.submit(make_request("r", prompt, 2), events.put, hand_over=False, capture=True)
        captured = engine.collect(events).info["captured"]
        groups = engine.ranks[0].plan.groups
        kv = reference(qwen3).caches(prompt)
        assert compare_values("r", captured, kv, groups, len(prompt)).mismatch is None


# The plan and the page map


def source_units_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan: every unit is read where the next one lies."""
    real = TransferPlan._pattern

    def pattern(self: TransferPlan, read: Any, *rows: int) -> Any:
        found = real(self, read, *rows)
        field = self.producers[read.producer_rank].groups[read.group].fields[0]
        slot = field.units.index(read.units["k"][0])
        step = ((slot + 1) % len(field.units) - slot) * field.unit_stride
        return replace(found, runs=replace(found.runs, source=found.runs.source + step))

    monkeypatch.setattr(TransferPlan, "_pattern", pattern)


def plan_swaps_k_and_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan: of each (head, token), the first half goes where the second belongs."""
    real = plan_module.match_rows

    def match(source: Any, destination: Any, units: Any, **rows: int) -> maps.Runs:
        runs = real(source, destination, units, **rows)
        size = source.fields[0].field.row_bytes
        pieces = [
            (s + at, d + (at + size if at % (2 * size) == 0 else at - size), size)
            for s, d, n in runs.tuples()
            for at in range(0, n, size)
        ]
        return maps.Runs(*(np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True)))

    monkeypatch.setattr(plan_module, "match_rows", match)


def plan_drops_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TransferPlan.lower

    def lower(self: TransferPlan, *args: Any, **rows: Any) -> list[BlockReads]:
        return [
            replace(r, source_blocks=r.source_blocks[:-1], destination_blocks=r.destination_blocks[:-1])
            for r in real(self, *args, **rows)
        ]

    monkeypatch.setattr(TransferPlan, "lower", lower)


def change_source_rows(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Callable[..., Any], Sequence[Any]], Any]
) -> None:
    """Page map: the source's addresses go wrong. match_rows asks for source and destination in turn."""
    real, calls = maps._rows, [0]
    lock = threading.Lock()

    def match(*args: Any, **kw: Any) -> maps.Runs:
        with lock:
            calls[0] = 0
            return real_match(*args, **kw)

    def rows(*args: Any) -> Any:
        calls[0] += 1
        return change(real, args) if calls[0] % 2 else real(*args)

    real_match = maps.match_rows
    monkeypatch.setattr(maps, "_rows", rows)
    monkeypatch.setattr(plan_module, "match_rows", match)


def map_shifts_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(real: Callable[..., Any], args: Sequence[Any]) -> Any:
        group, field, units, held = args
        others = [field.units[(field.units.index(u) + 1) % len(field.units)] for u in units]
        return real(group, field, others, held)

    change_source_rows(monkeypatch, change)


def map_swaps_k_and_v(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(real: Callable[..., Any], args: Sequence[Any]) -> Any:
        group, field, *rest = args
        other = group.fields[1 - group.fields.index(field)]
        return real(group, other, *rest)

    change_source_rows(monkeypatch, change)


def map_drops_the_last_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map of a block lacks its second half (one kernel block of two)."""
    real = plan_module.match_rows

    def match(source: Any, destination: Any, units: Any, *, num_rows: int, **rows: int) -> maps.Runs:
        return real(source, destination, units, num_rows=num_rows // 2, **rows)

    monkeypatch.setattr(plan_module, "match_rows", match)


COPY_FAULTS = {
    "plan-head": (source_units_shifted, 0, "head 0 holds head 1"),
    "plan-swap": (plan_swaps_k_and_v, 0, "K and V swapped"),
    "plan-block": (plan_drops_the_last_block, 32, "tail not written: tokens 32 to 36"),
    "map-head": (map_shifts_heads, 0, "head 0 holds head 1"),
    "map-swap": (map_swaps_k_and_v, 0, "K and V swapped"),
    "map-block": (map_drops_the_last_rows, 8, "never written"),
}


@pytest.mark.parametrize("layouts", [("BHLNC", "BHLNC"), ("LBNHC", "BLHNC")], ids="-".join)
@pytest.mark.parametrize("fault", COPY_FAULTS)
def test_wrong_copies_are_named_by_the_digests_and_the_rows(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, fault: str, layouts: tuple[str, str]
) -> None:
    plant, token, why = COPY_FAULTS[fault]
    prompt = prompt_of(qwen3)
    plant(monkeypatch)
    with Pair.open(qwen3, tp=(1, 2), layouts=layouts, kernel_block_size=8, poison=POISON) as pair:
        request = make_request("r", prompt, 4)
        prefilled = pair.prefill(request)
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch)
        assert done.token_ids == []
        assert (done.error.layer, done.error.group, done.error.head) == (0, 0, 0)
        ticket: Any = prefilled.payload
        found = pair.diagnose("r", ticket)
        # The rest of the layers is wrong as well; each says so, head by head.
        assert {m.layer for m in found} == set(range(NUM_LAYERS))
        first = found[0]
        assert (first.layer, first.group, first.field, first.head, first.token) == (0, 0, "k", 0, token)
        assert why in first.classification
        pair.d.handover.settle("r")
        pair.check_all_free()
