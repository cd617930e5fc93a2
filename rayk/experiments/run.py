"""Drive a matrix: one cell after the other, each on disk before the next begins."""

from __future__ import annotations

import errno
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rayk.actors.naming import JOB_NAME, cell_name, models_in_words, run_name
from rayk.actors.token_file import TokenFile
from rayk.experiments.planning import ExperimentPlan, PlannedCell, in_running_order, plan_experiment
from rayk.experiments.progress import MeteredProgress
from rayk.experiments.startup import StartClock
from rayk.experiments.unused import note_unused
from rayk.experiments.vllm_python import untested
from rayk.models.drafters.config import drafts_by_mtp
from rayk.models.hub import model_folder
from rayk.oracle.cache import AnswerStore, reference_folder
from rayk.oracle.remake import changed_checkpoints, checkpoint_commands
from rayk.reports import Result, ResultWriter, collect_environment, load
from rayk.reports.environment import copy_ceiling
from rayk.reports.files import locked
from rayk.specs import Cell, ExperimentSpec, LoadedSpec, load_spec, renew_spec
from rayk.specs.speculative_checks import idle_drafts
from rayk.types.errors import DeadlineExceeded, DeviceError, RaykError, UserError
from rayk.types.progress import Progress
from rayk.types.rows import CellRow

if TYPE_CHECKING:
    from rayk.actors.cell_outcome import CellOutcome
    from rayk.experiments.judge import CellJudge

GRACE_S = 60.0  # what the coordinator may take beyond a cell's deadline to kill and replace workers
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class Quiet:
    """Watches nothing. Implements types.progress.Progress."""

    def plan(self, num_cells: int, num_finished: int) -> None: ...

    def phase(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)

    def begin(self, cell_id: str) -> None: ...

    def end(self, cell_id: str, verdict: str, reason: str) -> None: ...


class Experiment:
    """Holds an experiment ready to run, from a path, a mapping or an ExperimentSpec. Raises SpecError for a
    bad one."""

    def __init__(
        self, spec: str | Path | Mapping[str, Any] | ExperimentSpec, overrides: Sequence[str] = ()
    ) -> None:
        self.loaded = load_spec(spec, overrides)

    def run(
        self,
        out: str | Path | None = None,
        *,
        address: str | None = None,
        resume: bool = False,
        fresh: bool = False,
        progress: Progress | None = None,
    ) -> Result:
        """Run it. `fresh`: answers of the reference that earlier runs kept are computed anew."""
        progress = progress or Quiet()
        folder = out or self.loaded.default_folder()
        plan = plan_experiment(self.loaded, folder, address=address, resume=resume, tell=progress.phase)
        return run_experiment(plan, address=address, progress=progress, fresh=fresh)


def run_experiment(
    plan: ExperimentPlan,
    *,
    address: str | None = None,
    progress: Progress | None = None,
    command: Sequence[str] | None = None,
    token_file: TokenFile | None = None,
    fresh: bool = False,
) -> Result:
    """Run a planned matrix into its folder and return its tables. `fresh`: what earlier runs kept of the
    reference is computed anew.

    Raises UserError before any actor starts when the weights or the machine do not fit. A cell that fails is
    a row, not an exception. Interrupted runs keep the cells that ended; so does one whose disk is full, a
    UserError.
    """
    progress = clock = StartClock(progress or Quiet(), plan.planned_ns)
    answers = AnswerStore(reference_folder(), fresh=fresh, warn=progress.warn)
    _warn_of_unused(plan, progress, replace(answers))  # what it finds there is no answer of the reference
    spec = plan.loaded.spec
    for i in plan.idle_rules:
        where = plan.loaded.marks.where(("exclude", i))
        progress.warn(f"{where}: this exclude rule matches no cell: {spec.exclude[i]}")
    for note in idle_drafts(cell for cell, _ in plan.cells):
        progress.warn(note)
    if untested(plan.vllm_versions):
        progress.warn(untested(plan.vllm_versions))
    of_vllm = {"vllm": dict(plan.vllm_versions)} if plan.vllm_versions else {}
    environment = collect_environment(
        command=list(command or sys.argv),
        seeds=_seeds(spec),
        cells=len(plan.cells),
        inputs=dict(plan.inputs),
        checkpoints=checkpoint_commands((*spec.models(), *spec.drafters())),
        changed_checkpoints=changed_checkpoints((*spec.models(), *spec.drafters())),
        ceiling=copy_ceiling(),
        **of_vllm,
    )
    with _full_disk_raises(plan.out), locked(plan.out):
        writer = ResultWriter(
            plan.out,
            spec_yaml=plan.yaml,
            environment=environment,
            resume=plan.resume,
            renew=renew_spec,
            order=[cell.cell_id for cell, _ in plan.cells] if any(c.vllm for c, _ in plan.cells) else (),
        )
        with closing(writer):
            progress.plan(len(plan.cells), len(writer.finished))
            if writer.changed_facts:
                changed = ", ".join(writer.changed_facts)
                progress.warn(f"the cells on disk were measured elsewhere or with other versions: {changed}")
            left = _unfinished(plan, writer)
            if any(not cell.unsupported for cell, _ in left):
                _run_on_cluster(plan, writer, environment, address, clock, token_file, answers)
                writer.write_environment(environment | {"reference": answers.describe()})
            else:
                for cell, _ in left:
                    _write_unsupported(cell, writer, progress)
            writer.finish()
    return load(plan.out)


def _unfinished(plan: ExperimentPlan, writer: ResultWriter) -> list[PlannedCell]:
    left = [(cell, prompts) for cell, prompts in plan.cells if cell.cell_id not in writer.finished]
    return in_running_order(left)


@contextmanager
def _full_disk_raises(folder: Path) -> Iterator[None]:
    """Raise UserError when the results find no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_IS_FULL:
            raise
        raise UserError(
            f"no room on the disk: {error}", where=str(folder), mend="make room; --resume continues the run"
        ) from error


def _write_unsupported(cell: Cell, writer: ResultWriter, progress: Progress) -> None:
    reason = cell.unsupported or ""
    row = CellRow(
        cell_id=cell.cell_id,
        axes=cell.axes,
        verdict="UNSUPPORTED",
        reason=reason,
        refused_by=cell.refused_by,
    )
    writer.write_cell(row, [], [])
    progress.end(cell.cell_id, "UNSUPPORTED", reason)


def _run_on_cluster(
    plan: ExperimentPlan,
    writer: ResultWriter,
    environment: dict[str, Any],
    address: str | None,
    clock: StartClock,
    token_file: TokenFile | None,
    answers: AnswerStore,
) -> None:
    """Run the cells that are left, and add the cluster and the start to the environment."""
    progress: Progress = clock
    progress.phase("starting Ray")
    # Ray is imported here so that a bad spec is refused in a second.
    from rayk.actors import launch

    name, num_left = plan.loaded.spec.name, len(plan.cells) - len(writer.finished)
    about = _metadata(plan.loaded, writer, num_left)
    with (
        launch.connect(address, about=about, token_file=token_file) as joined,
        _in_metrics(progress, plan.out.resolve().name, num_left, len(writer.finished)) as progress,
    ):
        if token_file is not None or not joined.is_own:
            (progress.phase if joined.is_protected else progress.warn)(joined.in_words())
        left = _unfinished(plan.on_device(launch.cluster_device()), writer)
        cells, fit_at_once = launch.fit_cells([cell for cell, _ in left if not cell.unsupported])
        progress.phase("starting workers")
        runner = _Runner(name, cells, keep_workers=fit_at_once)
        try:
            # The workers start meanwhile.
            from rayk.experiments.judge import CellJudge

            judges = {
                model: CellJudge(str(model_folder(model)), c, answers) for model, c in plan.configs.items()
            }
            _prepare_references(left, judges, progress)
            progress.phase("waiting for the workers")
            environment |= {
                "ray_address": joined.address,
                "nodes": launch.describe_nodes(),
                "workers": runner.ready(),
            }
            writer.write_environment(environment)
            decided = {cell.cell_id: cell for cell in cells}
            for cell, prompts in left:
                if cell.unsupported:
                    _write_unsupported(cell, writer, progress)
                else:
                    judge = judges[cell.spec.model]
                    first = _run_cell(decided[cell.cell_id], prompts, runner, judge, writer, progress)
                    if "startup" not in environment:
                        environment["startup"] = clock.close(first)
        finally:
            runner.close()


def _warn_of_unused(plan: ExperimentPlan, progress: Progress, notes: AnswerStore) -> None:
    """Warn of tensors in checkpoints that engines leave out. Raises CheckpointError for one that they miss,
    before Ray starts."""
    for name in plan.weights:
        engines = (e for cell, _ in plan.cells if cell.spec.model == name for e in cell.engines)
        note = note_unused(name, plan.configs[name], notes, mtp=any(map(drafts_by_mtp, engines)))
        if note:
            progress.warn(note)


def _in_metrics(progress: Progress, run: str, num_left: int, num_finished: int) -> MeteredProgress:
    """Report progress to Ray's metrics, too."""
    from rayk.actors.naming import bounded
    from rayk.actors.ray_metrics import make_meter

    return MeteredProgress(progress, make_meter(), bounded(run), num_left + num_finished, num_finished)


def _run_cell(
    cell: Cell,
    prompts: list[list[int]],
    runner: _Runner,
    judge: CellJudge,
    writer: ResultWriter,
    progress: Progress,
) -> CellOutcome:
    """Run and judge a cell. Returns what its first repeat, or its twin's, left behind."""
    progress.begin(cell.cell_id)
    writer.begin_cell(cell.cell_id)
    of_twins = []
    for twin in judge.twins.missing(cell, prompts):
        of_twins.append(runner.run(twin, prompts, 0, False))
        judge.twins.keep(twin, prompts, of_twins[-1])
    outcomes = [runner.run(cell, prompts, repeat, judge.needs_capture(cell)) for repeat in range(cell.repeat)]
    judge.twins.keep(cell, prompts, outcomes[0])
    try:
        row = judge.judge(cell, prompts, outcomes)
    except Exception as error:  # noqa: BLE001 - one broken cell must not end the run
        _raise_if_full(error)
        row = _unjudged(cell, error, sum(o.wall_ns for o in outcomes))
    requests = [r for o in outcomes for r in o.requests]
    transfers = [t for o in outcomes for t in o.transfers]
    writer.write_cell(row, requests, transfers, [s for o in outcomes for s in o.steps])
    progress.end(cell.cell_id, row.verdict, row.reason)
    return [*of_twins, *outcomes][0]


def _prepare_references(
    left: Sequence[PlannedCell], judges: Mapping[str, CellJudge], progress: Progress
) -> None:
    known = [(judges[c.spec.model], c, p) for c, p in left if not c.unsupported]
    lacking = [(judge, cell, prompts) for judge, cell, prompts in known if judge.needs_reference(cell)]
    if lacking:
        num_models = len({cell.spec.model for _, cell, _ in lacking})
        progress.phase("asking the reference" + (f" ({num_models} models)" if num_models > 1 else ""))
    for judge, cell, prompts in lacking:
        _prepare_reference(judge, cell, prompts)


def _prepare_reference(judge: CellJudge, cell: Cell, prompts: list[list[int]]) -> None:
    try:
        judge.prepare(cell, prompts)
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - it comes again when this cell is judged
        _raise_if_full(error)


def _raise_if_full(error: Exception) -> None:
    if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
        raise error


def _unjudged(cell: Cell, error: Exception, wall_ns: int) -> CellRow:
    """Make the row of a cell whose checks broke down."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    reason = f"the checks of this cell broke down at {place}: {type(error).__name__}: {error}"
    # Not even a cell that was to end in ENGINE_ERROR was to end in this one.
    expected = "PASS" if cell.expected_verdict == "ENGINE_ERROR" else cell.expected_verdict
    return CellRow(
        cell_id=cell.cell_id,
        axes=cell.axes,
        verdict="ENGINE_ERROR",
        reason=reason,
        expected_verdict=expected,
        wall_ns=wall_ns,
    )


class _Runner:
    """Keeps the coordinator of a run, and replaces it if it ever stops answering."""

    def __init__(self, title: str, cells: Sequence[Cell], *, keep_workers: bool) -> None:
        self._title = title
        self._cells = cells
        self._keep_workers = keep_workers
        self._start()

    def ready(self) -> dict[str, int]:
        """Wait for all workers; returns worker name -> process id. Raises DeviceError when they do not
        start."""
        import ray

        from rayk.actors.nodes import start_limit_s, weights_of

        limit_s = start_limit_s(weights_of(self._cells[0].prefill), self._demands) + GRACE_S
        mend = "rayk on every node, and room for an engine's workers on one; see `rayk doctor`"
        try:
            pids: dict[str, int] = ray.get(self._prepared, timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            raise DeviceError(
                f"the workers do not start: no word of them within {limit_s:g} s",
                where="the cluster",
                mend=mend,
            ) from None
        except ray.exceptions.RayError as failure:
            from rayk.actors.failures import translate

            error = translate(failure, "coordinator")
            if isinstance(error, UserError):
                raise error from failure
            raise DeviceError(
                f"the workers do not start: {error}", where="the cluster", mend=mend
            ) from failure
        return pids

    def run(self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int, capture: bool) -> CellOutcome:
        """Run one cell once. There is always an outcome, in bounded time."""
        import ray

        deadline = cell.deadlines.cell_s + sum(engine.start_s for engine in cell.vllm) + GRACE_S
        named = self._coordinator.run_cell.options(name=cell_name(cell.cell_id, repeat, cell.spec.model))
        try:
            return cast(
                "CellOutcome",
                ray.get(named.remote(cell, prompts, repeat, capture=capture), timeout=deadline),
            )
        except ray.exceptions.GetTimeoutError:
            error: RaykError = DeadlineExceeded(f"the coordinator of cell {cell.cell_id}", deadline)
        except ray.exceptions.RayError as failure:
            from rayk.actors.failures import translate

            error = translate(failure, "coordinator")
        self.close()
        self._start()
        from rayk.actors.cell_outcome import CellOutcome  # imports torch

        return CellOutcome(errors=[error])

    def close(self) -> None:
        import ray

        from rayk.actors import placement

        try:
            ray.get(self._coordinator.shutdown.remote(), timeout=10)
        except ray.exceptions.RayError:
            pass  # it is gone already, and its workers with it
        finally:
            placement.kill(self._coordinator)

    def _start(self) -> None:
        from rayk.actors import launch
        from rayk.actors.nodes import largest_demands, placement_of, weights_of
        from rayk.actors.placement import this_node

        name = run_name(self._title, sorted({c.spec.model for c in self._cells}))
        self._coordinator = launch.start_coordinator(
            f"rayk/coordinator/{name}", keep_workers=self._keep_workers
        )
        first = self._cells[0]
        # Engines of vLLM start with the cells that need them.
        own = [cell for cell in self._cells if not cell.vllm and (self._keep_workers or cell is first)]
        self._demands = largest_demands(own, this_node())
        self._prepared = self._coordinator.prepare.remote(
            self._demands, placement_of(first), weights_of(first.prefill)
        )


def _metadata(loaded: LoadedSpec, writer: ResultWriter, num_left: int) -> dict[str, str]:
    """Tell Ray what it keeps of this driver, for who looks at a cluster's jobs."""
    models = models_in_words(loaded.spec.models())
    return {
        JOB_NAME: f"{loaded.spec.name} {models}",
        "rayk": "experiment",
        "experiment": loaded.spec.name,
        "models": models,
        "cells": str(num_left),
        "results": str(writer.directory.resolve()),
    }


def _seeds(spec: ExperimentSpec) -> dict[str, int]:
    return {"prompts": spec.prompts.random.seed} if spec.prompts.random is not None else {}
