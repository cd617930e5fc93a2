"""Fit a machine's cost tables to runs that recorded their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayk.costs.book import CostBook, Provenance
from rayk.costs.features import StepKind
from rayk.costs.fit import Fitted
from rayk.costs.steps import RecordedStep, fit_drafting, fit_host, fit_steps
from rayk.costs.table import EngineCosts, EngineKey, HostTable, StepTable, drafter_name, engine_key
from rayk.planner.between import fit_gaps, fit_reads, hand_over_costs
from rayk.planner.neighbours import FittedLosses, fit_losses, form_s
from rayk.planner.recorded import EngineStep, RecordedCell, RecordedRun, settled
from rayk.reports.trust import busy
from rayk.types.errors import UserError

MAX_ERROR = 0.10
"""It is the most by which nine places of a table in ten may be off."""
KINDS: tuple[StepKind, ...] = ("decode", "verify", "prefill")
MIN_STEPS = 20
MIN_MEDIAN = 0.8  # of the mean; below it the mean is that of interruptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedClass:
    """One table of a book, with how far it is off where it was measured."""

    key: EngineKey
    kind: StepKind
    fitted: Fitted

    @property
    def is_good(self) -> bool:
        return self.fitted.error(90) <= MAX_ERROR

    @property
    def interrupted(self) -> str:
        """Say so where few steps took most of the time: something else had the cores meanwhile."""
        median = self.fitted.ratios[len(self.fitted.ratios) // 2]
        if median >= MIN_MEDIAN:
            return ""
        return (
            f"half of the {self.kind} steps of {self.key.text} took under {median:.0%} of the mean: "
            "something else had the cores for the rest"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedBook:
    book: CostBook
    classes: tuple[FittedClass, ...]
    notes: tuple[str, ...]
    """What the tables rest on where something better was missing."""


def fit_runs(runs: Sequence[RecordedRun]) -> FittedBook:
    """Fit tables of every kind of engine that the runs have steps of. Raises UserError where one has too few
    of decode or of prefill steps."""
    runs, notes = _with_drafts_told(runs)
    cells = [cell for run in runs for cell in run.cells]
    engines, classes = {}, []
    for key, of_key in _by_engine(cells).items():
        if key.pp > 1:
            notes.append(f"{key.text}: a pipeline's steps are not fitted: rank 0 sees its own stage only")
            continue
        costs, found = _fit_engine(key, of_key, notes)
        engines[key] = costs
        classes += found
    beside = fit_losses(cells, engines, num_cores=_num_cores(runs))
    book = CostBook(
        engines={
            key: replace(_with_commands(key, costs, cells), losses=beside.losses[key])
            for key, costs in engines.items()
        },
        transfers=fit_reads(cells),
        gaps=fit_gaps(cells, num_cores=_num_cores(runs)),
        host=HostTable(num_cores=_num_cores(runs), form_s=max(form_s(run.environment) for run in runs)),
        provenance=provenance(runs),
    )
    for run in runs:
        notes += [f"{run.folder}: {text}" for text in busy(run.environment)]
    notes += [found.interrupted for found in classes if found.interrupted]
    if not book.transfers.reads:
        notes.append("no transfers were measured: no cell hands over")
    if all(cell.is_alone for cell in cells):
        notes.append("no cell has several engines: what they cost each other is not known")
    else:
        notes += _unknown_losses(beside)
    return FittedBook(book=book, classes=tuple(classes), notes=tuple(notes))


def _with_drafts_told(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], list[str]]:
    """Leave out cells whose engines draft where steps do not say which of their tokens were proposed: these
    would count as prompts. And say so."""
    found, notes = [], []
    for run in runs:
        kept = tuple(c for c in run.cells if c.tells_drafts or not _drafts(c))
        names = [c.cell.cell_id for c in run.cells if not c.tells_drafts and _drafts(c)]
        notes += [f"{name}: an older run does not say which steps had drafts" for name in names]
        if kept:
            found.append(replace(run, cells=kept))
    if not found:
        raise UserError(
            "engines draft in every cell, and an older run does not say which steps had drafts",
            where=", ".join(run.folder for run in runs),
            mend="run it again, or cells of speculative.method: none",
        )
    return found, notes


def _drafts(cell: RecordedCell) -> bool:
    return any(engine.speculative is not None for engine in cell.cell.engines)


def _unknown_losses(beside: FittedLosses) -> Iterator[str]:
    for key, names in beside.unknown.items():
        if names and key.device == "cpu":
            of = ", ".join(name.replace("_", " ") for name in names)
            yield f"{key.text}: too few steps tell what it loses to neighbours, which counts as 0: {of}"


def provenance(runs: Sequence[RecordedRun]) -> Provenance:
    """Say what tables were fitted to; machine and versions are those of the first run."""
    about = runs[0].environment
    devices = _mapping(about, "devices")
    names = [cell.cell.cell_id for run in runs for cell in run.cells]
    return Provenance(
        machine=str(about.get("platform", "")),
        cpu=str(devices.get("cpu", "")),
        num_cores=_num_cores(runs),
        packages={n: str(v) for n, v in _mapping(about, "packages").items() if v is not None},
        commit=str(about.get("git_commit") or ""),
        date=str(about.get("started", "")),
        runs=tuple(run.folder for run in runs),
        cells=tuple(dict.fromkeys(names)),
    )


def _by_engine(cells: Iterable[RecordedCell]) -> dict[EngineKey, list[tuple[RecordedCell, EngineStep]]]:
    found: dict[EngineKey, list[tuple[RecordedCell, EngineStep]]] = {}
    for cell in cells:
        keys: dict[str, EngineKey] = {}
        for step in settled(cell):
            if step.engine not in keys:
                keys[step.engine] = engine_key(cell.config, cell.engine_config(step.engine))
            found.setdefault(keys[step.engine], []).append((cell, step))
    return found


Steps = Sequence[tuple[RecordedCell, EngineStep]]
"""Steps of one kind of engine, with the cells that they are of."""


def _fit_engine(key: EngineKey, steps: Steps, notes: list[str]) -> tuple[EngineCosts, list[FittedClass]]:
    """Fit an engine's tables, to steps of cells where it was alone if there are any of the kind."""
    tables: dict[StepKind, StepTable] = {}
    classes = []
    for kind in KINDS:
        of_kind = [(c, s) for c, s in steps if s.recorded.features.kind == kind]
        alone = [s for c, s in of_kind if c.is_alone]
        if len(alone) < MIN_STEPS <= len(of_kind):
            notes.append(f"{key.text}: its {kind} steps were all measured beside another engine's")
        chosen = alone if len(alone) >= MIN_STEPS else [s for _, s in of_kind]
        if len(chosen) < MIN_STEPS:
            if kind == "verify":
                if any(map(_drafter_of, steps)):
                    notes.append(f"{key.text}: {len(chosen)} steps with drafts, too few to fit")
                continue
            raise UserError(
                f"{len(chosen)} {kind} steps of {key.text}, and a fit needs {MIN_STEPS}",
                where=steps[0][0].run,
                mend="more requests, or a run of `rayk costs`",
            )
        tables[kind], fitted = fit_steps([s.recorded for s in chosen], kind)
        classes.append(FittedClass(key=key, kind=kind, fitted=fitted))
    runs = dict.fromkeys(cell.run for cell, _ in steps)
    costs = EngineCosts(
        key=key,
        decode=tables["decode"],
        prefill=tables["prefill"],
        verify=tables.get("verify"),
        source=", ".join(runs),
    )
    return _with_turns(costs, steps, notes), classes


def _with_turns(costs: EngineCosts, steps: Steps, notes: list[str]) -> EngineCosts:
    """Fit what turns take beside their steps: of engines that do not draft, and of each drafter's."""
    by_drafter: dict[str, list[tuple[RecordedCell, EngineStep]]] = {}
    for pair in steps:
        by_drafter.setdefault(_drafter_of(pair), []).append(pair)
    if "" not in by_drafter:
        notes.append(f"{costs.key.text}: drafts in every cell: what turns take without is taken from there")
    constant, per_request, per_prompt = fit_host(_turns(by_drafter.pop("", steps))).constants
    return replace(
        costs,
        host_ns=constant,
        request_host_ns=per_request,
        prefill_host_ns=per_prompt,
        drafting={
            name: fit_drafting(_turns(of), on_ranks=name != "ngram")
            for name, of in sorted(by_drafter.items())
        },
    )


def _drafter_of(step: tuple[RecordedCell, EngineStep]) -> str:
    """Name the drafter of a step's engine; empty: it has none."""
    cell, of = step
    speculative = cell.engine_config(of.engine).speculative
    return "" if speculative is None else drafter_name(speculative)


def _turns(steps: Steps) -> list[RecordedStep]:
    """Choose those whose turns tell what the host takes: commands of hand-overs have costs of their own, and
    so have neighbours."""
    quiet = [(c, s.recorded) for c, s in steps if not s.num_commands]
    by_itself = [recorded for cell, recorded in quiet if cell.is_alone]
    return by_itself or [recorded for _, recorded in quiet] or [s.recorded for _, s in steps]


def _with_commands(key: EngineKey, costs: EngineCosts, cells: Sequence[RecordedCell]) -> EngineCosts:
    own = [c for c in cells if key in {engine_key(c.config, e) for e in c.cell.engines}]
    return replace(costs, commands=hand_over_costs(own))


def _num_cores(runs: Sequence[RecordedRun]) -> int:
    return int(_mapping(runs[0].environment, "devices").get("num_cores", 0))


def _mapping(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = of.get(name)
    return found if isinstance(found, Mapping) else {}
