"""Tell which version of the tables a folder holds, and whether this rayk can read it.

The version stands in each parquet file's metadata. Columns that are added do not raise it: a reader fills
them with nulls. It is raised when a column's name, unit or meaning changes, and then `load` must be told how
to read the versions before.

2: stages are measured at both ends. Before, `stage_prefill_ns` held the request's way to the engine and its
   queue there, `stage_handover_ns` was what no other stage held, notice included, and `stage_decode_ns` held
   the wait for a decode step; `cells.transfer_gb_per_s` was the rate of one pair of ranks.
1: the first to be named.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayk.types.errors import UserError

SCHEMA_VERSION = 2  # what this rayk writes; 0: tables that name no version
MEASURED_STAGES = 2  # since when stages are measured at both ends
KEY = b"rayk.schema_version"  # key in parquet metadata
KEY_COLUMN = "cell_id"  # every table has it


def stamped(table: pa.Table) -> pa.Table:
    """Put the version into the table's metadata."""
    kept = table.schema.metadata or {}
    return table.replace_schema_metadata({**kept, KEY: str(SCHEMA_VERSION).encode()})


def check_schema(path: Path) -> int:
    """Read a table's version. Raises UserError where this rayk cannot read it; OSError or ValueError for no
    parquet file."""
    schema = pq.read_schema(path)
    version = _version(schema, path)
    if version > SCHEMA_VERSION:
        raise UserError(
            problem=f"written by a newer rayk: its tables have version {version}, this one reads up to "
            f"{SCHEMA_VERSION}",
            where=str(path),
            mend="the rayk that wrote it (environment.json has its version and commit), or a newer one",
        )
    if KEY_COLUMN not in schema.names:
        raise UserError(
            problem=f"cannot be read: no column {KEY_COLUMN} in its table of version {version}",
            where=str(path),
            mend="a folder that `rayk run` or `rayk bench` wrote; `rayk report --columns` says what is there",
        )
    return version


def _version(schema: pa.Schema, path: Path) -> int:
    text = (schema.metadata or {}).get(KEY, b"0")
    if not text.isdigit():
        raise UserError(problem=f"its version is no number: {text.decode(errors='replace')}", where=str(path))
    return int(text)
