"""Rows to tables to reports: nothing else turns measurements into numbers people read.

`ResultWriter` puts a run's parquet tables on disk cell by cell (columns and schemas in `columns.py`),
`load` reads them back as a `Result` of three DataFrames, `verdicts.py` says what a run amounts to, and
`html.py`, `text.py` and `compare.py` write it out. pandas and pyarrow live here only.
"""

from rayk.reports.environment import collect_environment
from rayk.reports.result import Result, load
from rayk.reports.verdicts import exit_code, headline, verdict_table
from rayk.reports.writer import ResultWriter

__all__ = ["Result", "ResultWriter", "collect_environment", "exit_code", "headline", "load", "verdict_table"]
