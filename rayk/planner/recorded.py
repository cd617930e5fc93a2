"""Read runs whose engines recorded their steps, for tables to be fitted to."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rayk.costs.features import StepFeatures
from rayk.costs.steps import RecordedStep
from rayk.costs.table import engine_key
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.models.hub import config_file
from rayk.reports import Result, load
from rayk.reports.files import parse_spec
from rayk.reports.steps import read_steps
from rayk.specs import Cell, expand, load_spec
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError

Row = Mapping[Hashable, Any]

UNTOUCHED = 2
"""The first so many steps of an engine are left out: they touch memory that nobody has touched before. So is
its first decode step of each size of batch, for which kernels are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStep:
    """A step of an engine of a cell."""

    repeat: int
    engine: str
    begin_ns: int  # after the repeat began
    num_commands: int  # in its turn
    recorded: RecordedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCell:
    """A cell of a run, and what it left in the run's tables."""

    run: str
    cell: Cell
    config: DecoderConfig
    row: Row  # of cells.parquet
    requests: tuple[Row, ...]
    transfers: tuple[Row, ...]
    steps: tuple[EngineStep, ...]
    tells_drafts: bool = True
    """Whether steps say which tokens were proposed: those of older runs do not."""

    def engine_config(self, engine: str) -> EngineConfig:
        """Look an engine up by its name in tables."""
        decode = self.cell.decode
        return decode if decode is not None and engine.startswith("decode") else self.cell.prefill

    @property
    def is_alone(self) -> bool:
        """Whether the cell has no second engine, beside which steps would take longer."""
        return len(self.cell.all_engines) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    folder: str
    environment: Mapping[str, Any]
    cells: tuple[RecordedCell, ...]

    def of_model(self, config: DecoderConfig, model: str) -> RecordedRun:
        """Keep the cells of models with these sizes. Raises UserError, naming `model`, if there are none."""
        plain = EngineConfig(model="")
        key = engine_key(config, plain).model
        cells = tuple(c for c in self.cells if engine_key(c.config, plain).model == key)
        if not cells:
            others = ", ".join(sorted({c.cell.spec.model for c in self.cells}))
            raise UserError(f"no cell has a model with the sizes of {model}: {others}", where=self.folder)
        return replace(self, cells=cells)


def read_run(folder: str | Path) -> RecordedRun:
    """Read a run's cells that ended as expected. Raises UserError for a folder without a run, and for one
    whose engines recorded no steps."""
    result = load(folder)
    steps: dict[str, list[EngineStep]] = {}
    tells_drafts: dict[str, bool] = {}
    for row in read_steps(folder).to_dict("records"):
        tells_drafts[row["cell_id"]] = number(row, "num_drafts") is not None
        steps.setdefault(row["cell_id"], []).append(_step(row))
    if not steps:
        raise UserError(
            "no engine of this run recorded its steps",
            where=str(folder),
            mend="run it again with --set engine.record_steps=true",
        )
    planned = planned_cells(result)
    requests, transfers = (_by_cell(t.to_dict("records")) for t in (result.requests, result.transfers))
    cells = []
    for row in result.cells.to_dict("records"):
        name = row["cell_id"]
        if not row["met"] or name not in planned or name not in steps:
            continue
        cell, config = planned[name]
        cells.append(
            RecordedCell(
                run=str(folder),
                cell=cell,
                config=config,
                row=row,
                requests=tuple(requests.get(name, ())),
                transfers=tuple(transfers.get(name, ())),
                steps=tuple(steps[name] if cell.decode else until_next(steps[name])),
                tells_drafts=tells_drafts[name],
            )
        )
    if not cells:
        raise UserError("no cell of this run that recorded its steps ended well", where=str(folder))
    return RecordedRun(folder=str(folder), environment=result.environment, cells=tuple(cells))


def until_next(steps: Sequence[EngineStep]) -> list[EngineStep]:
    """Let turns of aggregated engines last until the next one begins, where they went on without a pause: a
    request decodes in it that had been there before. What an engine does between its turns is a part of them,
    then: it counts its step, and hears what was posted. (Where requests are handed over, one that decodes
    may have come just now.)"""
    following: dict[tuple[int, str, int], EngineStep] = {}
    for before, step in pairwise(sorted(steps, key=lambda s: (s.repeat, s.engine, s.begin_ns))):
        if (before.repeat, before.engine) == (step.repeat, step.engine):
            following[before.repeat, before.engine, before.begin_ns] = step
    return [_lasting(step, following.get((step.repeat, step.engine, step.begin_ns))) for step in steps]


def _lasting(step: EngineStep, following: EngineStep | None) -> EngineStep:
    if following is None or step.num_commands or following.num_commands:
        return step
    features = following.recorded.features
    length_ns = following.begin_ns - step.begin_ns
    if features.num_requests == features.num_prefills or length_ns < step.recorded.turn_ns:
        return step
    return replace(step, recorded=replace(step.recorded, turn_ns=length_ns))


def settled(cell: RecordedCell) -> Iterator[EngineStep]:
    """Yield a cell's steps but the first of each engine, and of each size (UNTOUCHED)."""
    seen: dict[tuple[int, str], int] = {}
    sizes: set[tuple[str, int, int]] = set()
    for step in cell.steps:
        life, features = (step.repeat, step.engine), step.recorded.features
        seen[life] = seen.get(life, 0) + 1
        size = step.engine, features.num_requests, features.num_tokens
        is_first = features.is_decode and size not in sizes
        if is_first:
            sizes.add(size)
        if seen[life] > UNTOUCHED and not is_first:
            yield step


def planned_cells(result: Result) -> dict[str, tuple[Cell, DecoderConfig]]:
    """Expand the run's own spec: cell id -> cell, and its model."""
    spec = load_spec(parse_spec(result.spec_yaml)).spec
    configs = {name: read_config(config_file(name)[1]) for name in spec.models()}
    cells = [cell.on_device("cpu" if _on_cpu(result) else "cuda") for cell in expand(spec, configs)]
    return {cell.cell_id: (cell, configs[cell.spec.model]) for cell in cells}


def _on_cpu(result: Result) -> bool:
    """Tell what a run took for `device: auto`."""
    nodes = result.environment.get("nodes")
    told = nodes if isinstance(nodes, list) else []
    return not any(isinstance(node, dict) and node.get("resources", {}).get("GPU") for node in told)


def _step(row: Row) -> EngineStep:
    names = [name for name in StepFeatures.__slots__ if name != "windowed"]
    windowed = tuple((int(pairs), int(seen)) for pairs, seen in row["windowed"])
    features = StepFeatures(windowed=windowed, **{name: int(number(row, name) or 0) for name in names})
    return EngineStep(
        repeat=int(row["repeat"]),
        engine=row["engine"],
        begin_ns=int(row["begin_ms"] * 1e6),
        num_commands=int(row["num_commands"]),
        recorded=RecordedStep(features=features, turn_ns=int(row["turn_ns"]), model_ns=int(row["model_ns"])),
    )


def _by_cell(rows: list[dict[Any, Any]]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["cell_id"], []).append(row)
    return found


def number(row: Row, name: str) -> float | None:
    """Return a column's number; None where the table has none."""
    value = row.get(name)
    return None if value is None or math.isnan(value) else float(value)
