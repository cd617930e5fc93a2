"""Say what this machine can do, and how to mend what is missing: `rayk doctor`."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict
from typing import Annotated

import typer

from rayk.cli.guard import guarded, stderr, stdout

SYMBOLS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[bold red]missing[/]"}


class DoctorFormat(enum.StrEnum):
    text = "text"
    json = "json"


@guarded
def doctor(
    output_format: Annotated[
        DoctorFormat, typer.Option("--format", help="How to print.")
    ] = DoctorFormat.text,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to look for [default: RAY_ADDRESS].")
    ] = None,
) -> None:
    """Say what this machine can do: devices, Ray, NIXL transports (measured), Triton, versions. And what
    listens here: each port of Ray's and rayk's processes, and what it asks of whoever comes.

    Exit 0: experiments can run here. 1: something they need is missing.
    """
    from rich.markup import escape
    from rich.table import Table

    from rayk.cli.checkup import examine
    from rayk.cli.plain import print_table

    stderr().print("measuring, a few seconds")
    findings = examine(address)
    if output_format is DoctorFormat.json:
        typer.echo(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        table = Table(title="rayk doctor", title_justify="left")
        for name in ("what", "", "found", "how to mend"):
            table.add_column(name, overflow="fold")
        for finding in findings:
            what, found, mend = map(escape, (finding.what, finding.found, finding.mend))
            table.add_row(what, SYMBOLS[finding.status], found, mend)
        print_table(stdout(), table)
    if any(f.status == "missing" for f in findings):
        raise typer.Exit(1)
