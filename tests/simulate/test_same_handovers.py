"""Real engines that hand over decide as simulated ones do, turn by turn: batches, blocks, reads, leases."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.models.config import DecoderConfig
from rayk.models.families import load_config
from rayk.oracle.tiny import HYBRID
from rayk.simulate import SimOutcome, cell_arrivals
from rayk.specs import Cell
from rayk.types.draft_rates import DraftRates
from rayk.types.rows import TransferRow
from tests.markers import one_per
from tests.simulate.cells import pair_book, pair_cell
from tests.simulate.replay import record, replay

STATES = {"falcon_h1": {"state_block_size": 64}}
BLOCKS = {"qwen3": (90, 58), "qwen3-hybrid": (120, 72), "falcon_h1": (60, 14)}
"""Family -> blocks of its decode engines, by which prefixes stay and by which requests wait for others."""
CASES = [(name, tp) for name in BLOCKS for tp in ((1, 1), (2, 1), (1, 2)) if name == "qwen3" or tp != (1, 2)]


def cell_of(path: Path, name: str, tp: tuple[int, int], num_blocks: int, **changes: Any) -> Cell:
    settings = {"max_batch_tokens": 64, "max_seqs": 4, "prefix_caching": True, "num_blocks": 60}
    return pair_cell(
        load_config(path),
        model=str(path),
        prefill={"tp": tp[0], "block_size": 16},
        decode={"tp": tp[1], "block_size": 8, "num_blocks": num_blocks, **STATES.get(name, {})},
        engine=settings | STATES.get(name, {}),
        dtype="float32",
        sampling={"max_tokens": 14},
        **changes,
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


@pytest.mark.parametrize(("name", "tp"), CASES, ids=str)
@one_per()
def test_decisions_are_equal(
    monkeypatch: pytest.MonkeyPatch, model_of: Callable[[str], Path], name: str, tp: tuple[int, int]
) -> None:
    path = model_of(name)
    num_held = max_wait_ns = 0
    for seed, num_blocks in enumerate(BLOCKS[name]):
        cell = cell_of(path, name, tp, num_blocks)
        outcome, real = same(monkeypatch, cell, load_config(path), seed)
        assert sorted(map(counted, real)) == sorted(map(counted, outcome.transfers))
        num_held += sum(row.held_bytes > 0 for row in real)
        max_wait_ns = max(max_wait_ns, *(row.stage_ns.get("reserve", 0) for row in outcome.requests))
    assert num_held or name == "falcon_h1", "decode engines have prefixes"
    assert max_wait_ns > 2_000_000, "blocks are short"


@pytest.mark.parametrize("name", ["qwen3", "falcon_h1"])
@one_per()
def test_decisions_are_equal_where_decode_engines_draft(
    monkeypatch: pytest.MonkeyPatch, model_of: Callable[[str], Path], name: str
) -> None:
    """Real engines verify the simulation's drafts, the states of those that are wrong included."""
    path, rates = model_of(name), DraftRates((0.8, 0.5, 0.3), (0.9, 0.8, 0.8))
    drafts = {"method": "ngram", "num_tokens": 3}
    cell = cell_of(path, name, (1, 1), BLOCKS[name][1] + 4, speculative=drafts)
    outcome, real = same(monkeypatch, cell, load_config(path), 3, rates)
    assert sorted(map(counted, real)) == sorted(map(counted, outcome.transfers))
    drafted, accepted = (
        sum(sum(getattr(row, f"{kind}_by_position")) for row in outcome.requests)
        for kind in ("drafted", "accepted")
    )
    assert drafted > accepted > 20


def same(
    monkeypatch: pytest.MonkeyPatch,
    cell: Cell,
    model: DecoderConfig,
    seed: int,
    drafts: DraftRates | None = None,
) -> tuple[SimOutcome, list[TransferRow]]:
    """Simulate requests, have real engines do the same, and compare all turns; what was simulated, and the
    rows of real reads. `drafts`: how often those of engines that draft are right."""
    draw = random.Random(seed)
    found = prompts(seed)
    due = sorted(draw.randrange(30_000_000) for _ in found)
    lengths = [draw.randrange(1, 15) for _ in found]
    arrivals = cell_arrivals(cell, found, due_ns=due, num_output_tokens=lengths)
    book = pair_book(cell, spread=0.9)
    settings: dict[str, Any] = {"noise": True, "fast": False, "seed": seed, "drafts": drafts}
    recording = record(monkeypatch, cell, model, arrivals, book, **settings)
    assert [row.error for row in recording.outcome.requests] == [None] * len(found)
    sides = replay(recording, cell, model, drafts=drafts, seed=seed)
    for side in sides.values():
        side.turn()
        side.leader.check_integrity()
        assert not side.leader.manager.leases
        side.close()
    return recording.outcome, [row for side in sides.values() for row in side.transfers]


def counted(row: TransferRow) -> tuple[Any, ...]:
    """What a read's row says of bytes, not of times."""
    names = "producer_rank consumer_rank group bytes held_bytes num_descriptors num_descriptors_merged staged"
    names += " direct_cost_us staged_cost_us mode purpose verdict"
    return (row.request_id, *(getattr(row, name) for name in names.split()))
