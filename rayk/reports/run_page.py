"""Make the report of a run: what its cells ended as, what moved, where time and memory went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from rayk.reports import divided, drafts, host_tier, loading, memory, side_by_side, staging
from rayk.reports.answers import answers
from rayk.reports.files import parse_spec
from rayk.reports.grids import verdict_grids
from rayk.reports.page import Column, Page, Section
from rayk.reports.plots import MAX_BOXES, latency_plots, pareto_plot, spread_plots, transfer_plots
from rayk.reports.result import Result
from rayk.reports.stages import limit_rows, shown_limits, waterfall_data
from rayk.reports.tp_pairs import ceiling_of, pair_grids
from rayk.reports.values import format_bytes, format_value
from rayk.reports.verdicts import (
    gravest_first,
    has_fast_prefill,
    headline,
    known_wrong_bytes,
    shown_columns,
    tone,
    verdict_rows,
)


def run_page(result: Result) -> Page:
    spec = parse_spec(result.spec_yaml)
    cells, environment = result.cells, result.environment
    name = spec.get("name", "run")
    started = str(environment.get("started", "")).replace("T", " ")[:16]
    parts = ["rayk experiment", str(name), _models(cells, spec), started]
    found = [
        Section(title="Verdicts", note=VERDICTS, hint=GRID_HINT, grids=verdict_grids(cells)),
        Section(
            title="vLLM and rayk",
            note=SIDE_BY_SIDE,
            columns=side_by_side.COLUMNS,
            rows=side_by_side.side_by_side(result),
        ),
        _pairs(result),
        _limits(result),
        Section(title="Requests, stage by stage", note=WATERFALL, waterfall=waterfall_data(result)),
        Section(title="Throughput against speed", note=PARETO, plots=pareto_plot(cells)),
        _tier(result),
        _drafts(result),
        Section(
            title="Where KV memory goes",
            note=memory.memory_note(result),
            columns=_told(memory.COLUMNS, memory.memory_rows(result), {divided.COLUMN}),
            rows=memory.memory_rows(result),
        ),
        Section(
            title="What loading weights takes",
            note=loading.NOTE,
            columns=_told(loading.COLUMNS, loading.loading_rows(result), {divided.COLUMN}),
            rows=loading.loading_rows(result),
        ),
        _cells(cells),
        Section(title="Transfers", note=TRANSFERS, hint=MARK_HINT, plots=transfer_plots(result)),
        Section(
            title="Staging",
            note=STAGING,
            columns=staging.COLUMNS,
            rows=staging.staging_records(cells, result.transfers),
        ),
        _latency(result),
        _spec(result),
    ]
    return Page(
        eyebrow=" · ".join(filter(None, parts)),
        name=str(name),
        title=headline(cells, verdicts=False, num_missing=result.num_missing),
        headline=headline(cells, num_missing=result.num_missing),
        chips=_chips(cells),
        stats=_stats(result),
        answers=answers(result),
        sections=[s for s in found if s.grids or s.rows or s.plots or s.waterfall or s.text],
        environment={**environment, **_attention(cells)},
        footer="Tables: cells.parquet, requests.parquet, transfers.parquet, beside this file.",
    )


VERDICTS = (
    "P and D are the tensor-parallel (TP) sizes of the prefill and the decode engines; titles are the KV "
    "layouts of both, prefill → decode, and what else divides KV over ranks. Under a verdict: the rate of "
    "the cell's transfers, or where nothing moved its median TTFT."
)
GRID_HINT = "Hover over or focus a cell for its reason and numbers."
PAIRS = (
    "Rows are the prefill engine's TP size, columns the decode engine's. Time: from the first post to the"
    " last byte of a request, all ranks together (of a push: what was left of it when the prompt was "
    "computed); the median over requests, and below it its 95% interval. Descriptors and bytes are means "
    "per request; the rate is all bytes over all that time, in 10⁹ bytes per second."
)
SIDE_BY_SIDE = (
    "Each cell of vLLM's engines, and the same cell of rayk's own: the same prompts, checks and bounds. "
    "Descriptors are those of all requests after merging: rayk's as it posts them, vLLM's as NIXL counted "
    "them. NIXL merges blocks that are neighbours on both sides, so vLLM's depend on which blocks requests "
    "were given; rayk explain --engine vllm counts them before that. Bytes are what they moved; a transfer's "
    "time is the median over requests, from the first post to the last byte."
)
WATERFALL = (
    "A bar per request of a cell from when it was due, named by repeat and number (0/3: the fourth of the"
    " first repeat); choose one to see its stages, in ms."
)
PARETO = (
    "A mark per cell, named by its TP sizes and, where you point at it, by the cell: output tokens per "
    "second over its workers (ranks), and tokens per second that one user sees (one over the median "
    "TPOT). Up and to the right is better; the line joins the cells that no other beats in both."
)
CELLS = (
    "Cells that failed come first, with their reasons. KV bytes were compared between both sides by "
    "digest, of them KV wrong differ (none is told where another check found KV wrong); KV waste is what "
    "a request of 4096 tokens holds and does not need. GB/s is the rate of transfers, TTFT and TPOT are "
    "medians."
)
SORT_HINT = "Click a column's name to sort by it."
FAST_PREFILL = (
    " Token-layers are tokens the prefill engine computed, summed over its layers; with fast prefill, the"
    " fast layers computed sampled tokens only."
)
TRANSFERS = (
    "One mark per request: all KV bytes that its decode engine got, over the time from the first post to "
    "the last byte, all ranks together (10⁹ bytes per second)."
)
MARK_HINT = "Point at one for its cell, and how many descriptors were posted."
STAGING = (
    "Of each cell's transfers, how many went through a staging buffer instead of run by run, and what the"
    " cost model expects of the way that was taken and of the other one. Sums over the cell's transfers."
)


def _models(cells: pd.DataFrame, spec: dict[str, Any]) -> str:
    named = cells["model"] if "model" in cells else [spec.get("model", "")]
    return ", ".join(dict.fromkeys(map(str, named)))


def _stats(result: Result) -> list[tuple[str, str]]:
    cells, transfers = result.cells, result.transfers
    output_tokens = int(result.requests["output_token_ids"].dropna().map(len).sum())
    checked = cells["num_kv_bytes_checked"].sum()
    wrong = known_wrong_bytes(cells)["num_kv_bytes_mismatched"]
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


def _chips(cells: pd.DataFrame) -> list[tuple[str, str]]:
    faulty = (cells["expected_verdict"] != "PASS").any()
    counts = Counter((tone(r), str(r["verdict"]), bool(r["met"])) for r in cells.to_dict(orient="records"))
    return [
        (colour, f"{count} {verdict}" if met or not faulty else f"{count} {verdict}, not as expected")
        for (colour, verdict, met), count in counts.most_common()
    ]


def _attention(cells: pd.DataFrame) -> dict[str, str]:
    """Say what computed attention on each side: an interpreter must not pass for a GPU."""
    used = {
        side: sorted(cells[f"{side}.attention_implementation"].dropna().unique())
        for side in ("prefill", "decode")
    }
    return {f"{side} attention": ", ".join(names) for side, names in used.items() if names}


def _pairs(result: Result) -> Section:
    note = f"{PAIRS} {ceiling_of(result.environment).text}\n{memory.moved_text(result)}"
    grids = [
        {"heading": grid["title"], "corner": "TP", **fact}
        for grid in pair_grids(result)
        for fact in grid["facts"]
    ]
    return Section(title="Transfers by TP sizes", id="tp-pairs", note=note.strip(), grids=grids)


def _limits(result: Result) -> Section:
    rows = limit_rows(result)
    limits = shown_limits(rows)
    shares = (Column(f"{name} %", name, ".1f") for name in limits)
    return Section(
        title="What limits this run",
        note="Where the time of a cell's requests goes, in percent; the largest share is its limit.",
        words=limits,
        columns=[
            Column("cell_id", "cell_id"),
            Column("limit", "limit"),
            *shares,
            Column("evidence", "evidence"),
        ],
        rows=rows,
    )


def _told(
    columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], optional: Collection[Column]
) -> list[Column]:
    """List columns without those of `optional` that are empty in all rows."""
    return [c for c in columns if c not in optional or any(format_value(row[c.key], c.spec) for row in rows)]


def _tier(result: Result) -> Section:
    rows = host_tier.tier_rows(result)
    told = _told(host_tier.COLUMNS, rows, host_tier.COLUMNS)
    plots = host_tier.tier_plot(rows)
    return Section(title="Host tier", id="tier", note=host_tier.NOTE, plots=plots, columns=told, rows=rows)


def _drafts(result: Result) -> Section:
    rows = drafts.draft_rows(result)
    told = _told(drafts.COLUMNS, rows, drafts.COLUMNS)
    return Section(
        title="Drafts", id="drafts", note=drafts.NOTE, plots=drafts.draft_plot(rows), columns=told, rows=rows
    )


def _cells(cells: pd.DataFrame) -> Section:
    columns = shown_columns(cells)
    if (cells["expected_verdict"] != "PASS").any():
        columns.insert(2, Column("expected", "expected_verdict"))
    note = CELLS + (FAST_PREFILL if has_fast_prefill(cells) else "")
    return Section(
        title="Cells", note=note, hint=SORT_HINT, columns=columns, rows=verdict_rows(gravest_first(cells))
    )


def _latency(result: Result) -> Section:
    plots = [*spread_plots(result), *latency_plots(result)]
    left = f" (the first {MAX_BOXES} cells; all are in the tables)" if len(result.cells) > MAX_BOXES else ""
    note = (
        "Curves: the share of requests (ITL: of gaps between tokens) that took at most so long, by TP sizes. "
        f"Boxes: per cell over its requests{left}, time to first token and mean time per later token; boxes "
        "are quartiles, marks are requests."
    )
    return Section(title="Latency", note=note, plots=plots)


def _spec(result: Result) -> Section:
    commit = result.environment.get("git_commit")
    note = "The run's spec.yaml, resolved." + (f" Commit {commit}." if commit else "")
    return Section(title="Spec", is_folded=True, note=note, text=result.spec_yaml)
