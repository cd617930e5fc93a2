"""The experiment on hybrid models as a job; the same code as `rayk run`.

    python jobs/hybrid.py
    ray job submit --working-dir . -- python jobs/hybrid.py --out /absolute/path

Writes the tiny checkpoints that are missing or outdated, half a minute for all. Options and exit status as of
hetero_tp.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hetero_tp import run_job

SPEC = Path(__file__).with_suffix(".yaml")


def write_checkpoints() -> None:
    """The models of the spec: one per family, and those with a single group. What is there is kept."""
    from rayk.oracle.checkpoint import write_checkpoint
    from rayk.oracle.hybrids import FAMILIES, ONE_GROUP

    folder = Path("checkpoints/hybrid")
    models = {name: (name, {}) for name in FAMILIES}
    models |= {f"{name}-one-group": (name, dict(values)) for name, values in ONE_GROUP.items()}
    for name, (family, overrides) in models.items():
        print(f"checkpoint {folder / name}", file=sys.stderr)
        write_checkpoint(family, folder / name, overrides=overrides)


if __name__ == "__main__":
    sys.exit(run_job("Run the experiment on hybrid models.", SPEC, write_checkpoints))
