"""Every family's greedy tokens against transformers: aggregated and handed over, all TP sizes and chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rayk.engine.build import ThreadEngine
from rayk.kv.layout import LAYOUTS
from rayk.oracle.tiny import HYBRID
from rayk.types.config import EngineConfig
from tests.answers import NUM_TOKENS, PROMPT_LENGTHS, Answers, make_answers
from tests.families import ATTENTION, GROUPED
from tests.markers import one_per, sweep
from tests.overrides import LINEAR_ROPE, YARN
from tests.pd import NAN_POISON, POISON, Pair, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ATTENTION if family not in GROUPED},
    "qwen3-hybrid": ("qwen3", {"overrides": dict(HYBRID)}),
    "llama-linear": ("llama", {"overrides": dict(LINEAR_ROPE)}),
    "qwen3-yarn": ("qwen3", {"overrides": dict(YARN)}),
}
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
    num_prompts: int
    """Of PROMPT_LENGTHS, the shortest first."""
    scheduling: str
    """Whether steps run ahead: they take turns."""


def cells() -> list[Any]:
    """Every model x TP x chunk; layouts, and pairs of layouts, take turns.

    In `make test-all` each TP setting of a model runs with one chunk size, which take turns. The longest
    prompt, in the smallest chunks, then goes through one cell of a model; the others run again with it among
    the slow ones.
    """
    found = []
    names, turns = list(LAYOUTS), Counter[tuple[int, bool]]()
    for index, model in enumerate(MODELS):
        has_long = False
        for (t, tp), (c, chunk) in product(enumerate(TP_SETTINGS), enumerate(CHUNKS)):
            is_slow = (index + t) % len(CHUNKS) != c
            # The factor has none in common with the number of pairs: all come before one comes again.
            turn = turns[len(tp), is_slow] * (len(names) + 1) % len(names) ** 2
            turns[len(tp), is_slow] += 1
            layouts = (names[turn % len(names)], names[turn // len(names)])[: len(tp)]
            scheduling = ("always", "never")[(index + t + c) % 2]
            poison = (POISON, NAN_POISON)[turn % 2]
            whole = Cell(model, tp, chunk, layouts, poison, len(PROMPT_LENGTHS), scheduling)
            name = f"{model}-{'to'.join(f'tp{n}' for n in tp)}-{chunk}-{'-'.join(layouts)}"
            if is_slow:
                found.append(pytest.param(whole, id=name, marks=[pytest.mark.slow]))
            elif CHUNKS[chunk] > 7 or not has_long:
                has_long |= CHUNKS[chunk] == 7
                found.append(pytest.param(whole, id=name))
            else:
                found.append(pytest.param(whole._replace(num_prompts=2), id=f"{name}-short"))
                found.append(pytest.param(whole, id=name, marks=[pytest.mark.slow]))
    return found


@pytest.mark.parametrize("slow", [False, True])
def test_the_sweep_meets_every_layout_and_every_pair(slow: bool) -> None:
    drawn = [p.values[0].layouts for p in cells() if slow or not p.marks]
    assert {d for d in drawn if len(d) == 1} == {(name,) for name in LAYOUTS}
    assert {d for d in drawn if len(d) == 2} == {(a, b) for a in LAYOUTS for b in LAYOUTS}


def test_every_model_meets_every_tp_setting_and_chunk_size_in_every_run() -> None:
    drawn = [p.values[0] for p in cells() if not p.marks]
    for model in MODELS:
        own = [c for c in drawn if c.model == model]
        assert {c.tp for c in own} == set(TP_SETTINGS)
        assert {c.chunk for c in own if c.num_prompts == len(PROMPT_LENGTHS)} == set(CHUNKS)
    assert {(c.tp, c.chunk) for c in drawn} == set(product(TP_SETTINGS, CHUNKS))
    assert {(c.tp, c.scheduling) for c in drawn} == set(product(TP_SETTINGS, ("always", "never")))
    assert {c.model for c in drawn} == set(MODELS)
    assert {MODELS[c.model][0] for c in drawn} == set(ATTENTION) - set(GROUPED)


def test_the_slow_run_has_every_combination_with_every_prompt() -> None:
    whole = [p.values[0] for p in cells() if p.values[0].num_prompts == len(PROMPT_LENGTHS)]
    assert {(c.model, c.tp, c.chunk) for c in whole} == set(product(MODELS, TP_SETTINGS, CHUNKS))


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


@sweep(3, "cell.model")
@one_per("cell.model")
@pytest.mark.parametrize("cell", cells())
def test_tokens_equal_those_of_transformers(cell: Cell, answers: Callable[[str], Answers]) -> None:
    path, prompts, expected = answers(cell.model)
    prompts, expected = prompts[: cell.num_prompts], expected[: cell.num_prompts]
    sizes = {"max_batch_tokens": CHUNKS[cell.chunk], "num_blocks": NUM_BLOCKS.get(cell.model, 64)}
    settings: Any = {**sizes, "async_scheduling": cell.scheduling}
    if len(cell.tp) == 1:
        config = EngineConfig(model=str(path), tp=cell.tp[0], layout=cell.layouts[0], **settings)
        with ThreadEngine(config, poison=cell.poison) as engine:
            requests = [make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(prompts)]
            done = engine.generate(requests)
            engine.leader.check_integrity()
        assert [d.error for d in done] == [None] * len(prompts)
        assert [d.token_ids for d in done] == expected
        return
    with Pair.open(path, tp=cell.tp, layouts=cell.layouts, **settings) as pair:
        assert pair.generate(prompts, NUM_TOKENS) == expected
        pair.check_all_free()
