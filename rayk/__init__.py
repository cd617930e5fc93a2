"""rayk: LLM inference with prefill and decode on engines of unlike tensor parallelism, proven right.

The names below are imported on first use, so that `import rayk` is cheap and free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayk.experiments import Experiment
    from rayk.planner.plan import Plan
    from rayk.reports import Result, load
    from rayk.serve.llm import LLM
    from rayk.types import EngineConfig, Request, SamplingParams, StructuredOutputs

_HOMES = {
    "EngineConfig": "rayk.types",
    "Experiment": "rayk.experiments",
    "LLM": "rayk.serve.llm",
    "Plan": "rayk.planner.plan",
    "Request": "rayk.types",
    "Result": "rayk.reports",
    "SamplingParams": "rayk.types",
    "StructuredOutputs": "rayk.types",
    "load": "rayk.reports",
}

__all__ = [
    "LLM",
    "EngineConfig",
    "Experiment",
    "Plan",
    "Request",
    "Result",
    "SamplingParams",
    "StructuredOutputs",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
