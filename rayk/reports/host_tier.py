"""Show what a run's host tier did: where prompts' KV came from, what was stored, loaded and swapped, what
failed."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rayk.reports.moves import KEYS
from rayk.reports.page import Column, Plot
from rayk.reports.plots import LEGEND, plain
from rayk.reports.result import Result

COLUMNS = (
    Column("cell_id", "cell_id"),
    Column("prompt tokens", "num_prompt_tokens", ",d"),
    Column("from device %", "device", ".1f"),
    Column("from host %", "host", ".1f"),
    Column("from disk %", "disk", ".1f"),
    Column("stored MiB", "host_stored_bytes", "MiB"),
    Column("handed on MiB", "host_relayed_bytes", "MiB"),
    Column("loaded MiB", "host_loaded_bytes", "MiB"),
    Column("load GB/s", "load_gb_per_s", ".3g"),
    Column("1 MiB out, believed ms", "offload_out_1mib_ms", ",.2f"),
    Column("1 MiB in, believed ms", "offload_in_1mib_ms", ",.2f"),
    Column("512 tokens, believed ms", "offload_compute_512_ms", ",.1f"),
    Column("not loaded", "num_loads_declined", ",d"),
    Column("swapped out", "num_swaps", ",d"),
    Column("computed again", "num_swaps_declined", ",d"),
    Column("swapped MiB", "swapped_out_bytes", "MiB"),
    Column("note", "offload_note"),
)
NOTE = (
    "Of the prompts' tokens, those whose KV the engine's own prefix cache had, those that came from host "
    "memory or from disk, and those that were computed. Of a prompt that needed disk, all up to the last "
    "block from there counts as disk. A load's GB/s are bytes over the time from the first post to the last "
    "byte, all ranks together (10⁹ bytes per second). Believed is what the engines' cost models expect, "
    "all waits included, by the end of the cell: of moving 1 MiB, and of computing the first 512 tokens of a "
    "prompt. By that they choose between the two: not loaded are prompts of which the tier had something, "
    "and computing was cheaper. Handed on is KV on its way to a decode engine, which reads it from the tier: "
    "what a hand-over moves and takes is told of that second half, the first is the stage `relay`. Swapped "
    "out are preempted requests whose KV was moved; computed again are those for which computing was cheaper."
)
# (source, name, colour) in the order of the bars
SOURCES = (
    ("device", "on the device", "series1"),
    ("host", "host memory", "series2"),
    ("disk", "disk", "series3"),
    ("computed", "computed", "soft"),
)


def tier_rows(result: Result) -> list[dict[str, Any]]:
    """Make a row per cell that had a host tier, or was to have one: COLUMNS and `computed`, shares in
    percent."""
    cells = result.cells
    has_tier = cells["host_stored_bytes"].notna() | cells["offload_note"].notna()
    if not has_tier.any():
        return []
    tokens, rates = _tokens(result.requests), _load_rates(result.transfers)
    return [
        {
            **{str(name): value for name, value in cell.items()},
            **_shares(tokens.loc[cell["cell_id"]] if cell["cell_id"] in tokens.index else None),
            "load_gb_per_s": rates.get(cell["cell_id"]),
            "offload_note": cell["offload_note"] or "",
        }
        for cell in cells[has_tier].to_dict(orient="records")
    ]


def _tokens(requests: pd.DataFrame) -> pd.DataFrame:
    """Sum prompt tokens by cell and by where their KV came from."""
    names = ["num_prompt_tokens", "num_cached_tokens", "num_host_tokens", "num_disk_tokens"]
    found = requests[["cell_id", *names]].fillna(0)
    host, cached = found["num_host_tokens"], found["num_cached_tokens"]
    device = (cached - host).clip(lower=0)
    # What lay on the device before the last block from disk did not come from there.
    disk = (found["num_disk_tokens"] - device).clip(lower=0).where(host > 0, 0).clip(upper=host)
    told = found.assign(
        device=device, host=host - disk, disk=disk, computed=found["num_prompt_tokens"] - device - host
    )
    columns = ["num_prompt_tokens", *(source for source, _, _ in SOURCES)]
    return told.groupby("cell_id", sort=False)[columns].sum()


def _shares(tokens: pd.Series[Any] | None) -> dict[str, Any]:
    if tokens is None or not tokens["num_prompt_tokens"]:
        return {"num_prompt_tokens": None, **{source: None for source, _, _ in SOURCES}}
    total = float(tokens["num_prompt_tokens"])
    return {
        "num_prompt_tokens": int(total),
        **{source: 100 * float(tokens[source]) / total for source, _, _ in SOURCES},
    }


def _load_rates(transfers: pd.DataFrame) -> dict[str, float]:
    """Give each cell's load rate in 10^9 bytes per second."""
    loads = transfers[(transfers["purpose"] == "load") & transfers["begin_ms"].notna()]
    if loads.empty:
        return {}
    spans = loads.groupby([*KEYS, "retries"]).agg(
        bytes=("bytes", "sum"), begin=("begin_ms", "min"), end=("end_ms", "max")
    )
    sums = spans.assign(ms=spans["end"] - spans["begin"]).groupby("cell_id")[["bytes", "ms"]].sum()
    sums = sums[sums["ms"] > 0]
    return {str(cell): float(rate) for cell, rate in (sums["bytes"] / sums["ms"] / 1e6).items()}


def tier_plot(rows: list[dict[str, Any]]) -> list[Plot]:
    """Draw `host-tier`: a bar per cell of where its prompts' KV came from."""
    rows = [row for row in rows if row["num_prompt_tokens"]]
    if not rows:
        return []
    cells = [row["cell_id"] for row in rows]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [row[source] for row in rows],
            "y": cells,
            "marker": {"color": colour},
            "text": [plain(cell) for cell in cells],
            "textposition": "none",
            "hovertemplate": f"%{{text}}: %{{x:.1f}}% {name}<extra></extra>",
        }
        for source, name, colour in SOURCES
    ]
    layout = {
        "height": 110 + 30 * len(rows),
        "barmode": "stack",
        "showlegend": True,
        "legend": {**LEGEND, "traceorder": "normal"},
        "xaxis": {"range": [0, 100], "title": {"text": "% of prompt tokens"}},
        "yaxis": {"autorange": "reversed", "type": "category", "ticks": ""},
    }
    return [Plot(id="host-tier", data=data, layout=layout, is_wide=True)]
