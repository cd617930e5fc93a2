"""Pushed requests: tokens equal transformers', and bytes are those that a pull of them brings.

D decodes only what the digests of both sides prove; over all kinds of caches, pairs of engines that nothing
divides, chunks of a prompt, and layers per write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rayk.engine.build import RequestResult
from rayk.oracle.tiny import HYBRID
from rayk.transfer.options import kept_layers
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.pd import NAN_POISON, Pair, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3-6-2": ("qwen3", {"overrides": {"num_attention_heads": 6, "num_key_value_heads": 2}}),
    "windows": ("qwen3", {"overrides": dict(HYBRID)}),
    "jamba": ("jamba", {}),
    "qwen3_next": ("qwen3_next", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gemma3n": ("gemma3n", {}),
    "llama4": ("llama4", {}),
    "falcon_h1": ("falcon_h1", {}),
}


class Cell(NamedTuple):
    """One pair of engines: (P, D)."""

    model: str
    tp: tuple[int, int] = (1, 1)
    layouts: tuple[str, str] = ("auto", "auto")
    blocks: tuple[int, int] = (16, 16)
    chunk: int = 512
    """Most tokens of a step."""
    push_layers: int | None = None
    settings: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.model}-{self.tp[0]}to{self.tp[1]}-chunk{self.chunk}-layers{self.push_layers}"


CELLS = (
    Cell("qwen3", chunk=64, push_layers=1),
    Cell("qwen3", (1, 2), ("BHLNC", "LBNHC"), (16, 24), 50, 1),
    Cell("qwen3", (2, 1), ("LHBNC", "BLNHC"), (24, 16), 7, 3),
    Cell("qwen3", (2, 4), ("BLHNC", "LBHNC"), (8, 32)),
    Cell("qwen3-6-2", (3, 2), ("LBNHC", "BHLNC"), (16, 24), 40, 2),
    Cell("windows", (2, 1), ("BHLNC", "BLNHC"), (16, 16), 40, 1),
    Cell("windows", (1, 2), blocks=(24, 16), chunk=300, push_layers=2, settings={"hybrid_kv": False}),
    Cell("jamba", (1, 2), ("BHLNC", "BLHNC"), chunk=64, push_layers=1),
    Cell("qwen3_next", (2, 1), chunk=64, push_layers=2),
    Cell("falcon_h1", (2, 1), chunk=64, push_layers=1),
    Cell("deepseek_v3", (1, 2), chunk=32, push_layers=1),
    Cell("gemma3n", (2, 1), chunk=64, push_layers=1, settings={"fast_prefill": True}),
    Cell("llama4", (1, 2), chunk=40, push_layers=1),
)


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


def bytes_moved(done: RequestResult) -> Counter[tuple[int, int, int]]:
    """By (producer rank, consumer rank, group)."""
    rows = done.info["transfers"]
    return Counter({(r.producer_rank, r.consumer_rank, r.group): r.bytes for r in rows})


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_pushed_tokens_and_bytes(cell: Cell, answers: Callable[[str], Answers]) -> None:
    path, prompts, expected = answers(cell.model)
    requests = [make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(prompts)]
    changes: Any = tuple({"block_size": size} for size in cell.blocks)
    found: dict[bool, list[RequestResult]] = {}
    for push in (False, True):
        with Pair.open(
            path,
            tp=cell.tp,
            layouts=cell.layouts,
            changes=changes,
            poison=NAN_POISON,
            num_blocks=192,
            max_batch_tokens=cell.chunk,
            push=push,
            push_layers=cell.push_layers,
            **cell.settings,
        ) as pair:
            found[push] = pair.complete(requests)
            pair.check_all_free()
            num_layers = len(kept_layers(pair.p.engine.ranks[0].caches.geometry))
    assert [d.token_ids for d in found[True]] == expected
    for pulled, pushed in zip(found[False], found[True], strict=True):
        assert pushed.info["num_kv_bytes_checked"] == pulled.info["num_kv_bytes_checked"] > 0
        assert bytes_moved(pushed).keys() == bytes_moved(pulled).keys()
        assert {r.mode for r in pushed.info["transfers"]} == {"push"}
        # More may move than lives: where segments are cut to their live rows is chosen per write.
        assert bytes_moved(pushed).total() >= pushed.info["num_kv_bytes_checked"]
    check_writes(cell, found[True], num_layers)


def check_writes(cell: Cell, done: list[RequestResult], num_layers: int) -> None:
    """Of the longest prompt: as many writes as its layers and chunks ask for, at least."""
    rows = done[-1].info["transfers"]
    per_write = cell.push_layers or rows[0].num_layers_per_write
    assert {r.num_layers_per_write for r in rows} == {per_write}
    assert {r.costs for r in rows} == {"" if cell.push_layers else "as coded"}
    for producer in {r.producer_rank for r in rows}:
        for consumer in {r.consumer_rank for r in rows if r.producer_rank == producer}:
            mine = [r for r in rows if (r.producer_rank, r.consumer_rank) == (producer, consumer)]
            assert sum(r.num_writes for r in mine) >= -(-num_layers // per_write)
