"""Hybrid models' greedy tokens against transformers: every TP setting, chunk size, layout and block size.

Handed-over requests are digested on both sides, byte by byte of all that is valid, before D decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rayk.engine.build import ThreadEngine
from rayk.kv.layout import LAYOUTS
from rayk.oracle.checkpoint import read_marker
from rayk.transfer import local_agent
from rayk.transfer.local_agent import LocalAgent
from rayk.types.config import EngineConfig
from rayk.types.errors import KVMismatch, LayoutVetoed, TransferError
from tests.answers import NUM_TOKENS, PROMPT_LENGTHS, Answers, make_answers
from tests.families import HYBRID
from tests.markers import one_per, sweep, thorough
from tests.overrides import GATE_FIRST, LATENT_YARN, NO_EXPERTS, NO_POSITIONS
from tests.pd import NAN_POISON, POISON, Pair, make_request
from tests.spec_models import ONE_GROUP

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2-one-group": ("mamba2", {"overrides": dict(ONE_GROUP["mamba2"])}),
    "falcon_h1-one-group": ("falcon_h1", {"overrides": dict(ONE_GROUP["falcon_h1"])}),
    "falcon_h1-gate-first": ("falcon_h1", {"overrides": dict(GATE_FIRST)}),
    "granite-no-positions": ("granitemoehybrid", {"overrides": dict(NO_POSITIONS)}),
    "granite-no-experts": ("granitemoehybrid", {"overrides": dict(NO_EXPERTS)}),
    "deepseek_v3-yarn": ("deepseek_v3", {"overrides": dict(LATENT_YARN)}),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {**{f: (f, {}) for f in HYBRID}, **VARIANTS}
TP_SETTINGS: tuple[tuple[int, ...], ...] = ((1,), (2,), (4,), (1, 2), (2, 1), (4, 2), (2, 4))
CHUNKS = {"chunk7": 7, "chunk64": 64, "whole": 512}
BLOCKS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"block_size": 8, "state_block_size": 64}, {"block_size": 32}),
    ({"block_size": 32}, {"block_size": 16, "state_block_size": 48}),
    ({"kernel_block_sizes": 8}, {"state_block_size": 16}),
)
"""Settings of P and of D (of P where it does all): blocks of tokens, of states and of kernels."""
TOKEN_GROUPS = {"mamba2": None, "deepseek_v3": "mla"}
"""The kind of a family's groups that kernels may cut; None without; full in all others."""
ONE_SHAPE = ("mamba2", "mamba2-one-group", "deepseek_v3", "deepseek_v3-yarn")
"""Models whose groups are of one shape, as LHBNC needs it."""


class Cell(NamedTuple):
    """One run of the sweep."""

    model: str
    tp: tuple[int, ...]
    chunk: str
    layouts: tuple[str, ...]
    blocks: int
    poison: int
    num_prompts: int
    """Of PROMPT_LENGTHS, the shortest first."""
    scheduling: str
    """Whether steps run ahead: they take turns."""


def layouts_of(model: str) -> list[str]:
    """Those it can be kept in."""
    return [name for name in LAYOUTS if name != "LHBNC" or model in ONE_SHAPE]


def cells() -> list[Any]:
    """Every model x TP x chunk. The layouts of both sides and the blocks take turns, each in its own step.

    In `make test-all` each TP setting of a family runs with one chunk size, and two settings of a variant; of
    its cells with the smallest chunks one has the longest prompt, the others run again with it among the slow
    ones.
    """
    found = []
    for index, model in enumerate(MODELS):
        names, has_long = layouts_of(model), False
        for (t, tp), (c, chunk) in product(enumerate(TP_SETTINGS), enumerate(CHUNKS)):
            turn = len(CHUNKS) * t + c
            # Steps found by trial: with them all pairs are met, and by each family all on both sides.
            at = turn + 3 * index, turn + 5 * (turn // len(names)) + 4 * index
            layouts = tuple(names[i % len(names)] for i in at)[: len(tp)]
            poison = (POISON, NAN_POISON)[t % 2]
            blocks, scheduling = (t + index) % len(BLOCKS), ("always", "never")[(t + c) % 2]
            cell = Cell(model, tp, chunk, layouts, blocks, poison, len(PROMPT_LENGTHS), scheduling)
            quick = (index + t) % len(CHUNKS) == c and (model not in VARIANTS or t % 4 == index % 4)
            label = "to".join(f"tp{n}" for n in tp)
            name = f"{model}-{label}-{chunk}-{'-'.join(cell.layouts)}-blocks{cell.blocks}"
            if quick and CHUNKS[chunk] == 7 and has_long:
                found.append(pytest.param(cell._replace(num_prompts=2), id=f"{name}-short"))
                quick = False
            has_long |= quick and CHUNKS[chunk] == 7
            found.append(pytest.param(cell, id=name, marks=[] if quick else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize("slow", [False, True])
def test_every_family_meets_all(slow: bool) -> None:
    """Every TP setting, chunk size and kind of blocks; with the slow cells also every layout on each side."""
    drawn = [p.values[0] for p in cells() if slow or not p.marks]
    for family in HYBRID:
        own = [c for c in drawn if c.model == family]
        assert {c.tp for c in own} == set(TP_SETTINGS)
        assert {c.chunk for c in own if c.num_prompts == len(PROMPT_LENGTHS)} == set(CHUNKS)
        assert {c.blocks for c in own} == set(range(len(BLOCKS)))
        assert {c.scheduling for c in own} == {"always", "never"}
        for side in (0, 1):
            met = {c.layouts[side] for c in own if len(c.tp) > side}
            assert met == set(layouts_of(family)) or not slow
    pairs = {c.layouts for c in drawn if len(c.tp) == 2}
    assert len(pairs) >= (36 if slow else 24)
    assert {c.model for c in drawn} == set(MODELS)


def test_the_slow_run_has_every_combination_with_every_prompt() -> None:
    whole = [p.values[0] for p in cells() if p.values[0].num_prompts == len(PROMPT_LENGTHS)]
    assert {(c.model, c.tp, c.chunk) for c in whole} == set(product(MODELS, TP_SETTINGS, CHUNKS))


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


def cut_where_possible(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """`kernel_block_sizes` by the kind of group that the model has; left out where it has none."""
    kind = TOKEN_GROUPS.get(MODELS[model][0], "full")
    others = dict(settings)
    size = others.pop("kernel_block_sizes", None)
    return others if kind is None or size is None else others | {"kernel_block_sizes": ((kind, size),)}


@sweep(3, "cell.model")
@one_per("cell.model")
@pytest.mark.parametrize("cell", cells())
def test_tokens_equal_those_of_transformers(cell: Cell, answers: Callable[[str], Answers]) -> None:
    path, prompts, expected = answers(cell.model)
    prompts, expected = prompts[: cell.num_prompts], expected[: cell.num_prompts]
    sizes = {"max_batch_tokens": CHUNKS[cell.chunk], "num_blocks": 128}
    common: dict[str, Any] = {**sizes, "async_scheduling": cell.scheduling}
    changes = tuple(cut_where_possible(cell.model, settings) for settings in BLOCKS[cell.blocks])
    requests = [make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(prompts)]
    if len(cell.tp) == 1:
        settings = common | changes[0]
        config = EngineConfig(model=str(path), tp=cell.tp[0], layout=cell.layouts[0], **settings)
        with ThreadEngine(config, poison=cell.poison) as engine:
            done = engine.generate(requests)
            engine.leader.check_integrity()
        assert [d.error for d in done] == [None] * len(prompts)
        assert [d.token_ids for d in done] == expected
        return
    sides: Any = {"tp": cell.tp, "layouts": cell.layouts, "changes": changes, "poison": cell.poison}
    with Pair.open(path, **sides, **common) as pair:
        done = pair.complete(requests)
        assert [d.token_ids for d in done] == expected
        assert [d.info["num_recomputed_tokens"] for d in done] == [0] * len(prompts)
        pair.check_all_free()


@pytest.mark.parametrize("model", MODELS)
def test_a_layout_that_cannot_hold_the_model_is_refused_with_the_reason(
    model: str, checkpoint: Callable[..., Path]
) -> None:
    family, options = MODELS[model]
    config = EngineConfig(model=str(checkpoint(family, **options)), layout="LHBNC", num_blocks=16)
    if model in ONE_SHAPE:
        ThreadEngine(config).close()
        return
    with pytest.raises(LayoutVetoed, match="LHBNC holds groups of one shape only"):
        ThreadEngine(config)


class FlippedByte:
    """LocalAgent._copy that changes the first byte of one of the runs it copied, counted over all reads."""

    def __init__(self, run: int | None) -> None:
        self.run = run
        self.num_runs = 0

    def __call__(self, agent: LocalAgent, read: Any) -> Any:
        state = COPY(agent, read)
        local = read.prepared.local
        for index in read.local_indices:
            if self.num_runs == self.run:
                run, block = divmod(int(index), local.num_blocks)
                local_agent._run_view(agent._regions, local, run)[block, 0] ^= 1
            self.num_runs += 1
        return state


COPY = LocalAgent._copy


MANY_RUNS = ("granitemoehybrid", "nemotron_h", "qwen3_next")
"""Left to the slow run: what they keep is kept by others too, or in fewer runs."""


@thorough
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] * (f in MANY_RUNS)) for f in HYBRID]
)
def test_one_wrong_bit_in_any_run_is_caught(
    family: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of KV, latents and states by their digests, of block generations by themselves.

    Where heads lie outside token rows, a run starts with a row that is valid: the first. All layouts, and
    which bytes need not be noticed: tests/transfer/test_flipped_bytes.py.
    """
    path = checkpoint(family)
    prompt = read_marker(path)["probes"][1]["prompt"]
    turn = HYBRID.index(family)
    layouts = ("BHLNC", "BLHNC", "LBHNC")
    pair_of = (layouts[turn % 3], layouts[(turn + turn // 3) % 3])
    # P keeps the blocks of each failed request until its lease ends.
    with Pair.open(path, tp=(2, 1), layouts=pair_of, num_blocks=512) as pair:

        def run(flipped: FlippedByte) -> None:
            monkeypatch.setattr(LocalAgent, "_copy", lambda agent, read: flipped(agent, read))
            pair.generate([prompt], 2)

        clean = FlippedByte(None)
        run(clean)
        assert clean.num_runs > 0
        verdicts = []
        for number in range(clean.num_runs):
            with pytest.raises((KVMismatch, TransferError)) as caught:
                run(FlippedByte(number))
            verdicts.append(caught.type)
            assert caught.type is KVMismatch or "was reused while being read" in str(caught.value)
        assert verdicts.count(KVMismatch) >= clean.num_runs // 2
