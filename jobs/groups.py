"""The experiment on models with several attention groups as a job; the same code as `rayk run`.

    python jobs/groups.py
    ray job submit --working-dir . -- python jobs/groups.py --out /absolute/path

Writes the tiny checkpoints that are missing or outdated, half a minute for all. Options and exit status as of
hetero_tp.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hetero_tp import run_job, write_models

SPEC = Path(__file__).with_suffix(".yaml")


def write_checkpoints() -> None:
    """The models of the spec. What is there is kept."""
    from rayk.oracle.groups import GROUP_MODELS

    write_models(Path("checkpoints/groups"), GROUP_MODELS)


if __name__ == "__main__":
    sys.exit(run_job("Run the experiment on models with attention groups.", SPEC, write_checkpoints))
