"""report.html: one self-contained file that works offline, in light and dark, wide and narrow."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from rayk.reports import host_tier, memory
from rayk.reports.answers import answers
from rayk.reports.files import parse_spec, write_text
from rayk.reports.grids import verdict_grids
from rayk.reports.page import Page, Section
from rayk.reports.plots import MAX_BOXES, make_plots
from rayk.reports.result import Result
from rayk.reports.spreads import SPREADS, pareto_plot, spread_plots
from rayk.reports.stages import (
    LIMITS,
    PARTS,
    limit_rows,
    limit_shares,
    request_parts,
    told_limits,
    waterfall_data,
)
from rayk.reports.staging import COLUMNS, staging_records
from rayk.reports.tp_pairs import ceiling_of, pair_grids
from rayk.reports.trust import doubt_text
from rayk.reports.values import format_bytes, format_value
from rayk.reports.verdicts import (
    gravest_first,
    headline,
    tells_fast_prefill,
    told_columns,
    told_wrong_bytes,
    tone,
)

TEMPLATES = Path(__file__).parent / "templates"
VENDOR = Path(__file__).parent / "vendor"
"""What others wrote, with its licence."""
SHORT_TEXT = 24
"""A cell's text of no more characters stands on one line."""
SCRIPTS = ("report.js", "waterfall.js")


def render(result: Result) -> str:
    """The report as text."""
    spec = parse_spec(result.spec_yaml)
    in_tier = host_tier.tier_rows(result)
    plots = [*make_plots(result), *spread_plots(result), *pareto_plot(result.cells)]
    plots += host_tier.tier_plot(in_tier)
    ids = [plot["id"] for plot in plots]
    waterfall = waterfall_data(result)
    environment = result.environment
    return template("report.html.j2").render(
        **assets(),
        name=spec.get("name", "run"),
        model=_models(result, spec),
        started=str(environment.get("started", "")).replace("T", " ")[:16],
        git_commit=environment.get("git_commit"),
        headline=headline(result.cells, num_missing=result.num_missing),
        doubt=doubt_text(environment),
        title=headline(result.cells, verdicts=False, num_missing=result.num_missing),
        counts=_counts(result.cells),
        stats=_stats(result),
        grids=verdict_grids(result.cells),
        table=_cell_table(result.cells),
        staging=_staging_table(result),
        tells_fast_prefill=tells_fast_prefill(result.cells),
        answers=answers(result),
        shares=_share_bar(result),
        pairs=pair_grids(result),
        ceiling=ceiling_of(environment).text,
        moved_text=memory.moved_text(result),
        limits=_limit_table(result),
        memory=_memory_table(result),
        tier=_table(host_tier.COLUMNS, in_tier),
        tier_note=host_tier.NOTE,
        waterfall_json=script_json(waterfall) if waterfall else "",
        plot_ids=ids,
        spreads=[(f"spread-{name}", title) for name, title in SPREADS if f"spread-{name}" in ids],
        max_boxes=MAX_BOXES,
        boxes_left=len(result.cells) > MAX_BOXES,
        plots_json=script_json(plots),
        plotly_js=plotly_js() if plots or waterfall else "",
        environment=[*environment_items(environment), *_attention_items(result.cells)],
        spec_yaml=result.spec_yaml,
    )


def _models(result: Result, spec: dict[str, Any]) -> str:
    """The model, or all of them where it is an axis."""
    named = result.cells["model"] if "model" in result.cells else [spec.get("model", "")]
    return ", ".join(dict.fromkeys(map(str, named)))


def write_page(page: Page, path: Path) -> None:
    """One self-contained HTML file."""
    plots = [
        {"id": plot.id, "data": plot.data, "layout": plot.layout}
        for section in page.sections
        for plot in section.plots
    ]
    waterfalls = [dict(section.waterfall) for section in page.sections if section.waterfall]
    text = template("page.html.j2").render(
        **assets(),
        page=page,
        doubt=doubt_text(page.environment),
        sections=[(section, _body(section)) for section in page.sections],
        environment=environment_items(page.environment),
        plots_json=script_json(plots),
        waterfall_json=script_json(waterfalls[0]) if waterfalls else "",
        plotly_js=plotly_js() if plots or waterfalls else "",
    )
    write_text(path, text)


def _body(section: Section) -> list[list[dict[str, Any]]]:
    """Cells of the section's table: text, sort key, class."""
    body = []
    for row in section.rows:
        texts = [format_value(row[column.key], column.spec) for column in section.columns]
        body.append(
            [
                {
                    "text": text,
                    "value": float(row[column.key]) if column.spec and text else None,
                    "kind": "num" if column.spec else "short" if len(text) <= SHORT_TEXT else "",
                }
                for column, text in zip(section.columns, texts, strict=True)
            ]
        )
    return body


def template(name: str) -> jinja2.Template:
    """A template of this package; HTML is escaped."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    return jinja2.Environment(loader=loader, autoescape=True, **options).get_template(name)


def assets() -> dict[str, str]:
    """The style sheet and script every report carries."""
    return {
        "css": (TEMPLATES / "report.css").read_text(encoding="utf-8"),
        "js": "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }


def script_json(data: object) -> str:
    """JSON that is safe inside a <script> element; NaN becomes null."""
    return json.dumps(_no_nan(data), allow_nan=False).replace("<", "\\u003c")


def _no_nan(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _no_nan(v) for k, v in data.items()}
    if isinstance(data, list):
        return [_no_nan(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def plotly_js() -> str:
    """plotly.js itself, for a page that works offline: npm's plotly.js-cartesian-dist-min, a third of
    the size of all of it."""
    return (VENDOR / "plotly-cartesian.min.js").read_text(encoding="utf-8")


def _stats(result: Result) -> list[tuple[str, str]]:
    cells, transfers = result.cells, result.transfers
    output_tokens = int(result.requests["output_token_ids"].dropna().map(len).sum())
    checked = cells["num_kv_bytes_checked"].sum()
    wrong = told_wrong_bytes(cells)["num_kv_bytes_mismatched"]
    is_told = wrong.sum() > 0 or not (cells["verdict"] == "KV_MISMATCH").any()
    stats = [
        (f"{len(cells):,}", "cells"),
        (f"{len(result.requests):,}", "requests"),
        (f"{output_tokens:,}", "output tokens"),
    ]
    if checked:
        stats.append((format_bytes(checked), "rows of KV compared by digest"))
        told = (format_bytes(wrong.sum()), "KV bytes wrong") if is_told else ("wrong", "KV, by other checks")
        stats.append(told)
    if transfers["bytes"].any():
        stats.append((format_bytes(transfers["bytes"].sum()), "KV moved, in whole blocks"))
    wall = cells["wall_s"].sum()
    if wall:
        stats.append((f"{wall:,.0f} s", "in cells"))
    return stats


def _counts(cells: pd.DataFrame) -> list[tuple[str, int, str]]:
    """(tone, number, text), most frequent first: cells of one verdict that were met and that were not."""
    faulty = (cells["expected_verdict"] != "PASS").any()
    counts = Counter((tone(r), str(r["verdict"]), bool(r["met"])) for r in cells.to_dict(orient="records"))
    return [
        (colour, count, verdict if met or not faulty else f"{verdict}, not as expected")
        for (colour, verdict, met), count in counts.most_common()
    ]


def _cell_table(cells: pd.DataFrame) -> dict[str, Any]:
    """Reasons stand under the cells' names, where no scrolling is needed to see them."""
    columns = [c for c in told_columns(cells) if c[1] != "reason"]
    if (cells["expected_verdict"] != "PASS").any():
        columns.insert(2, ("expected", "expected_verdict", ""))
    rows = []
    for record in told_wrong_bytes(gravest_first(cells)).to_dict(orient="records"):
        row = [table_cell(record, column, spec) for _, column, spec in columns]
        row[0] |= {"why": record["reason"] or "", "tone": "" if record["met"] else "unmet"}
        rows.append(row)
    return {"head": [(title, bool(spec)) for title, _, spec in columns], "rows": rows}


def _staging_table(result: Result) -> dict[str, Any] | None:
    """What transfers chose; None where none had a choice."""
    records = staging_records(result.cells, result.transfers)
    rows = [[table_cell(record, column, spec) for _, column, spec in COLUMNS] for record in records]
    return {"head": [(title, bool(spec)) for title, _, spec in COLUMNS], "rows": rows} if rows else None


def table_cell(record: dict[Any, Any], column: str, spec: str) -> dict[str, Any]:
    """One cell of an HTML table: its text, sort key, class and chip."""
    value = record[column]
    names = {
        "cell_id": "name mono",
        "reason": "reason",
        "offload_note": "reason",
        "evidence": "reason",
        "limit": "short",
    }
    text = format_value(value, spec)
    return {
        "text": text,
        "value": float(value) if spec and text else None,
        "kind": "num" if spec else names.get(column, ""),
        "chip": tone(record) if column == "verdict" else "",
    }


def _limit_table(result: Result) -> dict[str, Any]:
    told = limit_rows(result)
    limits = told_limits(told)
    columns = [
        *(("cell_id", "cell_id", ""), ("limit", "limit", "")),
        *((f"{name} %", name, ".1f") for name in limits),
        ("evidence", "evidence", ""),
    ]
    rows = [[table_cell(row, column, spec) for _, column, spec in columns] for row in told]
    head = [(title, bool(spec)) for title, _, spec in columns]
    return {"head": head, "rows": rows, "meanings": list(limits.items())}


def _memory_table(result: Result) -> dict[str, Any] | None:
    """Used, padding, wasted; None for runs that did not tell."""
    rows = [
        [table_cell(r, column, spec) for _, column, spec in memory.COLUMNS]
        for r in memory.memory_rows(result)
    ]
    head = [(title, bool(spec)) for title, _, spec in memory.COLUMNS]
    return {"head": head, "rows": rows, "note": memory.memory_note(result)} if rows else None


def _table(
    columns: Sequence[tuple[str, str, str]], records: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Without columns that hold nothing; None without rows."""
    shown = [c for c in columns if any(format_value(record[c[1]], c[2]) for record in records)]
    rows = [[table_cell(record, column, spec) for _, column, spec in shown] for record in records]
    return {"head": [(title, bool(spec)) for title, _, spec in shown], "rows": rows} if rows else None


def _share_bar(result: Result) -> list[dict[str, Any]]:
    """Stretches of the bar in the summary, in the order in which requests pass them."""
    colours: dict[str, str] = {part.limit: part.colour for part in PARTS}
    shares = limit_shares(request_parts(result))
    return [
        {
            "share": round(share, 4),
            "colour": colours[limit],
            "text": f"{limit} {f'{100 * share:.0f}' if share >= 0.005 else '<1'}%",
            "tip": f"{limit}: {100 * share:.1f}% of all requests' time\n{LIMITS[limit]}",
        }
        for limit, share in ((limit, shares[limit]) for limit in dict.fromkeys(colours) if shares.get(limit))
    ]


def _attention_items(cells: pd.DataFrame) -> list[tuple[str, str]]:
    """What computed attention on each side, in all cells: an interpreter must not pass for a GPU."""
    items = []
    for side in ("prefill", "decode"):
        used = sorted(cells[f"{side}.attention_implementation"].dropna().unique())
        if used:
            items.append((f"{side} attention", ", ".join(used)))
    return items


def environment_items(environment: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """What environment.json says, as (name, value) in its order; nested names are joined."""
    items: list[tuple[str, str]] = []
    for key, value in environment.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            items += environment_items(value, f"{name} ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, item in enumerate(value, start=1):
                items += environment_items(item, f"{name} {number} ")
        elif isinstance(value, list):
            items.append((name, " ".join(map(str, value)) if value else "none"))
        else:
            items.append((name, "none" if value is None else str(value)))
    return items
