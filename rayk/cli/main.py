"""Assemble the command `rayk`."""

from __future__ import annotations

from typing import Annotated

import typer

from rayk.cli.bench import bench
from rayk.cli.checkpoint import checkpoint
from rayk.cli.conformance import conformance
from rayk.cli.costs import costs
from rayk.cli.doctor import doctor
from rayk.cli.explain import explain
from rayk.cli.foreign_flags import WithHints
from rayk.cli.plan import plan
from rayk.cli.report import report
from rayk.cli.run import run
from rayk.cli.serve import serve
from rayk.cli.top import top

app = typer.Typer(
    name="rayk",
    help="Run LLM inference with prefill and decode on engines of unlike tensor parallelism, "
    "and prove every byte of KV and every token.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: never truncates the names of options.
    rich_markup_mode=None,
    epilog="Example: rayk run jobs/hetero_tp.yaml",
)


def _print_version(is_given: bool) -> None:
    if is_given:
        import importlib.metadata

        typer.echo(importlib.metadata.version("rayk"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


app.command(epilog="Example: rayk run jobs/hetero_tp.yaml --out runs/mine --set prompts.random.count=3")(run)
app.command(
    cls=WithHints,
    epilog="Example: rayk serve checkpoints/qwen3-tiny --prefill-tp 2 --decode-tp 1 --port 8000 "
    "--set engine.max_seqs=32",
)(serve)
app.command(epilog="Example: rayk top --url http://127.0.0.1:8000 --once")(top)
app.command(epilog="Example: rayk checkpoint qwen3 checkpoints/qwen3-tiny --seed 0")(checkpoint)
app.command(epilog="Example: rayk report runs/monday runs/tuesday --format html")(report)
app.command(epilog="Example: rayk doctor")(doctor)
app.command(
    cls=WithHints,
    epilog="Example: rayk bench --url http://127.0.0.1:8000 --rate 2 --rate 4 --num-requests 300 "
    "--input-tokens 64-256 --output-tokens 32 --slo ttft=200ms,tpot=20ms",
)(bench)
app.command(
    epilog="Example: rayk explain --model checkpoints/qwen3-tiny --prefill-tp 1 --decode-tp 2 "
    "--prefill-layout LBHNC --format json"
)(explain)

app.command(epilog="Example: rayk costs checkpoints/qwen3-tiny --tp 1,2 --pairs 1:1,1:2 --out costs")(costs)
app.command(epilog="Example: rayk plan jobs/plan.yaml --set traffic.rate=20")(plan)
app.command(
    epilog="Example: rayk conformance rayk.transfer:LocalConnector --only layouts --only faults.producer_dies"
)(conformance)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
