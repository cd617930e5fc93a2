"""Measure what steps, hand-overs and transfers take, and fit tables to it: `rayk costs`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayk.cli.guard import AddressOption, guarded, stderr, stdout
from rayk.types.bounds import MAX_DRAFTS
from rayk.types.errors import UserError

if TYPE_CHECKING:
    from rayk.planner.fitting import FittedBook
    from rayk.planner.measure import GridRequest

RUN = "run"  # folder below --out of the measured cells


@guarded
def costs(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder of the tables; what is measured goes to its `run`.")],
    tp: Annotated[str | None, typer.Option(help="TP sizes, e.g. 1,2 [default: 1].")] = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            help="TP sizes of prefill and decode engines, e.g. 1:1,1:2; none: no hand-overs [default: 1:1]."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda [default: auto].")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or auto [default: float32].")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens of the longest prompt [default: 1024].")
    ] = None,
    max_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests of the largest batch [default: 16].")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens of the largest step [default: 512].")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a block [default: 16].")] = None,
    drafts: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_DRAFTS, help="Measure steps with n-gram drafts of up to so many tokens, too."
        ),
    ] = None,
    wanted: Annotated[
        Path | None,
        typer.Option(
            "--for", help="Measure what this experiment or plan needs: all of the above, unless given."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer sizes.")] = False,
    from_runs: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Fit to a run with engine.record_steps instead; repeatable."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="Derive tables from a data sheet, a name or a YAML file; nothing is run."),
    ] = None,
    accept: Annotated[bool, typer.Option("--accept", help="Exit 0 however far off the fit is.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what --out has measured.")] = False,
    address: AddressOption = None,
) -> None:
    """Measure an engine's steps over a grid of sizes, and write cost tables for `rayk plan`.

    Exit 0: the tables are written. 1: so they are, but a tenth of the measured places is off by over 10 %.
    2: bad input, or the grid did not run.
    """
    given = {
        "tp": None if tp is None else _numbers(tp, "--tp"),
        "pairs": None if pairs is None else _pairs(pairs),
        "device": device,
        "dtype": dtype,
        "max_tokens": max_tokens,
        "max_seqs": max_seqs,
        "max_batch_tokens": max_batch_tokens,
        "block_size": block_size,
        "drafts": drafts,
    }
    asked = _asked(model, {k: v for k, v in given.items() if v is not None}, wanted, quick=quick)
    if hardware is not None:
        _derive(hardware, asked, out)
        return
    runs = [_run_in(run) for run in from_runs or ()] or [_measure(asked, out / RUN, address, resume=resume)]
    fitted = _fit(runs, model)
    fitted.book.save(out)
    _tell(fitted, out)
    if not accept and not all(found.is_good for found in fitted.classes):
        raise typer.Exit(1)


def _asked(model: str, given: dict[str, Any], wanted: Path | None, *, quick: bool) -> GridRequest:
    """Say what to measure: what was given, else what an experiment needs, else the usual."""
    from rayk.planner.measure import GridRequest
    from rayk.specs.devices import resolve_device

    found: dict[str, Any] = {"pairs": ((1, 1),), "device": "auto"}
    if wanted is not None:
        from rayk.actors.tokenizer import load_encoder
        from rayk.planner.wanted import wanted_by

        found |= asdict(wanted_by(wanted, model, load_encoder))
    found |= given
    found["device"] = resolve_device(found["device"])
    return GridRequest(model=model, is_quick=quick, **found)


def _run_in(folder: Path) -> Path:
    """Return a run's folder; that of tables has the run that they were fitted to below it."""
    return folder / RUN if (folder / RUN).is_dir() else folder


def _measure(asked: GridRequest, folder: Path, address: str | None, *, resume: bool) -> Path:
    """Run the grid. Raises UserError for bad input."""
    from rayk.cli.progress import RunProgress
    from rayk.experiments.planning import plan_experiment
    from rayk.models.families import read_config
    from rayk.models.hub import config_file
    from rayk.planner.measure import grid_spec
    from rayk.specs import load_spec

    loaded = load_spec(grid_spec(asked, read_config(config_file(asked.model)[1])), source="rayk costs")
    plan = plan_experiment(
        loaded, folder, address=address, resume=resume, tell=lambda text: stderr().print(text, markup=False)
    )
    from rayk.experiments.run import run_experiment
    from rayk.types.signals import interrupts

    progress = RunProgress()
    with contextlib.redirect_stdout(sys.stderr), interrupts(progress.interrupted), progress:
        result = run_experiment(plan, address=address, progress=progress)
    failed = result.cells[~result.cells["met"]]
    if len(failed):
        reasons = ", ".join(f"{row['cell_id']}: {row['reason']}" for row in failed.to_dict("records")[:3])
        stderr().print(f"{len(failed)} cells failed and are not fitted: {reasons}", markup=False)
    return folder


def _fit(runs: list[Path], model: str) -> FittedBook:
    """Fit tables to runs of the model. Raises UserError for runs of others."""
    from rayk.models.families import read_config
    from rayk.models.hub import config_file
    from rayk.planner.fitting import fit_runs
    from rayk.planner.recorded import read_run

    return fit_runs([read_run(run).of_model(read_config(config_file(model)[1]), model) for run in runs])


def _derive(hardware: str, asked: GridRequest, out: Path) -> None:
    """Write tables from data sheets."""
    from rayk.models.families import read_config
    from rayk.models.hub import config_file
    from rayk.planner.hardware import read_hardware, roofline_book, sheet_told

    machine = read_hardware(hardware)
    config = read_config(config_file(asked.model)[1])
    sizes = sorted({*asked.tp, *(n for pair in asked.pairs for n in pair)})
    book = roofline_book(machine, config, tp=sizes, dtype=asked.dtype, block_size=asked.block_size)
    book.save(out)
    for line in sheet_told(machine, config, book):
        stdout().print(line, markup=False, highlight=False, soft_wrap=True)
    stderr().print(f"tables: {out}", markup=False)


def _tell(fitted: FittedBook, out: Path) -> None:
    from rayk.planner.coverage import RESIDUALS, told, write_residuals

    console = stdout()
    for line in told(fitted):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    write_residuals(fitted, out)
    stderr().print(f"tables: {out}; the error at every place: {RESIDUALS}", markup=False)


def _numbers(text: str, where: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"{text!r} is not a list of numbers", where=where, mend=f"{where} 1,2") from None
    if min(found) < 1:
        raise UserError(f"{min(found)} is no TP size", where=where, mend=f"{where} 1,2")
    return found


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    if text in ("", "none"):
        return ()
    found = [tuple(_numbers(part.replace(":", ","), "--pairs")) for part in text.split(",")]
    if any(len(pair) != 2 for pair in found):
        raise UserError(f"{text!r} is not a list of pairs", where="--pairs", mend="--pairs 1:1,1:2")
    return tuple((pair[0], pair[1]) for pair in found)
