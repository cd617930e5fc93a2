"""What an engine will allocate: the layout nobody vetoes."""

from __future__ import annotations

import pytest

from rayk.models.engine_plan import plan_engine
from rayk.models.families import load_config
from rayk.oracle.tiny import HYBRID
from rayk.types.config import EngineConfig
from rayk.types.errors import LayoutVetoed


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
