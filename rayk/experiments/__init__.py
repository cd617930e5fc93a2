"""Runs a matrix: cells on actors, answers against the oracle, verdicts, tables.

`run` drives, `references` asks the oracle once per question, `compare` finds differences, `verdict`
judges. May import any package but cli: this is where they meet.
"""

from rayk.experiments.run import Experiment, run_experiment

__all__ = ["Experiment", "run_experiment"]
