"""Pairs of engines that nothing divides: TP 3 to 2 and 4 to 6, ranks that share KV heads unevenly, blocks of
16 against 24, and layers grouped otherwise on each side. Tokens equal transformers'; D decodes only what the
digests of both sides prove.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from rayk.oracle.tiny import HYBRID
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.markers import one_per
from tests.pd import NAN_POISON, Pair, make_request

SIX: Mapping[str, Any] = MappingProxyType({"num_attention_heads": 6, "num_key_value_heads": 2})
TWELVE: Mapping[str, Any] = MappingProxyType({"num_attention_heads": 12, "num_key_value_heads": 4})
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-12-4": ("llama", {"overrides": {**TWELVE, "hidden_size": 96}}),
    "qwen3-6-2": ("qwen3", {"overrides": dict(SIX)}),
    "windows-12-4": ("qwen3", {"overrides": {**HYBRID, **TWELVE}}),
}
"""Two layers of `windows` see everything, two a window of 50 tokens."""
KV_HEADS = {
    ("llama-12-4", 3): [(0, 1), (1, 2), (2, 3)],
    ("qwen3-6-2", 3): [(0,), (0, 1), (1,)],
    ("windows-12-4", 6): [(0,), (0, 1), (1,), (2,), (2, 3), (3,)],
}
"""(model, TP size) -> KV heads of each rank, by hand: those that its query heads read."""


class Cell(NamedTuple):
    """One pair of engines: (P, D)."""

    model: str
    tp: tuple[int, int]
    layouts: tuple[str, str]
    blocks: tuple[int, int]
    hybrid_kv: tuple[bool, bool] = (True, True)


CELLS = (
    Cell("llama-12-4", (3, 2), ("BHLNC", "BHLNC"), (16, 24)),
    Cell("llama-12-4", (4, 6), ("LHBNC", "BLNHC"), (24, 16)),
    Cell("llama-12-4", (6, 4), ("BLHNC", "LBHNC"), (16, 24)),
    Cell("qwen3-6-2", (3, 2), ("BLNHC", "LHBNC"), (24, 16)),
    Cell("qwen3-6-2", (2, 3), ("LBNHC", "BHLNC"), (16, 24)),
    Cell("windows-12-4", (3, 2), ("BHLNC", "BLHNC"), (16, 24), (True, False)),
    Cell("windows-12-4", (2, 6), ("LBHNC", "BHLNC"), (24, 16), (False, True)),
    Cell("windows-12-4", (6, 1), ("BLNHC", "LBNHC"), (16, 16), (False, False)),
    Cell("windows-12-4", (1, 3), ("BHLNC", "BHLNC"), (8, 24), (True, True)),
)


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


@one_per("cell.model")
@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.model}-{c.tp[0]}to{c.tp[1]}")
def test_tokens_equal_those_of_transformers(cell: Cell, answers: Callable[[str], Answers]) -> None:
    path, prompts, expected = answers(cell.model)
    sides = zip(cell.blocks, cell.hybrid_kv, strict=True)
    changes: Any = tuple({"block_size": size, "hybrid_kv": hybrid} for size, hybrid in sides)
    requests = [make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(prompts)]
    with Pair.open(
        path,
        tp=cell.tp,
        layouts=cell.layouts,
        changes=changes,
        poison=NAN_POISON,
        num_blocks=128,
        max_batch_tokens=96,
    ) as pair:
        for side, tp, hybrid in zip((pair.p, pair.d), cell.tp, cell.hybrid_kv, strict=True):
            ranks = [rank.caches.geometry for rank in side.engine.ranks]
            kv_heads = KV_HEADS.get((cell.model, tp))
            assert kv_heads is None or [g.groups[0].fields[0].units for g in ranks] == kv_heads
            kinds = {g.group.spec.kind for g in ranks[0].groups}
            assert kinds == ({"full", "sliding"} if hybrid and cell.model == "windows-12-4" else {"full"})
        done = pair.complete(requests)
        assert [d.error for d in done] == [None] * len(prompts)
        assert [d.token_ids for d in done] == expected
        assert [d.info["num_recomputed_tokens"] for d in done] == [0] * len(prompts)
        pair.check_all_free()
