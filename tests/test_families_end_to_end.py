"""Every family's greedy tokens against transformers: aggregated and handed over, all TP sizes and chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rayk.engine.build import ThreadEngine
from rayk.kv.layout import LAYOUTS
from rayk.oracle.tiny import HYBRID, LINEAR_ROPE, YARN
from rayk.types.config import EngineConfig
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.families import ATTENTION
from tests.pd import NAN_POISON, POISON, Pair, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "qwen3-hybrid": ("qwen3", {"overrides": dict(HYBRID)}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "phi3": ("phi3", {}),
    "cohere2": ("cohere2", {}),
    "llama-linear": ("llama", {"overrides": dict(LINEAR_ROPE)}),
    "qwen3-yarn": ("qwen3", {"overrides": dict(YARN)}),
}
WHOLE = frozenset({"llama", "qwen2", "qwen3", "mistral", "qwen3-hybrid"})
"""Models of which every cell runs in `make test`. Of the others, one chunk size per TP setting is marked
slow: every TP setting and every chunk size, but not every combination."""
VARIANTS = frozenset({"gemma2", "llama-linear", "qwen3-yarn"})
"""Of which two are."""
# cohere2's layers make four groups of blocks, which the whole prompt of 300 tokens fills at once.
NUM_BLOCKS = {"cohere2": 96}
CHUNKS = {"chunk7": 7, "chunk64": 64, "whole": 512}
AGGREGATED = (1, 2, 4)
DISAGGREGATED = ((1, 2), (2, 1), (4, 2), (2, 4))
TP_SETTINGS: tuple[tuple[int, ...], ...] = (*((n,) for n in AGGREGATED), *DISAGGREGATED)


class Cell(NamedTuple):
    """One run of the sweep."""

    model: str
    tp: tuple[int, ...]
    chunk: str
    layouts: tuple[str, ...]
    poison: int


def is_slow(model: str, tp: int, chunk: int) -> bool:
    """Whether the cell of TP setting number `tp` and chunk size number `chunk` is left to the slow run."""
    if model in WHOLE:
        return False
    turn = (list(MODELS).index(model) + tp + chunk) % len(CHUNKS)
    return turn != 0 if model in VARIANTS else turn == 0


def cells() -> list[Any]:
    """Every model x TP x chunk; layouts, and pairs of layouts, take turns."""
    found = []
    names, turns = list(LAYOUTS), {1: 0, 2: 0}
    for model in MODELS:
        for tp_index, tp in enumerate(TP_SETTINGS):
            for chunk_index, chunk in enumerate(CHUNKS):
                # 7 has no factor in common with 36: all pairs come before one comes again.
                turn = turns[len(tp)] * 7 % 36
                turns[len(tp)] += 1
                layouts = (names[turn % 6], names[turn // 6])[: len(tp)]
                cell = Cell(model, tp, chunk, layouts, (POISON, NAN_POISON)[turn % 2])
                label = "to".join(f"tp{n}" for n in tp)
                slow = [pytest.mark.slow] if is_slow(model, tp_index, chunk_index) else []
                name = f"{model}-{label}-{chunk}-{'-'.join(layouts)}"
                found.append(pytest.param(cell, id=name, marks=slow))
    return found


def test_the_sweep_meets_every_layout_and_every_pair() -> None:
    drawn = [p.values[0].layouts for p in cells() if not p.marks]
    assert {d for d in drawn if len(d) == 1} == {(name,) for name in LAYOUTS}
    assert {d for d in drawn if len(d) == 2} == {(a, b) for a in LAYOUTS for b in LAYOUTS}


def test_every_model_meets_every_tp_setting_and_chunk_size_in_every_run() -> None:
    drawn = [p.values[0] for p in cells() if not p.marks]
    for model in MODELS:
        assert {c.tp for c in drawn if c.model == model} == set(TP_SETTINGS)
        assert {c.chunk for c in drawn if c.model == model} == set(CHUNKS)
    assert {c.model for c in drawn} | WHOLE == set(MODELS)
    assert {MODELS[c.model][0] for c in drawn} == set(ATTENTION)


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


@pytest.mark.parametrize("cell", cells())
def test_tokens_equal_those_of_transformers(cell: Cell, answers: Callable[[str], Answers]) -> None:
    path, prompts, expected = answers(cell.model)
    sizes = {"max_batch_tokens": CHUNKS[cell.chunk], "num_blocks": NUM_BLOCKS.get(cell.model, 64)}
    if len(cell.tp) == 1:
        config = EngineConfig(model=str(path), tp=cell.tp[0], layout=cell.layouts[0], **sizes)
        with ThreadEngine(config, poison=cell.poison) as engine:
            requests = [make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(prompts)]
            done = engine.generate(requests)
            engine.leader.check_integrity()
        assert [d.error for d in done] == [None] * len(prompts)
        assert [d.token_ids for d in done] == expected
        return
    with Pair.open(path, tp=cell.tp, layouts=cell.layouts, **sizes) as pair:  # type: ignore[arg-type]
        assert pair.generate(prompts, NUM_TOKENS) == expected
        pair.check_all_free()
