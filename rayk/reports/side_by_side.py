"""Set cells of vLLM's engines beside the same cells of rayk's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from rayk.reports.derived import moves_of
from rayk.reports.grids import axis_columns
from rayk.reports.page import Column
from rayk.reports.result import Result
from rayk.reports.values import is_null

KIND = "engine.kind"
KINDS = {"vllm": "vLLM", "rayk": "rayk"}  # in the order of the table
# what both have, by the columns of a cell: title and format
FACTS = {
    "verdict": ("verdict", ""),
    "posted": ("descriptors", ",d"),
    "transfer_bytes": ("bytes", ",d"),
    "moving_ms": ("transfer ms", ",.2f"),
    "e2e_ms_p50": ("E2E ms", ",.1f"),
}
COLUMNS = (
    Column("cell_id", "cell_id"),
    *(
        Column(f"{title}, {name}", f"{fact}/{kind}", spec, tone=f"verdict/{kind}" if not spec else "")
        for fact, (title, spec) in FACTS.items()
        for kind, name in KINDS.items()
    ),
    Column("reason", "reason", is_under_first=True),
)


def side_by_side(result: Result) -> list[dict[str, Any]]:
    """Make a row per cell of vLLM's that has one of rayk's beside it: all axes that both heed are alike."""
    cells = _measured(result)
    if KIND not in cells:
        return []
    axes = [axis for axis in axis_columns(result.cells) if not axis.endswith(".kind")]
    records = {kind: cells[cells[KIND] == kind].to_dict(orient="records") for kind in KINDS}
    rows = []
    for theirs in records["vllm"]:
        ours = next((r for r in records["rayk"] if all(_alike(theirs[a], r[a]) for a in axes)), None)
        if ours is not None:
            rows.append(_row(theirs, ours))
    return rows


def _alike(a: Any, b: Any) -> bool:
    return is_null(a) or is_null(b) or a == b


def _measured(result: Result) -> pd.DataFrame:
    """Add to cells the descriptors that were posted, and what moving one request's KV took (median)."""
    cells = result.cells
    of_requests = moves_of(result)
    moving = of_requests.groupby("cell_id")["moving_ms"].median()
    merged = pd.to_numeric(cells["num_descriptors_merged"])
    return cells.assign(
        moving_ms=cells["cell_id"].map(moving),
        posted=merged.where(merged.notna(), pd.to_numeric(cells["num_descriptors"])),
    )


def _row(theirs: Mapping[Any, Any], ours: Mapping[Any, Any]) -> dict[str, Any]:
    sides = {"vllm": theirs, "rayk": ours}
    reasons = [f"{KINDS[kind]}: {r['reason']}" for kind, r in sides.items() if r["reason"]]
    facts = {f"{fact}/{kind}": record[fact] for fact in FACTS for kind, record in sides.items()}
    return {"cell_id": ours["cell_id"], **facts, "reason": "; ".join(reasons)}
