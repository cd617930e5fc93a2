"""What jobs/failure_policies.py shows of its table: Markdown, and a page with plots."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rayk.reports.md_table import markdown_table
from rayk.reports.page import Column, Page, Plot, Section, text_rows

TABLES = ("policies",)

COLUMNS = (
    Column(title="policy", key="policy"),
    Column(title="verdict", key="verdict"),
    Column(title="answered", key="answered_share", spec=".1%"),
    Column(title="saved", key="num_recovered", spec=",d"),
    Column(title="wrong answers", key="num_wrong", spec=",d"),
    Column(title="TTFT p50, ms", key="ttft_ms_p50", spec=",.0f"),
    Column(title="TTFT p99, ms", key="ttft_ms_p99", spec=",.0f"),
    Column(title="E2E p50, ms", key="e2e_ms_p50", spec=",.0f"),
    Column(title="E2E p99, ms", key="e2e_ms_p99", spec=",.0f"),
)
COSTS = (
    Column(title="policy", key="policy"),
    Column(title="prompt tokens computed again", key="num_recomputed_tokens", spec=",d"),
    Column(title="kept: arrived and proven", key="num_valid_tokens", spec=",d"),
    Column(title="moved, KiB", key="moved_kib", spec=",.0f"),
    Column(title="for nothing, KiB", key="wasted_kib", spec=",.0f"),
    Column(title="moved again, KiB", key="again_kib", spec=",.0f"),
    Column(title="blocks held at the end", key="num_blocks_held", spec=",d"),
)
FAULTS = (
    Column(title="kind", key="kind"),
    Column(title="point", key="point"),
    Column(title="which", key="which"),
)
NOTE = (
    "Times are of answered requests: under `fail` the struck ones are missing, which flatters it. A lost "
    "read is noticed at the transfer's deadline, so that its request waits that long under the other two. "
    "`recompute` keeps the first token and what of the KV is proven; `migrate` moves all of it again."
)


def shown(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with bytes as they are shown."""
    return [
        {
            **row,
            "moved_kib": row["moved_bytes"] / 1024,
            "wasted_kib": row["wasted_bytes"] / 1024,
            "again_kib": row["again_bytes"] / 1024,
        }
        for row in rows
    ]


def fault_rows(faults: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What is planted, in words."""
    known = ("kind", "point", "seed")
    return [
        {
            "kind": f["kind"],
            "point": f.get("point", "transfer"),
            "which": ", ".join(f"{k} {v}" for k, v in f.items() if k not in known),
        }
        for f in faults
    ]


def about(options: argparse.Namespace) -> str:
    """The load, in words."""
    return (
        f"{options.requests} prompts at once, {options.repeats} times per policy, transfer mode "
        f"{options.mode}, transfers' deadline {options.transfer_s:g} s, seed {options.seed}; two prefill "
        "engines, one decode engine. Each repeat plants every fault once; one whose point is not passed that "
        "often, because an engine died before, strikes nothing."
    )


def markdown(
    rows: Sequence[Mapping[str, Any]], faults: Sequence[Mapping[str, Any]], options: argparse.Namespace
) -> str:
    """The tables as GitHub Markdown."""
    lines = ["# Failure policies", "", about(options), ""]
    tables = ((COLUMNS, shown(rows)), (COSTS, shown(rows)), (FAULTS, fault_rows(faults)))
    for columns, body in tables:
        lines += [*markdown_table([c.title for c in columns], text_rows(columns, body)), ""]
    return "\n".join([*lines, NOTE])


def make_page(
    rows: Sequence[Mapping[str, Any]],
    faults: Sequence[Mapping[str, Any]],
    options: argparse.Namespace,
    environment: Mapping[str, Any],
) -> Page:
    """The report."""
    saving = [r for r in rows if r["policy"] in ("recompute", "migrate")]
    all_saved = all(r["answered_share"] == 1 for r in saving)
    right = not any(r["num_wrong"] for r in rows)
    chips = [
        (
            "met" if all_saved else "unmet",
            "recompute and migrate answer all" if all_saved else "requests lost",
        ),
        ("met" if right else "unmet", "no wrong token" if right else "wrong tokens delivered"),
    ]
    by_policy = {row["policy"]: row for row in rows}
    stats = [(f"{by_policy[name]['answered_share']:.0%}", f"answered under {name}") for name in by_policy]
    return Page(
        eyebrow="failure policies",
        title="The same faults under three policies",
        chips=chips,
        stats=stats,
        sections=[
            Section(
                title="Answers", note=about(options), columns=COLUMNS, rows=shown(rows), plots=[_plot(rows)]
            ),
            Section(title="What it costs", note=NOTE, columns=COSTS, rows=shown(rows)),
            Section(title="Faults of every repeat", columns=FAULTS, rows=fault_rows(faults)),
            Section(
                title="What ended or was saved", text="\n".join(f"{r['policy']}: {r['reason']}" for r in rows)
            ),
        ],
        environment=environment,
        footer="python jobs/failure_policies.py",
    )


def _plot(rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Request times, one box per policy."""
    data = [
        {"type": "box", "name": row["policy"], "y": row["e2e_ms"], "boxpoints": "all", "jitter": 0.4}
        for row in rows
    ]
    layout = {
        "yaxis": {"title": {"text": "E2E of answered requests, ms"}, "rangemode": "tozero"},
        "showlegend": False,
    }
    return Plot(id="e2e", title="How late answers are", data=data, layout=layout)
