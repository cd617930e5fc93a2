"""Find engines for a load, by simulation over cost tables: `rayk plan`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayk.cli.guard import guarded, stderr, stdout
from rayk.types.errors import UserError

if TYPE_CHECKING:
    from rayk.cli.progress import SearchBar
    from rayk.reports.plans import PlanResult

BUDGET_S = 120.0


@guarded
def plan(
    spec: Annotated[
        Path | None, typer.Argument(help="What to plan, YAML: see docs/plan.md.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results [default: runs/<name>-<time>].")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key; repeatable."),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Folder of cost tables, in place of the spec's `costs`.")
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(help="Data sheet, in place of the spec's: all predictions are marked as UNMEASURED."),
    ] = None,
    extrapolate: Annotated[
        bool,
        typer.Option("--extrapolate", help="Predict steps unlike those measured, too, and say how many."),
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Simulations at a time [default: one for each core].")
    ] = None,
    budget_s: Annotated[
        float, typer.Option(min=1, help="Seconds of the search; what it left out is said.")
    ] = BUDGET_S,
    validate: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN", help="Predict the cells of this run instead, and say how far off that is."
        ),
    ] = None,
    slo: Annotated[
        str, typer.Option(help="For --validate: limits of a good answer, e.g. ttft=300ms,tpot=30ms.")
    ] = "",
    include_fitted: Annotated[
        bool,
        typer.Option("--include-fitted", help="For --validate: cells that the costs were fitted to, too."),
    ] = False,
) -> None:
    """Find how many engines, at which TP and under which policy a load needs, and what starts them.

    Everything is predicted: the engines' own scheduler, block manager and hand-over run under a virtual clock
    over measured cost tables (`rayk costs`).

    Exit 0: the plan keeps the SLO. 1: none does, and the one that comes closest is printed; with --validate,
    predictions are further off than they may be. 2: bad input, or every plan takes steps that the tables do
    not cover.
    """
    if validate:
        from rayk.cli.validation import validate_runs

        _refuse_beside_validate(spec, overrides, hardware)
        validate_runs(
            validate,
            costs=costs,
            out=out,
            slo=slo,
            include_fitted=include_fitted,
            extrapolate=extrapolate,
        )
        return
    if spec is None:
        raise UserError("nothing to plan", mend="rayk plan SPEC.yaml")
    given = list(overrides or ())
    if costs is not None and hardware is not None:
        raise UserError("costs are given twice", where="--hardware", mend="--costs or --hardware alone")
    given += [f"costs={costs}"] if costs is not None else []
    given += [f"hardware={hardware}"] if hardware is not None else []

    from rayk.planner.plan import Plan

    asked = Plan(spec, given, extrapolates=extrapolate, num_jobs=jobs, budget_s=budget_s)
    folder = out or asked.inputs.loaded.default_folder()
    with _progress() as bar:
        found = asked.run(folder, progress=bar)
    show(found)
    stderr().print(f"report: {folder / 'report.html'}", markup=False)
    if not found.is_met:
        raise typer.Exit(1)


def _refuse_beside_validate(spec: Path | None, overrides: list[str] | None, hardware: Path | None) -> None:
    """Raise UserError for what a validation does not heed."""
    given = [str(spec)] * (spec is not None) + [f"--set {text}" for text in overrides or ()]
    given += [f"--hardware {hardware}"] * (hardware is not None)
    if given:
        raise UserError(
            "a validation takes cells as they were run", where=given[0], mend="leave it out, or --validate"
        )


@contextlib.contextmanager
def _progress() -> Iterator[SearchBar]:
    from rayk.cli.progress import SearchBar

    with SearchBar() as bar:
        yield bar


def show(found: PlanResult) -> None:
    """Print the answer, its uncertainty and the command, then the plans that were tried."""
    from rayk.cli.plain import print_table
    from rayk.reports.plan_text import plan_tables, plan_texts

    console = stdout()
    width = min(console.width, 100) if console.is_terminal else None
    for style, text in plan_texts(found.plans, found.facts, width=width or 78):
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    for table in plan_tables(found.plans, found.facts, width=width):
        console.print()
        print_table(console, table)
