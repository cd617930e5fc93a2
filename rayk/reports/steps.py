"""Read the steps that a run's engines recorded."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from rayk.reports.columns import FIELDS, make_table
from rayk.reports.files import STEPS
from rayk.reports.pending import added, read_pending
from rayk.reports.schema import check_schema
from rayk.types.errors import UserError


def read_steps(directory: str | Path) -> pd.DataFrame:
    """Read a run's steps.parquet, and the steps of cells that wait for their tables; empty where no engine
    recorded any. Raises UserError for a table that this rayk cannot read."""
    folder = Path(directory)
    path = folder / f"{STEPS}.parquet"
    pending = read_pending(folder)
    table = make_table([], FIELDS[STEPS])
    if path.is_file():
        try:
            check_schema(path)
            table = pq.read_table(path)
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise UserError(problem=f"cannot read the table: {error}", where=str(path)) from error
    known = set(table["cell_id"].to_pylist())
    rows = [row for cell in pending if cell.cell_id not in known for row in cell.steps]
    found: pd.DataFrame = added(STEPS, table, rows).to_pandas()
    return found
