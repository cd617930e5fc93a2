"""The experiment on hybrid models as a job; the same code as `rayk run`.

    python jobs/hybrid.py
    ray job submit --working-dir . -- python jobs/hybrid.py --out /absolute/path

Writes the tiny checkpoints that are missing or outdated, half a minute for all. Options and exit status as of
hetero_tp.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_tp import run_job, write_models

SPEC = Path(__file__).with_suffix(".yaml")


def write_checkpoints() -> None:
    """The models of the spec: one per family, and those with a single group. What is there is kept."""
    from rayk.oracle.hybrids import FAMILIES, ONE_GROUP

    models: dict[str, tuple[str, Mapping[str, Any]]] = {name: (name, {}) for name in FAMILIES}
    models |= {f"{name}-one-group": (name, values) for name, values in ONE_GROUP.items()}
    write_models(Path("checkpoints/hybrid"), models)


if __name__ == "__main__":
    sys.exit(run_job("Run the experiment on hybrid models.", SPEC, write_checkpoints))
