"""What each cell's transfers chose, run by run or through the staging buffer, and what the cost model expects
of the other way."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rayk.reports.moves import of_handovers

COLUMNS = (
    ("cell_id", "cell_id", ""),
    ("staging", "transfer.staging", ""),
    ("transfers", "num_transfers", ",d"),
    ("staged", "num_staged", ",d"),
    ("descriptors", "num_descriptors", ",d"),
    ("after merging", "num_descriptors_merged", ",d"),
    ("took ms", "took_ms", ",.2f"),
    ("of it repacking ms", "repack_ms", ",.2f"),
    ("expected ms", "chosen_ms", ",.2f"),
    ("other way ms", "other_ms", ",.2f"),
)
"""(title, column, format)."""


def staging_choices(cells: pd.DataFrame, transfers: pd.DataFrame) -> pd.DataFrame:
    """A row per cell that moved KV which could have gone either way; columns as in COLUMNS. Times are sums
    over its transfers."""
    either = transfers[of_handovers(transfers)].dropna(subset=["direct_cost_us", "staged_cost_us"])
    if either.empty:
        return pd.DataFrame(columns=[column for _, column, _ in COLUMNS])
    staged = either["staged"].fillna(False).astype(bool)
    direct_ms, staged_ms = either["direct_cost_us"] / 1e3, either["staged_cost_us"] / 1e3
    told = either.assign(
        num_transfers=1,
        num_staged=staged.astype(int),
        took_ms=either["transfer_ms"],
        chosen_ms=staged_ms.where(staged, direct_ms),
        other_ms=direct_ms.where(staged, staged_ms),
    )
    sums = [column for _, column, spec in COLUMNS if spec]
    by_cell = told.groupby("cell_id", sort=False)[sums].sum().reset_index()
    setting = "transfer.staging"
    settings = cells.set_index("cell_id")[setting] if setting in cells else pd.Series(dtype=object)
    by_cell[setting] = by_cell["cell_id"].map(settings.to_dict())
    return by_cell[[column for _, column, _ in COLUMNS]]


def staging_records(cells: pd.DataFrame, transfers: pd.DataFrame) -> list[dict[Any, Any]]:
    """The rows of `staging_choices`."""
    return staging_choices(cells, transfers).to_dict(orient="records")
