"""Tell how each cell's transfers went, run by run or staged, and what the cost model expects of the other
way."""

from __future__ import annotations

from typing import Any

import pandas as pd

from rayk.reports.moves import of_handovers
from rayk.reports.page import Column

COLUMNS = (
    Column("cell_id", "cell_id"),
    Column("staging", "transfer.staging"),
    Column("transfers", "num_transfers", ",d"),
    Column("staged", "num_staged", ",d"),
    Column("descriptors", "num_descriptors", ",d"),
    Column("after merging", "num_descriptors_merged", ",d"),
    Column("took ms", "took_ms", ",.2f"),
    Column("of it repacking ms", "repack_ms", ",.2f"),
    Column("expected ms", "chosen_ms", ",.2f"),
    Column("other way ms", "other_ms", ",.2f"),
)


def staging_choices(cells: pd.DataFrame, transfers: pd.DataFrame) -> pd.DataFrame:
    """Make a row per cell whose KV could have gone either way; times are sums over its transfers."""
    either = transfers[of_handovers(transfers)].dropna(subset=["direct_cost_us", "staged_cost_us"])
    if either.empty:
        return pd.DataFrame(columns=[column.key for column in COLUMNS])
    staged = either["staged"].fillna(False).astype(bool)
    direct_ms, staged_ms = either["direct_cost_us"] / 1e3, either["staged_cost_us"] / 1e3
    told = either.assign(
        num_transfers=1,
        num_staged=staged.astype(int),
        took_ms=either["transfer_ms"],
        chosen_ms=staged_ms.where(staged, direct_ms),
        other_ms=direct_ms.where(staged, staged_ms),
    )
    sums = [column.key for column in COLUMNS if column.spec]
    by_cell = told.groupby("cell_id", sort=False)[sums].sum().reset_index()
    setting = "transfer.staging"
    settings = cells.set_index("cell_id")[setting] if setting in cells else pd.Series(dtype=object)
    by_cell[setting] = by_cell["cell_id"].map(settings.to_dict())
    return by_cell[[column.key for column in COLUMNS]]


def staging_records(cells: pd.DataFrame, transfers: pd.DataFrame) -> list[dict[Any, Any]]:
    return staging_choices(cells, transfers).to_dict(orient="records")
