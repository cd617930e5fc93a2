"""Greedy tokens of models with several attention groups against transformers: chunked and sliding layers,
layers that share keys and values, computed whole or only where logits are wanted.

Handed-over requests are digested on both sides, byte by byte of all that is valid, before D decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rayk.engine.build import ThreadEngine
from rayk.kv.layout import LAYOUTS
from rayk.models.families import load_config
from rayk.types.config import EngineConfig
from tests.answers import NUM_TOKENS, PROMPT_LENGTHS, Answers, make_answers
from tests.markers import one_per, sweep
from tests.pd import NAN_POISON, Pair, make_request
from tests.spec_models import GROUP_MODELS

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (family, {"overrides": dict(values)} if values else {})
    for name, (family, values) in GROUP_MODELS.items()
}
NUM_FAST_LAYERS = {
    "gemma3n": 2,
    "gemma3n-other-streams": 3,
    "llama4": 0,
    "llama4-all-routed": 0,
    "qwen2-reuse": 2,
    "qwen3-hybrid-reuse": 2,
    "gemma3-reuse": 2,
    "qwen3-twice-reused": 2,
}
TP_SETTINGS: tuple[tuple[int, ...], ...] = ((1,), (2,), (4,), (1, 2), (2, 1), (4, 2))
CHUNKS = (7, 64, 512)
"""Tokens of one step at most."""
SWITCHES = tuple(product((False, True), repeat=2))
"""fast_prefill, hybrid_kv; on both sides."""
BLOCKS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"block_size": 8}, {"block_size": 32}),
    ({"block_size": 32}, {"block_size": 8}),
    ({"block_size": 24}, {"block_size": 16, "kernel_block_size": 4}),
)
"""Settings of P and of D (of P where it does all)."""


class Cell(NamedTuple):
    """One run of the sweep."""

    model: str
    tp: tuple[int, ...]
    chunk: int
    fast_prefill: bool
    hybrid_kv: bool
    layouts: tuple[str, ...]
    blocks: int
    scheduling: str
    """Whether steps run ahead."""

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Named values, of which every two are to meet."""
        yield from (("model", self.model), ("tp", self.tp), ("chunk", self.chunk))
        yield from (("fast_prefill", self.fast_prefill), ("hybrid_kv", self.hybrid_kv))
        yield from ((f"layout of {side}", name) for side, name in zip("PD", self.layouts, strict=False))
        yield from (("blocks", self.blocks), ("scheduling", self.scheduling))


def grid() -> Iterator[tuple[Cell, bool]]:
    """Every model x TP x chunk x switches, and whether the cell is in `make test-all`: one per model and TP.

    Chunks, switches, layouts and blocks of those take turns in steps found by trial; the others go on from
    there.
    """
    names = list(LAYOUTS)
    for (m, model), (t, tp) in product(enumerate(MODELS), enumerate(TP_SETTINGS)):
        first_c, first_s = (m + t) % len(CHUNKS), (m + m // 2 + 3 * t + t // 2) % len(SWITCHES)
        at = 3 * m + m // 2 + t, 2 * m + 3 * (m // 2) + 4 * t
        blocks = 3 * m + m // 2 + 2 * t + 3 * (t // 2)
        for c, s in product(range(len(CHUNKS)), range(len(SWITCHES))):
            chunk, switches = CHUNKS[(first_c + c) % len(CHUNKS)], SWITCHES[(first_s + s) % len(SWITCHES)]
            layouts = (names[(at[0] + c + s) % 6], names[(at[1] + 2 * c + 3 * s) % 6])[: len(tp)]
            scheduling = ("always", "never")[(m + t // 2 + c) % 2]
            cell = Cell(model, tp, chunk, *switches, layouts, (blocks + c + s) % len(BLOCKS), scheduling)
            yield cell, c == s == 0


def cells() -> list[Any]:
    """As pytest takes them."""
    found = []
    for cell, quick in grid():
        label = "to".join(f"tp{n}" for n in cell.tp)
        switches = f"{'fast' if cell.fast_prefill else 'all'}-{'own' if cell.hybrid_kv else 'full'}"
        name = f"{cell.model}-{label}-{cell.chunk}-{switches}-{'-'.join(cell.layouts)}-blocks{cell.blocks}"
        found.append(pytest.param(cell, id=name, marks=[] if quick else [pytest.mark.slow]))
    return found


SELDOM = ({"model", "layout of D"}, {"layout of P", "layout of D"}, {"layout of D", "blocks"})
"""Settings of which `make test-all` does not see every two: there are more than cells with a D, or nearly."""


def test_every_two_settings_meet_in_every_run() -> None:
    """Of the whole grid all those that can meet at all; of `make test-all` all but SELDOM."""
    everything, quick = [cell for cell, _ in grid()], [cell for cell, runs in grid() if runs]
    assert len(set(everything)) == len(everything) == 6 * 3 * 4 * len(MODELS)
    values = {setting for cell in everything for setting in cell.settings()}
    possible = {
        frozenset(pair)
        for pair in product(values, values)
        if pair[0][0] != pair[1][0]
        and not any(name == "tp" and len(tp) == 1 and "layout of D" in dict(pair) for name, tp in pair)
    }
    for drawn, excused in ((everything, ()), (quick, SELDOM)):
        met = {frozenset(pair) for cell in drawn for pair in combinations(cell.settings(), 2)}
        missed = [pair for pair in possible - met if {name for name, _ in pair} not in excused]
        assert missed == []
    assert {(c.model, c.fast_prefill, c.hybrid_kv) for c in quick} == {
        (m, *s) for m in MODELS for s in SWITCHES
    }
    assert {(c.tp, c.fast_prefill, c.hybrid_kv) for c in quick} == {
        (t, *s) for t in TP_SETTINGS for s in SWITCHES
    }


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


@pytest.mark.parametrize("model", MODELS)
def test_the_models_are_what_they_are_chosen_for(model: str, answers: Callable[[str], Answers]) -> None:
    """The longest prompt is longer than three windows and chunks."""
    config = load_config(answers(model).path)
    assert len(config.fast_prefill_layers) == NUM_FAST_LAYERS[model]
    local = [size for layer in config.layers for size in (layer.window, layer.chunk) if size is not None]
    assert max(local, default=0) * 3 < max(PROMPT_LENGTHS)


def token_layers(cell: Cell, path: Path, prompts: list[list[int]]) -> tuple[int, int]:
    """Tokens computed, summed over layers: for prompts up to their first tokens, and for the others."""
    config = load_config(path)
    num_fast = len(config.fast_prefill_layers) if cell.fast_prefill else 0
    num_tokens = sum(len(prompt) for prompt in prompts)
    # Of a prompt, only the last token's logits are wanted.
    of_prompts = num_tokens * (config.num_layers - num_fast) + len(prompts) * num_fast
    return of_prompts, len(prompts) * (NUM_TOKENS - 1) * config.num_layers


@sweep(3, "cell.model")
@one_per("cell.model")
@pytest.mark.parametrize("cell", cells())
def test_tokens_equal_those_of_transformers(cell: Cell, answers: Callable[[str], Answers]) -> None:
    path, prompts, expected = answers(cell.model)
    common: dict[str, Any] = {
        "max_batch_tokens": cell.chunk,
        "num_blocks": 192,
        "fast_prefill": cell.fast_prefill,
        "hybrid_kv": cell.hybrid_kv,
        "async_scheduling": cell.scheduling,
    }
    of_prompts, of_outputs = token_layers(cell, path, prompts)
    requests = [make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(prompts)]
    if len(cell.tp) == 1:
        settings = common | BLOCKS[cell.blocks][0]
        config = EngineConfig(model=str(path), tp=cell.tp[0], layout=cell.layouts[0], **settings)
        with ThreadEngine(config, poison=NAN_POISON) as engine:
            done = engine.generate(requests)
            engine.leader.check_integrity()
            assert {rank.num_token_layers for rank in engine.ranks} == {of_prompts + of_outputs}
        assert [d.error for d in done] == [None] * len(prompts)
        assert [d.token_ids for d in done] == expected
        return
    sides: Any = {"tp": cell.tp, "layouts": cell.layouts, "changes": BLOCKS[cell.blocks]}
    with Pair.open(path, poison=NAN_POISON, **sides, **common) as pair:
        done = pair.complete(requests)
        assert [d.token_ids for d in done] == expected
        assert [d.info["num_recomputed_tokens"] for d in done] == [0] * len(prompts)
        assert {rank.num_token_layers for rank in pair.p.engine.ranks} == {of_prompts}
        assert {rank.num_token_layers for rank in pair.d.engine.ranks} == {of_outputs}
        pair.check_all_free()
