"""What an engine will allocate: the layout nobody vetoes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayk.models.engine_plan import plan_engine
from rayk.models.families import load_config
from rayk.oracle.tiny import HYBRID
from rayk.types.config import EngineConfig
from rayk.types.errors import LayoutVetoed
from tests.specs.models import decoder


def test_a_partys_veto_on_any_groups_spec_counts(checkpoint) -> None:
    path = checkpoint("qwen3", overrides=dict(HYBRID))
    config, model = EngineConfig(model=str(path)), load_config(path)

    def no_sliding_heads_first(layout: str, spec) -> str | None:
        refused = spec.kind == "sliding" and layout != "LBNHC"
        return f"no {spec.kind} in {layout}" if refused else None

    plan = plan_engine(config, model, [("picky", no_sliding_heads_first)])
    assert plan.resolution.layout.name == "LBNHC"
    assert ("BHLNC", "picky", "no sliding in BHLNC") in plan.resolution.vetoes
    assert plan_engine(config, model).resolution.layout.name == "BHLNC"
    with pytest.raises(LayoutVetoed, match="picky: never"):
        plan_engine(config, model, [("picky", lambda layout, spec: "never")])


def test_a_rank_keeps_its_tokens_and_layers_alone() -> None:
    """Two ranks that deal tokens keep half of a block's rows each, two stages the layers of one model."""
    model = decoder(windows=(None, None, None), num_kv_heads=1)
    whole = EngineConfig(model="m", tp=4, block_size=16)
    dealt = plan_engine(replace(whole, dcp=2, dcp_interleave=4), model)
    staged = plan_engine(replace(whole, pp=2), model)
    assert dealt.groups[0].spec.block_size == 2 * 16
    rows = [set(rank.groups[0].held_rows.tolist()) for rank in dealt.ranks]
    assert rows == [{r for r in range(32) if r // 4 % 2 == rank % 2} for rank in range(4)]
    one = plan_engine(whole, model).ranks[0].block_bytes
    # A block id of 32 tokens takes of a rank what one of 16 takes where each keeps all tokens.
    assert {rank.block_bytes for rank in dealt.ranks} == {one}
    assert [rank.groups[0].layers for rank in staged.ranks] == [(2,)] * 4 + [(0, 1)] * 4
    assert [rank.block_bytes for rank in staged.ranks] == [one // 3] * 4 + [one * 2 // 3] * 4
