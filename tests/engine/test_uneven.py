"""Ranks whose query heads read KV heads in part: 6 query and 2 KV heads at TP 3, where rank 1 holds both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.plan import plan_engine
from rayk.models.families import load_config
from rayk.oracle.checkpoint import read_marker
from rayk.types.config import EngineConfig
from tests.pd import NAN_POISON, Pair, make_request

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
LENGTHS = (5, 37)
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", overrides=HEADS)


@pytest.mark.parametrize("tp", [(3, 2), (2, 3), (3, 3), (1, 3), (3, 6)], ids=str)
def test_uneven_shards_give_the_references_tokens(
    path: Path, reference: Callable[..., Any], tp: tuple[int, int]
) -> None:
    """Digests are compared before D decodes; the tokens are transformers'."""
    prompts = [list(probe["prompt"]) for probe in read_marker(path)["probes"]][: len(LENGTHS)]
    assert tuple(map(len, prompts)) == LENGTHS
    expected = [list(out.token_ids) for out in reference(path).generate(prompts, NUM_TOKENS, True)]
    with Pair.open(path, tp=tp, layouts=("BHLNC", "LBNHC"), poison=NAN_POISON) as pair:
        assert pair.generate(prompts, NUM_TOKENS) == expected
        request = make_request("bytes", prompts[1], NUM_TOKENS)
        assert pair.decode(request, pair.prefill(request)).error is None


def test_what_each_rank_holds(path: Path) -> None:
    plan = plan_engine(EngineConfig(model=str(path), tp=3), load_config(path))
    held = [rank.groups[0].fields[0].units for rank in plan.ranks]
    assert held == [(0,), (0, 1), (1,)]
    assert plan.ranks[1].block_bytes == 2 * plan.ranks[0].block_bytes
