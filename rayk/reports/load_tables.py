"""Name what a bench's tables hold: a cell per load, a row per request."""

from __future__ import annotations

import pandas as pd

from rayk.reports.fields import kinds
from rayk.reports.load_fields import LOAD_CELLS, LOAD_REQUESTS
from rayk.reports.load_fields import METRICS as METRIC_MEANINGS
from rayk.reports.load_fields import STATISTICS as STATISTIC_WORDS

VERDICTS = ("VALID", "NOISY", "INVALID")  # of a load's numbers: to be trusted, imprecise, not what they say
METRICS = tuple(METRIC_MEANINGS)
STATISTICS = tuple(STATISTIC_WORDS)

LOAD_CELL_FIELDS = kinds(LOAD_CELLS)
LOAD_REQUEST_FIELDS = kinds(LOAD_REQUESTS)
LOAD_FIELDS = {"cells": LOAD_CELL_FIELDS, "requests": LOAD_REQUEST_FIELDS}


def is_load(cells: pd.DataFrame) -> bool:
    return len(cells) > 0 and bool(cells["verdict"].isin(VERDICTS).all())


def load_headline(cells: pd.DataFrame) -> str:
    """Count verdicts, e.g. `2 loads: 1 VALID, 1 NOISY`."""
    counts = cells["verdict"].value_counts().to_dict()
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
    return f"{len(cells)} load{'s'[: len(cells) != 1]}: {told}"
