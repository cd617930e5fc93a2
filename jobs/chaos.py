"""Faults at every point of a transfer's life as a job; the same code as `rayk run`.

    python jobs/chaos.py
    ray job submit --working-dir . -- python jobs/chaos.py --out /absolute/path

Options and exit status as of hetero_tp.py. Exit 0: every cell ended in the verdict that the table of faults
(rayk/types/fault_table.py) asks for.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hetero_tp import run_job, write_tiny_checkpoint

SPEC = Path(__file__).with_suffix(".yaml")


if __name__ == "__main__":
    sys.exit(run_job("Run the experiment on planted faults.", SPEC, write_tiny_checkpoint))
