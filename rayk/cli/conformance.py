"""Try a KV connector, or a store of KV, without an engine: `rayk conformance`."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rayk.cli.guard import guarded, stderr, stdout
from rayk.cli.plain import print_table
from rayk.types.errors import UserError

if TYPE_CHECKING:
    from rayk.conformance.catalog import Check, StoreCheck
    from rayk.conformance.host import ConnectorFacts
    from rayk.conformance.runner import CheckResult
    from rayk.reports.page import Page, Section

TABLES = ("checks", "requests")
STYLES = {"PASS": "green", "UNSUPPORTED": "dim"}
SIDES = ("prefill", "decode")
MIN_TIMEOUT_S = 5.0
CALL_SHARE = 0.5  # the share of a check's time that one call may take


@guarded
def conformance(
    connector: Annotated[
        str, typer.Argument(metavar="MODULE:CLASS", help="The connector or store.", show_default=False)
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results [default: runs/conformance-<class>-<time>].")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Only this check, or all whose ids begin with ID.; repeatable."),
    ] = None,
    list_checks: Annotated[bool, typer.Option("--list", help="Print the checks and run none.")] = False,
    every_layout: Annotated[
        bool, typer.Option("--every-layout", help="All 36 pairs of layouts instead of 12.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For one check.")] = 60.0,
    python: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The interpreter that the class runs in, e.g. of vLLM's own."),
    ] = None,
) -> None:
    """Try a KV connector between two engines, or a store of KV, without an engine, a model or a GPU.

    Any class with the protocol of `rayk.transfer.Connector` is put through layouts, TP pairs, block sizes, KV
    groups, many requests, reused blocks and faults. Its ranks live in processes of their own (of one process
    if the class says so); pages are filled from an oracle that knows every byte, what must not be written is
    watched, and a connector that hangs is killed. A failure says why: the wrong byte by layer, head, token, K
    or V, or who reported what too early, twice or never.

    A class with the protocol of `rayk.conformance.store.Store` (`save` and `look_up`) is tried for identity:
    it must find what was saved for an equal prompt, and nothing that was saved for other tokens, or for
    another LoRA adapter, cache salt, model revision or image. A failure says whose page answered.

    What the class's own `supports(case)` refuses is listed as UNSUPPORTED and fails nothing. Modules are
    imported from the current folder and PYTHONPATH. Exit 0: no check failed; 1: some did; 2: the connector
    cannot be imported, or no check could be run.
    """
    from rayk.conformance.catalog import all_checks, choose, store_checks

    every: list[Check | StoreCheck] = [*all_checks(every_layout=every_layout), *store_checks()]
    checks = choose(every, only or [])
    if list_checks:
        print_table(stdout(), _list(checks))
        return
    if not connector:
        raise UserError("no connector was named", "rayk conformance", "e.g. rayk.transfer:LocalConnector")
    if timeout < MIN_TIMEOUT_S:
        raise UserError(f"{timeout:g} s is too short for a check", "--timeout", f"{MIN_TIMEOUT_S:g} or more")
    if python is not None and not os.access(python, os.X_OK):
        raise UserError(f"{python} is no program", "--python", "an interpreter, e.g. .venv-vllm/bin/python")
    raise typer.Exit(_run(connector, checks, out, timeout, str(python or sys.executable)))


def _run(
    connector: str, every: Sequence[Check | StoreCheck], out: Path | None, timeout: float, python: str
) -> int:
    from rayk.conformance.rig import Settings
    from rayk.conformance.runner import UNSUPPORTED, Kit, failed
    from rayk.reports.environment import collect_environment
    from rayk.reports.table_files import claim_folder
    from rayk.types.signals import interrupts

    settings = Settings(check_s=timeout, call_s=timeout * CALL_SHARE)
    console = stderr()
    made = Kit(connector, path=[str(Path.cwd())], settings=settings, python=python)
    with interrupts(lambda: None), made as kit:
        facts, checks = kit.facts, kit.of_its_kind(every)
        now = datetime.datetime.now().astimezone()
        folder = out or Path("runs") / f"conformance-{facts.name}-{now:%Y%m%d-%H%M%S}"
        claim_folder(folder, TABLES)
        environment = collect_environment(command=sys.argv, connector=connector)
        console.print(f"{connector} ({_kind(facts)}): {len(checks)} checks", markup=False)
        results = []
        for number, result in enumerate(kit.run_all(checks), 1):
            results.append(result)
            console.print(_line(number, len(checks), result))
    _write(folder, connector, facts, results, environment)
    printer = stdout()
    printer.print(_table(results, printer))
    console.print(f"report: {folder / 'report.html'}", markup=False)
    if all(result.verdict == UNSUPPORTED for result in results):
        raise UserError("it supports none of these checks", f"connector {connector}", "see its `supports`")
    return int(bool(failed(results)))


def _kind(facts: ConnectorFacts) -> str:
    if facts.is_store:
        return "a store"
    return f"{facts.mode}, ranks in " + (
        "processes of their own" if facts.is_cross_process else "one process"
    )


def _list(checks: Sequence[Check | StoreCheck]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("proves that")
    for check in checks:
        table.add_row(check.id, check.proves)
    return table


def _line(number: int, total: int, result: CheckResult) -> Text:
    style = STYLES.get(result.verdict, "bold red")
    return Text.assemble(
        f"{number:>{len(str(total))}}/{total} ",
        (f"{result.verdict:<12}", style),
        f" {result.id}  {result.wall_s:.1f} s",
    )


def _table(results: Sequence[CheckResult], console: Console) -> Table:
    table = Table(box=None, pad_edge=False, width=console.width)
    for title in ("check", "verdict"):
        table.add_column(title, no_wrap=True)
    table.add_column("reason", ratio=1)
    for result in results:
        style = STYLES.get(result.verdict, "bold red")
        reason = result.reason or f"[dim]{result.proves}[/]"
        table.add_row(result.id, Text(result.verdict, style), reason if not result.reason else Text(reason))
    return table


def _write(
    folder: Path,
    connector: str,
    facts: ConnectorFacts,
    results: Sequence[CheckResult],
    environment: dict[str, Any],
) -> None:
    from rayk.reports.files import write_text
    from rayk.reports.html import write_page
    from rayk.reports.table_files import write_tables

    rows = {
        "checks": [result.record() for result in results],
        "requests": [row for result in results for row in result.outcome_records()],
    }
    write_tables(rows, folder)
    write_text(folder / "environment.json", json.dumps(environment, indent=2) + "\n")
    page = _page(connector, facts, results, rows, environment)
    write_page(page, folder / "report.html")
    write_text(folder / "report.md", _markdown(page))


def _page(
    connector: str,
    facts: ConnectorFacts,
    results: Sequence[CheckResult],
    rows: dict[str, list[dict[str, Any]]],
    environment: dict[str, Any],
) -> Page:
    from rayk.conformance.runner import failed, headline
    from rayk.reports.page import Page

    bad = failed(results)
    stats = [(f"{sum(result.wall_s for result in results):.0f} s", "in all")]
    if not facts.is_store:
        stats = [
            (facts.mode, "which half of a request comes first decides"),
            ("many" if facts.is_cross_process else "one", "processes for its ranks"),
            (str(len(rows["requests"])), "reports of requests"),
            *stats,
        ]
    return Page(
        eyebrow=f"rayk · conformance · {str(environment['started']).replace('T', ' ')[:16]}",
        title=f"{facts.name}: {headline(results)}",
        chips=[("unmet" if bad else "met", f"{len(bad)} failed" if bad else "conforms")],
        stats=stats,
        sections=_sections(connector, rows, is_store=facts.is_store),
        environment=environment,
        footer="Tables: checks and requests (parquet, csv), report.md beside this file.",
    )


def _sections(connector: str, rows: dict[str, list[dict[str, Any]]], *, is_store: bool) -> list[Section]:
    from rayk.conformance.runner import FAIL
    from rayk.reports.page import Column, Section

    checks = [
        Column(title="check", key="id"),
        Column(title="verdict", key="verdict"),
        Column(title="reason", key="reason"),
        Column(title="proves that", key="proves"),
        Column(title="wall s", key="wall_s", spec=".2f"),
    ]
    pair = [
        *(
            Column(title=f"{side} {size.upper()}", key=f"{side}_{size}", spec="d")
            for size in ("tp", "dcp", "pp")
            if size == "tp"
            or any(row.get(f"{side}_{size}", 1) > 1 for row in rows["checks"] for side in SIDES)
            for side in SIDES
        ),
        Column(title="prefill layout", key="prefill_layout"),
        Column(title="decode layout", key="decode_layout"),
        Column(title="prefill block", key="prefill_block_size", spec="d"),
        Column(title="decode block", key="decode_block_size", spec="d"),
        Column(title="kinds of KV", key="kinds"),
    ]
    requests = [
        Column(title="check", key="check"),
        Column(title="request", key="request_id"),
        Column(title="side", key="side"),
        Column(title="rank", key="rank", spec="d"),
        Column(title="outcome", key="outcome"),
        Column(title="ms", key="reported_ms", spec=".2f"),
        Column(title="reason", key="reason"),
    ]
    sections = []
    if failures := [row for row in rows["checks"] if row["verdict"] == FAIL]:
        sections.append(Section(title="Failures", columns=checks[:4], rows=failures))
    sections.append(
        Section(
            title="Checks",
            note="UNSUPPORTED is what the connector itself says it cannot do; it fails nothing.",
            columns=checks if is_store else [*checks, *pair],
            rows=rows["checks"],
        )
    )
    if not is_store:
        sections.append(
            Section(
                title="Requests",
                note="What each rank reported, and how long after its send() or receive(). Times are of a "
                "busy process that is polled in turn: they compare, and measure nothing.",
                columns=requests,
                rows=rows["requests"],
            )
        )
    sections.append(Section(title="Reproduce", text=f"rayk conformance {connector}"))
    return sections


def _markdown(page: Page) -> str:
    from rayk.reports.markdown import page_markdown

    return page_markdown(replace(page, sections=[s for s in page.sections if s.title != "Requests"]))
