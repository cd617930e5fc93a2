"""Find what two runs' tables disagree about, times and nodes aside."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from rayk.reports.columns import incidental_columns
from rayk.reports.files import TABLES
from rayk.reports.moves import of_handovers
from rayk.reports.result import Result
from rayk.reports.values import is_null

# what names a row
KEYS: dict[str, list[str]] = {
    "cells": ["cell_id"],
    "requests": ["cell_id", "repeat", "prompt_index"],
    "transfers": ["cell_id", "repeat", "request_id", "group", "consumer_rank", "producer_rank"],
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A column in which rows of two runs differ; column "" stands for rows that only one run has."""

    table: str
    column: str
    num_rows: int
    first: str  # the key of the first such row, and the values

    def __str__(self) -> str:
        what = f"{self.table}.{self.column}" if self.column else f"rows of {self.table} in one run only"
        return f"{what}: {self.num_rows} row{'s' if self.num_rows > 1 else ''}, first {self.first}"


def differences_of(base: Result, other: Result) -> list[Difference]:
    """Compare the cells that both runs have, times and nodes aside; differing output tokens come first."""
    shared = set(base.cells["cell_id"]) & set(other.cells["cell_id"])
    found = []
    for name in TABLES:
        left, right = (_keyed(getattr(r, name), name, shared) for r in (base, other))
        lonely = left.index.symmetric_difference(right.index)
        if len(lonely):
            found.append(Difference(name, "", len(lonely), _key_text(lonely[0])))
        rows = left.index.intersection(right.index)
        left, right = left.loc[rows], right.loc[rows]
        columns = list(dict.fromkeys([*left.columns, *right.columns]))
        incidental = set(incidental_columns(name, columns))
        for column in columns:
            if column not in incidental:
                values = [_texts(side, column) for side in (left, right)]
                found += _column_difference(name, column, rows, *values)
    return sorted(found, key=lambda difference: difference.column != "output_token_ids")


def _keyed(table: pd.DataFrame, name: str, cells: set[str]) -> pd.DataFrame:
    """Index rows by their keys, numbering rows of one key in their order."""
    rows = table[table["cell_id"].isin(cells)]
    if name == "transfers":
        rows = rows[of_handovers(rows)]
    keys = KEYS[name]
    numbered = rows.assign(nth=rows.groupby(keys, dropna=False).cumcount())
    return numbered.set_index([*keys, "nth"]).sort_index()


def _texts(table: pd.DataFrame, column: str) -> list[str]:
    if column not in table:
        return [_text(None)] * len(table)
    return [_text(value) for value in table[column]]


def _text(value: Any) -> str:
    """Write a value the same way whatever type its table has: a missing number may be None or NaN."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if is_null(value):
        return "none"
    if isinstance(value, float | np.number) and float(value).is_integer():
        value = int(value)
    return json.dumps(value, default=str) if not isinstance(value, str) else value


def _column_difference(
    table: str, column: str, rows: pd.Index, left: list[str], right: list[str]
) -> list[Difference]:
    unlike = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
    if not unlike:
        return []
    i = unlike[0]
    where = f"{_key_text(rows[i])}: {_short(left[i])} and {_short(right[i])}"
    return [Difference(table, column, len(unlike), where)]


def _short(text: str) -> str:
    return (text if len(text) <= 60 else text[:57] + "...") or "nothing"


def _key_text(key: Any) -> str:
    *parts, nth = key
    return "/".join(map(str, [*parts, nth] if nth else parts))
