"""Every family's greedy tokens against transformers: aggregated and handed over, all TP sizes and chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rayk.engine.build import ThreadEngine
from rayk.kv.layout import LAYOUTS
from rayk.oracle.checkpoint import read_marker
from rayk.types.config import EngineConfig
from tests.pd import NAN_POISON, POISON, Pair, make_request

HYBRID = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "qwen3-hybrid": ("qwen3", {"overrides": HYBRID}),
}
CHUNKS = {"chunk7": 7, "chunk64": 64, "whole": 512}
AGGREGATED = (1, 2, 4)
DISAGGREGATED = ((1, 2), (2, 1), (4, 2), (2, 4))
PROMPT_LENGTHS = (5, 37, 300)
NUM_TOKENS = 24


class Cell(NamedTuple):
    """One run of the sweep."""

    model: str
    tp: tuple[int, ...]
    chunk: str
    layouts: tuple[str, ...]
    poison: int


def cells() -> list[Any]:
    """Every model x TP x chunk; layouts, and pairs of layouts, take turns."""
    found = []
    names, turns = list(LAYOUTS), {1: 0, 2: 0}
    for model in MODELS:
        for tp in [(n,) for n in AGGREGATED] + list(DISAGGREGATED):
            for chunk in CHUNKS:
                # 7 has no factor in common with 36: all pairs come before one comes again.
                turn = turns[len(tp)] * 7 % 36
                turns[len(tp)] += 1
                layouts = (names[turn % 6], names[turn // 6])[: len(tp)]
                cell = Cell(model, tp, chunk, layouts, (POISON, NAN_POISON)[turn % 2])
                label = "to".join(f"tp{n}" for n in tp)
                found.append(pytest.param(cell, id=f"{model}-{label}-{chunk}-{'-'.join(layouts)}"))
    return found


def test_the_sweep_meets_every_layout_and_every_pair() -> None:
    drawn = [p.values[0].layouts for p in cells()]
    assert {d for d in drawn if len(d) == 1} == {(name,) for name in LAYOUTS}
    assert {d for d in drawn if len(d) == 2} == {(a, b) for a in LAYOUTS for b in LAYOUTS}


class Answers(NamedTuple):
    """A checkpoint, the prompts and what transformers says."""

    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    made: dict[str, Answers] = {}

    def make(model: str) -> Answers:
        if model not in made:
            family, options = MODELS[model]
            path = checkpoint(family, **options)
            # The prompts that the checkpoint was tuned on: greedy output without near ties.
            prompts = [probe["prompt"] for probe in read_marker(path)["probes"]]
            assert tuple(len(p) for p in prompts) == PROMPT_LENGTHS
            outputs = reference(path).generate(prompts, NUM_TOKENS, ignore_eos=True)
            assert min(min(o.margins) for o in outputs) > 0.03, "no near ties: a wrong token is a bug"
            made[model] = Answers(path, prompts, [list(o.token_ids) for o in outputs])
        return made[model]

    return make


@pytest.mark.parametrize("cell", cells())
def test_tokens_equal_those_of_transformers(cell: Cell, answers: Callable[[str], Answers]) -> None:
    path, prompts, expected = answers(cell.model)
    chunk = CHUNKS[cell.chunk]
    if len(cell.tp) == 1:
        config = EngineConfig(
            model=str(path), tp=cell.tp[0], layout=cell.layouts[0], max_batch_tokens=chunk, num_blocks=64
        )
        with ThreadEngine(config, poison=cell.poison) as engine:
            requests = [make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(prompts)]
            done = engine.generate(requests)
            engine.leader.check_integrity()
        assert [d.error for d in done] == [None] * len(prompts)
        assert [d.token_ids for d in done] == expected
        return
    with Pair.open(path, tp=cell.tp, layouts=cell.layouts, max_batch_tokens=chunk) as pair:  # type: ignore[arg-type]
        assert pair.generate(prompts, NUM_TOKENS) == expected
        pair.check_all_free()
