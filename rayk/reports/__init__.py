"""Rows to tables to reports: nothing else turns measurements into numbers people read.

`ResultWriter` puts a run's parquet tables on disk cell by cell (columns and schemas in `columns.py`),
`load` reads them back as a `Result` of three DataFrames, `verdicts.py` says what a run amounts to, and
`html.py`, `text.py` and `compare.py` write it out. pandas and pyarrow live here only; the names
below are imported on first use, so that what needs neither works where they are not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayk.reports.environment import collect_environment
    from rayk.reports.result import Result, load
    from rayk.reports.verdicts import exit_code, headline, verdict_table
    from rayk.reports.writer import ResultWriter

_HOMES = {
    "Result": "result",
    "ResultWriter": "writer",
    "collect_environment": "environment",
    "exit_code": "verdicts",
    "headline": "verdicts",
    "load": "result",
    "verdict_table": "verdicts",
}

__all__ = ["Result", "ResultWriter", "collect_environment", "exit_code", "headline", "load", "verdict_table"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
