"""Hold predictions against measured runs: what `rayk plan --validate` does."""

from __future__ import annotations

from pathlib import Path

import typer

from rayk.cli.guard import stderr, stdout
from rayk.types.errors import UserError


def validate_runs(
    runs: list[Path],
    *,
    costs: Path | None,
    out: Path | None,
    slo: str,
    include_fitted: bool,
    extrapolate: bool,
) -> None:
    """Predict the cells of runs, print how far off that is, and write a page of it. Exits 1 where a bound is
    missed. Raises UserError."""
    if costs is None:
        raise UserError("no cost tables to predict with", where="--validate", mend="--costs DIR")
    import time

    from rayk.planner.validate import ValidationPlan, validate
    from rayk.reports.validation import Judged
    from rayk.reports.validation_page import is_missed, validation_lines
    from rayk.types.slo import parse_slo

    folder = out or Path("runs") / f"validation-{time.strftime('%Y%m%d-%H%M%S')}"
    plan = ValidationPlan(
        runs=runs,
        costs=costs,
        out=folder,
        judged=Judged(slos=parse_slo(slo)),
        include_fitted=include_fitted,
        extrapolate=extrapolate,
    )
    found = validate(
        plan,
        tell=lambda number, total, cell_id: stderr().print(
            f"predicting {number + 1} of {total}: {cell_id}", markup=False
        ),
    )
    for line in validation_lines(found):
        stdout().print(line, markup=False, highlight=False, soft_wrap=True)
    stderr().print(f"report: {folder / 'report.html'}", markup=False)
    if is_missed(found):
        raise typer.Exit(1)
