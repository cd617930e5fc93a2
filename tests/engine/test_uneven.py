"""Ranks that share a unit in part: six readers of two at TP 3, where rank 1 holds both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.plan import plan_engine
from rayk.models.families import load_config
from rayk.oracle.checkpoint import read_marker
from rayk.types.config import EngineConfig
from tests.pd import NAN_POISON, Pair

MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "attention": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    # At TP 3, four heads each: rank 1 reads both groups of B and C.
    "mamba2": ("mamba2", {"hidden_size": 48, "num_heads": 12, "head_dim": 8, "n_groups": 2}),
    # Value heads 0 to 2 read key head 0: rank 1 holds 2 and 3, and so both key heads.
    "gdn": (
        "qwen3_next",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
        },
    ),
}
LENGTHS = (5, 37)
NUM_TOKENS = 6


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    family, overrides = MODELS[request.param]
    return checkpoint(family, overrides=overrides)


@pytest.mark.parametrize("tp", [(3, 2), (2, 3), (1, 3), (3, 6)], ids=str)
def test_uneven_shards_give_the_references_tokens(
    path: Path, reference: Callable[..., Any], tp: tuple[int, int]
) -> None:
    """Digests are compared before D decodes; the tokens are transformers'."""
    prompts = [list(probe["prompt"]) for probe in read_marker(path)["probes"]][: len(LENGTHS)]
    assert tuple(map(len, prompts)) == LENGTHS
    answers = reference(path).generate(prompts, NUM_TOKENS, ignore_eos=True)
    expected = [list(answer.token_ids) for answer in answers]
    with Pair.open(path, tp=tp, layouts=("BHLNC", "LBNHC"), poison=NAN_POISON) as pair:
        assert pair.generate(prompts, NUM_TOKENS) == expected


def test_what_each_rank_holds(path: Path) -> None:
    """Of the two KV heads, groups or key heads."""
    plan = plan_engine(EngineConfig(model=str(path), tp=3), load_config(path))
    for i, group in enumerate(plan.groups):
        shared = [f.name for f in group.spec.fields() if f.units == 2]
        assert len(shared) == 2
        for name in shared:
            assert [rank.groups[i].field(name).units for rank in plan.ranks] == [(0,), (0, 1), (1,)]
    assert plan.ranks[1].block_bytes > plan.ranks[0].block_bytes
