"""`rayk run`: check a spec, run its matrix, show the verdicts."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayk.cli.guard import TOKEN_FILE_HELP, guarded, stderr, stdout
from rayk.types.errors import UserError

if TYPE_CHECKING:
    from rayk.actors.token_file import TokenFile
    from rayk.specs import LoadedSpec

REASON_LINES = 3  # of a reason in a terminal; files and the report have it whole


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
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster to use [default: RAY_ADDRESS, else a local one of its own]."),
    ] = None,
    ray_token_file: Annotated[Path | None, typer.Option(help=TOKEN_FILE_HELP)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="UNSUPPORTED cells fail the run.")] = False,
) -> None:
    """Run an experiment matrix and print its verdict table.

    Exit 0: every cell is PASS or NEAR_TIE (or met its expected verdict). 1: some cell failed.
    2: the spec or the model is bad, nothing was started; or the disk is full. 130: interrupted (143: by
    SIGTERM). Finished cells are on disk and --resume continues.
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
    token_file: TokenFile | None = None,
) -> int:
    """Run the experiment and return the exit code. Raises UserError for bad input."""
    from rayk.specs import load_spec

    loaded = load_spec(path, overrides)
    if resume and out is None:
        raise UserError(problem="--resume needs --out DIR, the run to continue")
    folder = out or loaded.default_folder()
    check_before_start(loaded, folder, address=address, resume=resume)

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
                loaded, folder, address=address, resume=resume, progress=progress, token_file=token_file
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


def check_before_start(loaded: LoadedSpec, folder: Path, *, address: str | None, resume: bool) -> None:
    """Write the spec's checkpoints that are missing, then check all that needs neither torch nor Ray, so that
    bad input fails in a second.

    Raises UserError. Texts of a prompts file are not tokenised here: the driver checks them again.
    """
    from rayk.actors.environment import check_address, wanted_address
    from rayk.experiments.checkpoints import write_checkpoints
    from rayk.models.families import load_config
    from rayk.models.headers import check_weights
    from rayk.oracle.files import input_hashes
    from rayk.reports.folder import check_directory
    from rayk.specs import dump_spec, plan_cells, renew_spec
    from rayk.specs.devices import check_device
    from rayk.specs.host_tier import check_machine, check_pools

    cluster = wanted_address(address)
    write_checkpoints(loaded, lambda text: stderr().print(text, markup=False))
    configs = {name: load_config(name) for name in loaded.spec.models()}
    for name in configs:
        check_weights(Path(name))
    planned = plan_cells(loaded, configs, tokenizer_loader=lambda _: lambda _text: [0])
    if not cluster:
        for cell, _ in planned:
            check_device(cell.spec.device, where=loaded.where("device"))
            check_machine(cell.spec.offload, loaded.where)
            if cell.unsupported is None:
                check_pools(cell.all_engines, configs[cell.spec.model], loaded.where("engine.num_blocks"))
    inputs = input_hashes(loaded.spec.models(), loaded.spec.prompt_files()) if resume else {}
    check_directory(folder, dump_spec(loaded.spec), resume=resume, inputs=inputs, renew=renew_spec)
    if cluster:
        check_address(cluster)
