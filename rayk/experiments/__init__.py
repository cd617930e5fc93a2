"""Runs a matrix: cells on actors, answers against the oracle, verdicts, tables.

`planning` plans and checks a run, `run` drives it, `references` asks the oracle once per question, `compare`
finds differences, `verdict` judges. May import any package but cli: this is where they meet. The names below
are imported on first use, so that planning is free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayk.experiments.run import Experiment, run_experiment

__all__ = ["Experiment", "run_experiment"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("rayk.experiments.run"), name)
