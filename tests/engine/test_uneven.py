"""TP sizes that do not divide each other. Six readers of two units at TP 3: rank 1 holds both of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.models.engine_plan import plan_engine
from rayk.models.families import load_config
from rayk.oracle.checkpoint import read_marker
from rayk.types.config import EngineConfig
from tests.markers import one_per, sweep
from tests.pd import NAN_POISON, Pair

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
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
    # Channels of Mamba1 fall into runs, none of which is shared; its two KV heads are.
    "mamba1": ("jamba", {}),
    # Both caches of each layer.
    "falcon_h1": (
        "falcon_h1",
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 12,
            "mamba_d_head": 8,
            "mamba_rms_norm": True,
        },
    ),
    # Every rank holds the latents whole.
    "mla": ("deepseek_v3", {"num_attention_heads": 6, "num_key_value_heads": 6}),
}
LENGTHS = (5, 37)
NUM_TOKENS = 6


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    family, overrides = MODELS[request.param]
    return checkpoint(family, overrides=overrides)


@sweep(3)
@one_per()
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
    """Of heads, groups, runs of channels and latents: those that its readers read."""
    plan = plan_engine(EngineConfig(model=str(path), tp=3), load_config(path))
    units_by_field = {
        f.name: (f.units, [rank.groups[i].field(f.name).units for rank in plan.ranks])
        for i, group in enumerate(plan.groups)
        for f in group.spec.fields()
    }
    for name, (num_units, units) in units_by_field.items():
        if num_units < 3:
            assert units == {1: [(0,)] * 3, 2: [(0,), (0, 1), (1,)]}[num_units], name
        else:
            each = num_units // 3
            assert units == [tuple(range(r * each, (r + 1) * each)) for r in range(3)], name
    is_uneven = any(num_units == 2 for num_units, _ in units_by_field.values())
    assert (plan.ranks[1].block_bytes > plan.ranks[0].block_bytes) == is_uneven
