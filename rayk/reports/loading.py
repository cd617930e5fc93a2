"""Show what loading the weights took of each side's ranks."""

from __future__ import annotations

from typing import Any

from rayk.reports.divided import COLUMN, divided_side
from rayk.reports.fields import LOADED
from rayk.reports.page import Column
from rayk.reports.result import Result

COLUMNS = (
    Column("engines", "side"),
    Column("TP", "tp", "d"),
    COLUMN,
    Column("weights MiB", "weight_bytes", "MiB"),
    Column("largest read MiB", "max_read_bytes", "MiB"),
    Column("peak MiB", "load_peak_bytes", "MiB"),
    Column("peak on GPU MiB", "load_device_peak_bytes", "MiB"),
    Column("cells", "num_cells", ",d"),
)
NOTE = (
    "Of the rank that took most, of each side's first engine. Weights are what the rank holds once they are "
    "loaded; a read is one tensor's piece, as it is stored and dequantised. The peak is by how much the "
    "process's own memory rose while it loaded, without pages of files, which the system takes back: the "
    "weights, one tensor as its layer holds it (gate_proj and up_proj are one), what malloc keeps of pieces "
    "that were freed, and what the first use of a library takes, beside which tiny models are small. With "
    "weights on a GPU the process holds a tensor at a time. Cells that are alike share a row, the highest "
    "peak in it."
)


def loading_rows(result: Result) -> list[dict[str, Any]]:
    """Make a row per side, sizes and weights (see COLUMNS), in the order of the cells."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in result.cells.to_dict(orient="records"):
        for side in ("prefill", "decode"):
            most = {name: _most(cell.get(f"{side}.{name}")) for name in LOADED}
            if most["weight_bytes"] is None:
                continue
            sizes = {"tp": int(cell[f"{side}.tp"]), "divided": divided_side(cell, side)}
            key = (side, *sizes.values(), most["weight_bytes"], most["max_read_bytes"])
            row = found.setdefault(key, {"side": side, **sizes, "num_cells": 0})
            row |= {
                name: max((v for v in (row.get(name), most[name]) if v is not None), default=None)
                for name in LOADED
            }
            row["num_cells"] += 1
    return list(found.values())


def _most(by_rank: Any) -> int | None:
    """`by_rank`: a list, or what stands in a table for none."""
    known = [] if by_rank is None or isinstance(by_rank, float) else [v for v in by_rank if v is not None]
    return max((int(v) for v in known), default=None)
