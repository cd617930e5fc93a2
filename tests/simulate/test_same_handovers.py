"""Real engines that hand over decide as simulated ones do, turn by turn: batches, blocks, reads, leases."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.models.families import load_config
from rayk.oracle.tiny import HYBRID
from rayk.simulate import cell_arrivals
from rayk.specs import Cell
from rayk.types.rows import TransferRow
from tests.markers import one_per
from tests.simulate.cells import pair_book, pair_cell
from tests.simulate.replay import record, replay

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_blocks": 90},
    "qwen3-hybrid": {"num_blocks": 120},
    "falcon_h1": {"num_blocks": 60, "state_block_size": 64},
}
"""Family -> settings of its decode engines, whose blocks are short."""


def cell_of(path: Path, name: str, tp: tuple[int, int]) -> Cell:
    settings = {"max_batch_tokens": 64, "max_seqs": 4, "prefix_caching": True, "num_blocks": 60}
    decode, states = dict(KINDS[name]), KINDS[name].get("state_block_size")
    return pair_cell(
        load_config(path),
        model=str(path),
        prefill={"tp": tp[0], "block_size": 16},
        decode={"tp": tp[1], "block_size": 8, **decode},
        engine=settings | ({"state_block_size": states} if states else {}),
        dtype="float32",
        sampling={"max_tokens": 14},
    )


def prompts(seed: int, num: int = 14) -> list[tuple[int, ...]]:
    """Some begin alike."""
    draw = random.Random(seed)
    prefixes = [tuple(draw.randrange(3, 200) for _ in range(256)) for _ in range(2)]
    return [
        draw.choice(prefixes)[: draw.choice([0, 8, 256, 256])]
        + tuple(draw.randrange(3, 200) for _ in range(draw.randrange(1, 30)))
        for _ in range(num)
    ]


@pytest.fixture(scope="session")
def model_of(checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        family, _, hybrid = name.partition("-")
        return checkpoint(family, overrides=dict(HYBRID)) if hybrid else checkpoint(family)

    return make


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", list(KINDS))
@one_per()
def test_decisions_are_equal(
    monkeypatch: pytest.MonkeyPatch, model_of: Callable[[str], Path], name: str, tp: tuple[int, int]
) -> None:
    path = model_of(name)
    cell = cell_of(path, name, tp)
    model = load_config(path)
    draw = random.Random(7)
    found = prompts(1)
    due = sorted(draw.randrange(30_000_000) for _ in found)
    lengths = [draw.randrange(1, 15) for _ in found]
    arrivals = cell_arrivals(cell, found, due_ns=due, num_output_tokens=lengths)
    recording = record(
        monkeypatch, cell, model, arrivals, pair_book(cell, spread=0.9), noise=True, seed=3, fast=False
    )
    assert [r.error for r in recording.outcome.requests] == [None] * len(found)
    sides = replay(recording, cell, model)
    for side in sides.values():
        side.turn()
        side.leader.check_integrity()
        assert not side.leader.manager.leases
        side.close()
    real = [row for side in sides.values() for row in side.transfers]
    assert name == "falcon_h1" or any(row.held_bytes for row in real), "decode engines have prefixes"
    assert max(row.stage_ns.get("reserve", 0) for row in recording.outcome.requests) > 2_000_000, (
        "blocks are short"
    )
    assert sorted(map(counted, real)) == sorted(map(counted, recording.outcome.transfers))


def counted(row: TransferRow) -> tuple[Any, ...]:
    """What a read's row says of bytes, not of times."""
    names = "producer_rank consumer_rank group bytes held_bytes num_descriptors num_descriptors_merged staged"
    names += " direct_cost_us staged_cost_us mode purpose verdict"
    return (row.request_id, *(getattr(row, name) for name in names.split()))
