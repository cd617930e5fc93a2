"""Run fleets of paced engines (jobs/paced.yaml): cost tables first, then as `rayk run`.

    python jobs/paced.py
    python jobs/paced.py --set engine.pace=2 --out runs/paced-2
    python jobs/paced.py --costs costs/          # tables that `rayk costs` measured

Without --costs the tables are made up, for no machine: a step takes 20 ms, 0.3 ms more for each request and
0.02 ms for each token. Options are otherwise those of `rayk run`, the spec being `--spec`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from rayk.cli.main import app
from rayk.costs.book import CostBook
from rayk.costs.table import EngineCosts, StepTable, engine_key
from rayk.experiments.planning import plan_experiment
from rayk.models.families import load_config
from rayk.specs import load_spec

MADE_UP = StepTable(terms=("one", "requests", "tokens"), constants=(20e6, 0.3e6, 0.02e6))


def make_up(spec: str, overrides: list[str], folder: Path) -> None:
    """Write tables for every engine of a spec's cells."""
    loaded = load_spec(spec, [*overrides, f"engine.costs={folder}"])
    plan = plan_experiment(loaded, folder.with_name(f"{folder.name}-plan"), tell=print)
    flat = EngineCosts.flat(0.0)
    engines = {}
    for cell, _ in plan.cells:
        for engine in cell.engines:
            key = engine_key(load_config(Path(engine.model)), engine)
            made = replace(flat, key=key, decode=MADE_UP, prefill=MADE_UP)
            engines[key] = replace(made, kind="unmeasured", source="made up by jobs/paced.py")
    CostBook(engines=engines).save(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--spec", default=str(Path(__file__).with_suffix(".yaml")))
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--set", action="append", default=[])
    own, others = parser.parse_known_args()
    costs = own.costs
    if costs is None and not {"-h", "--help"} & set(others):
        costs = Path("runs/paced-costs")
        make_up(own.spec, own.set, costs)
    settings = [*own.set, *([f"engine.costs={costs}"] if costs else [])]
    app(["run", own.spec, *(word for text in settings for word in ("--set", text)), *others])
