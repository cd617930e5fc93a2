"""Experiment specs: the YAML a user writes, checked, and the cells it stands for.

`load_spec` reads a file (errors name file:line and the nearest valid key); `plan_cells` expands it
for a model, resolves the prompts and makes every check that needs no actor. The grammar is in
`experiment.py`, the marks in `marks.py`, expansion in `cells.py`, prompts in `prompts.py`, what is
refused in `checks.py`. Torch-free.
"""

from rayk.specs.cells import Cell, expand
from rayk.specs.checks import plan_cells
from rayk.specs.experiment import Deadlines, ExperimentSpec, FaultSpec
from rayk.specs.load import LoadedSpec, dump_spec, load_spec, renew_spec
from rayk.specs.prompts import resolve_prompts

__all__ = [
    "Cell",
    "Deadlines",
    "ExperimentSpec",
    "FaultSpec",
    "LoadedSpec",
    "dump_spec",
    "expand",
    "load_spec",
    "plan_cells",
    "renew_spec",
    "resolve_prompts",
]
