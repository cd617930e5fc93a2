"""Real models: what one engine stored of a prompt, another of any other kind loads and goes on from.

Expected tokens are transformers', and those of the same engine when it computes the prompt itself. Whatever
is moved is digested on both sides, byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rayk.actors.tier_actor import tier_groups
from rayk.engine.build import RequestResult
from rayk.types.config import EngineConfig
from rayk.types.offload import OffloadSettings
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.markers import one_per, slow
from tests.offload.node import Node, NodeEngine
from tests.pd import make_request
from tests.test_quantised_end_to_end import FORMATS_OF, Model, check_forced

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, {})
    for family in (
        *("qwen3", "mistral", "gpt_oss", "gemma3", "llama4", "gemma3n"),
        *("deepseek_v3", "jamba", "mamba2", "granitemoehybrid", "qwen3_next", "falcon_h1"),
    )
}
QUANTISED = {"qwen3-fp8": "fp8", "qwen3-fp8-token-head": "fp8-token-head", "qwen3-nvfp4": "nvfp4"}
NAMES = (*MODELS, *QUANTISED)
STATES = ("jamba", "mamba2", "granitemoehybrid", "qwen3_next", "falcon_h1")
LAYOUTS = ("LBHNC", "BLHNC", "BHLNC")
PRODUCERS = tuple(product((1, 2, 4), LAYOUTS))
CONSUMERS = tuple(product((1, 2, 4), LAYOUTS, (16, 32)))
NUM_CELLS = 30
QUICK = (1, 6, 9, 13, 17, 19, 20, 23)
"""Cells of `make test-all`."""


@dataclass(frozen=True)
class Cell:
    """One that stores, one that loads."""

    model: str
    producer: tuple[int, str]
    consumer: tuple[int, str, int]
    tier: tuple[str, int]

    def __str__(self) -> str:
        return "-".join(map(str, (self.model, *self.producer, "to", *self.consumer, *self.tier)))


def cells() -> list[Cell]:
    """Each in turn, with steps, found by trial, that bring each together with others."""
    tiers = (("BHLNC", 16), ("LBNHC", 16), ("BHLNC", 32))
    return [
        Cell(
            NAMES[i % len(NAMES)],
            PRODUCERS[i % len(PRODUCERS)],
            CONSUMERS[(17 * i + 8 * (i // 18)) % len(CONSUMERS)],
            tiers[(i + i // 15) % len(tiers)],
        )
        for i in range(NUM_CELLS)
    ]


def marked() -> Iterator[Any]:
    for i, cell in enumerate(cells()):
        yield pytest.param(cell, id=str(cell), marks=[] if i in QUICK else [slow])


def test_every_producer_consumer_and_family_is_met() -> None:
    found = cells()
    assert len(set(found)) == NUM_CELLS
    assert {c.producer for c in found} == set(PRODUCERS)
    assert {c.consumer for c in found} == set(CONSUMERS)
    assert {c.model for c in found} == set(NAMES)
    assert {(c.producer[0], c.consumer[0]) for c in found} == set(product((1, 2, 4), repeat=2))
    assert {(c.producer[1], c.consumer[1]) for c in found} == {
        (p[1], c[1]) for p in PRODUCERS for c in CONSUMERS
    }
    quick = [found[i] for i in QUICK]
    for axis in range(2):
        assert {c.producer[axis] for c in quick} == {p[axis] for p in PRODUCERS}
        assert {c.consumer[axis] for c in quick} == {c[axis] for c in CONSUMERS}
    assert {c.consumer[2] for c in quick} == {16, 32}


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


def state_block(model: str, path: Path, tier_block: int) -> int | None:
    """Tokens of a tier's state, where the model has some: an engine that stores keeps one as often."""
    if model not in STATES:
        return None
    settings = OffloadSettings(host_bytes=1, block_size=tier_block)
    groups = tier_groups(EngineConfig(model=str(path), num_blocks=64), settings)
    sizes = {g.spec.block_size for g in groups if not g.spec.has_token_rows}
    assert len(sizes) == 1
    return sizes.pop()


def complete(engine: NodeEngine, name: str, prompt: Sequence[int], num_tokens: int) -> RequestResult:
    (done,) = engine.complete([make_request(name, prompt, num_tokens, logprobs=0)])
    return done


@one_per()
@pytest.mark.parametrize("cell", marked())
def test_tokens_after_a_load_are_those_without(cell: Cell, answers: Callable[[str], Answers]) -> None:
    name = QUANTISED.get(cell.model, "auto")
    path, prompts, expected = answers("qwen3" if cell.model in QUANTISED else cell.model)
    prompt, layout, size = prompts[-1], *cell.tier
    states = state_block(cell.model, path, size)
    sides = (
        {"tp": cell.producer[0], "layout": cell.producer[1], "state_block_size": states},
        dict(zip(("tp", "layout", "block_size"), cell.consumer, strict=True)),
    )
    common = {"num_blocks": 128, **FORMATS_OF[name]}
    with Node.open(path, sides, common=common, layout=layout, block_size=size) as node:
        producer, consumer = node.engines
        cold = complete(consumer, "cold", prompt, NUM_TOKENS)
        assert "num_host_tokens" not in cold.info
        node.settle()
        node.thread.ask(lambda tier: tier.clear())
        first = complete(producer, "first", prompt, NUM_TOKENS)
        node.settle()
        counts = producer.offloading.counts
        assert (counts["stores_failed"], counts["loads"]) == (0, 0)
        assert counts["stores"] >= 1
        assert counts["stored_bytes"] > 0
        before = consumer.offloading.counts.copy()
        done = complete(consumer, "loaded", prompt, NUM_TOKENS)
        node.settle()
        check_loaded(node, done, len(prompt), before)
        status = node.status()
        assert "mismatches" not in status
        assert "store_failures" not in status
    if cell.model in MODELS:
        assert first.token_ids == cold.token_ids == done.token_ids == expected[-1]
        return
    if cell.producer[0] == cell.consumer[0]:
        assert first.token_ids == cold.token_ids == done.token_ids
    check_forced(Model(path, [prompt], {}), [done], (name, name))


def check_loaded(node: Node, done: RequestResult, num_prompt: int, before: Any) -> None:
    """A whole hit, all of which was digested."""
    unit = node.thread.tier.manager.prefixes.unit_tokens  # type: ignore[union-attr]
    num_host = done.info["num_host_tokens"]
    assert num_host == (num_prompt - 1) // unit * unit > 0
    counts = node.engines[1].offloading.counts - before
    assert (counts["loads"], counts["loads_failed"], counts["loaded_tokens"]) == (1, 0, num_host)
    rows = done.info["transfers"]
    assert counts["loaded_bytes"] == sum(row.bytes for row in rows)
    assert {row.consumer_rank for row in rows} == set(range(node.engines[1].engine._config.tp))
    assert {row.verdict for row in rows} == {"OK"}
    assert 0 < done.info["num_kv_bytes_checked"] <= counts["loaded_bytes"]
