"""The tiny models that the specs of jobs/ name: with attention groups, with one group of B and C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayk.specs import load_spec

JOBS = Path(__file__).resolve().parents[1] / "jobs"


def spec_models(name: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The name of each folder -> its family and the values of config.json that differ from the family's."""
    named = load_spec(JOBS / name).spec.checkpoints
    return {Path(folder).name: (wanted.family, wanted.config) for folder, wanted in named.items()}


GROUP_MODELS = spec_models("groups.yaml")
OTHER_STREAMS = GROUP_MODELS["gemma3n-other-streams"][1]
ALL_ROUTED = GROUP_MODELS["llama4-all-routed"][1]
REUSE_IN_ORDER = GROUP_MODELS["qwen2-reuse"][1]
LAST_REUSE = GROUP_MODELS["gemma3-reuse"][1]
TWICE_REUSED = GROUP_MODELS["qwen3-twice-reused"][1]
ONE_GROUP = {family: config for family, config in spec_models("hybrid.yaml").values() if config}
