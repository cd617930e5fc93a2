"""Check a spec, run its matrix, show the verdicts: `rayk run`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayk.cli.guard import AddressOption, TokenFileOption, guarded, stderr, stdout
from rayk.types.errors import UserError

if TYPE_CHECKING:
    from rayk.actors.token_file import TokenFile

REASON_LINES = 3  # in a terminal; files and the report have the whole reason


@guarded
def run(
    spec: Annotated[Path, typer.Argument(help="The experiment, YAML.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results [default: runs/<name>-<time>].")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key or an axis; repeatable."),
    ] = None,
    address: AddressOption = None,
    ray_token_file: TokenFileOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ask the reference anew, whatever earlier runs kept of it.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="UNSUPPORTED cells fail the run.")] = False,
) -> None:
    """Run an experiment matrix and print its verdict table.

    Exit 0: every cell is PASS, NEAR_TIE or UNSUPPORTED (or met its expected verdict). 1: some cell
    failed. 2: the spec or the model is bad, nothing was started; or all cells are UNSUPPORTED; or the disk
    is full. 130: interrupted (143: by SIGTERM). Finished cells are on disk and --resume continues.
    """
    from rayk.actors.environment import wanted_address
    from rayk.actors.token_file import TokenFile

    token_file = TokenFile.asked(ray_token_file, is_own_cluster=wanted_address(address) is None)
    code = run_spec(
        spec,
        out,
        overrides=overrides or [],
        address=address,
        resume=resume,
        fresh=fresh,
        strict=strict,
        token_file=token_file,
    )
    raise typer.Exit(code)


def run_spec(
    path: Path,
    out: Path | None,
    *,
    overrides: list[str],
    address: str | None,
    resume: bool,
    strict: bool,
    fresh: bool = False,
    token_file: TokenFile | None = None,
) -> int:
    """Run the experiment and return the exit code. Raises UserError for bad input."""
    from rayk.experiments.planning import plan_experiment
    from rayk.specs import load_spec

    loaded = load_spec(path, overrides)
    if resume and out is None:
        raise UserError(problem="--resume needs --out DIR, the run to continue")
    folder = out or loaded.default_folder()
    plan = plan_experiment(
        loaded, folder, address=address, resume=resume, tell=lambda text: stderr().print(text, markup=False)
    )

    # Torch and pandas are imported here so that bad input is refused in a second.
    from rayk.actors.token_file import removal_of
    from rayk.cli.plain import print_table
    from rayk.cli.progress import RunProgress
    from rayk.experiments.run import run_experiment
    from rayk.reports import exit_code, verdict_table
    from rayk.types.signals import interrupts

    progress = RunProgress()
    try:
        # Ray prints what befalls workers to stdout, which is for the table alone.
        stopping = interrupts(progress.interrupted, at_once=removal_of(token_file))
        with contextlib.redirect_stdout(sys.stderr), stopping, progress:
            result = run_experiment(
                plan, address=address, progress=progress, token_file=token_file, fresh=fresh
            )
    except KeyboardInterrupt:
        stderr().print(f"{progress.summary()}: --out {folder} --resume continues", markup=False)
        raise
    console = stdout()
    reason_lines = REASON_LINES if console.is_terminal else None
    width = console.width if console.is_terminal else None
    print_table(console, verdict_table(result.cells, width=width, reason_lines=reason_lines))
    stderr().print(f"report: {folder / 'report.html'}", markup=False)
    return exit_code(result.cells, strict=strict)
