"""Describe every column as lines, Markdown, CSV or JSON (`rayk report --columns`)."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable, Sequence

from rayk.reports.fields import (
    CELLS,
    DIVERGENCE,
    GROUPS,
    PER_KV_GROUP,
    REQUESTS,
    STEPS,
    TOPS,
    TRANSFERS,
    WINDOWED,
    Field,
)
from rayk.reports.load_fields import LOAD_CELLS, LOAD_REQUESTS
from rayk.reports.md_table import markdown_table
from rayk.reports.plans import PLANS

TABLES: dict[str, tuple[str, Sequence[Field]]] = {
    "cells": ("cells.parquet of a run: a row per cell; beside these, every axis under its own name", CELLS),
    "requests": ("requests.parquet of a run: a row per cell, repeat and request", REQUESTS),
    "transfers": ("transfers.parquet: a row per request, pair of ranks and KV group", TRANSFERS),
    "steps": ("steps.parquet of a run with `record_steps`: a row per engine and step", STEPS),
    "plans": ("plans.parquet of `rayk plan`: a row per plan that was simulated", PLANS),
    "load cells": ("cells.parquet of `rayk bench`: a row per load", LOAD_CELLS),
    "load requests": ("requests.parquet of `rayk bench`: a row per request", LOAD_REQUESTS),
}
"""Table -> what it is, and its columns in the order in which they stand there."""
TITLES = ("column", "type", "unit", "meaning")
# pyarrow's name -> ours
_TYPES = {
    "string": "text",
    "int64": "int",
    "double": "float",
    "list<item: int64>": "list of int",
    "list<item: double>": "list of float",
    "list<item: string>": "list of text",
    str(DIVERGENCE): "{request, token_index}",
    str(GROUPS): "list of {kind, ...}",
    str(PER_KV_GROUP): "list of {kind, ...}",
    str(WINDOWED): "lists of [pairs, seen]",
    str(TOPS): "lists of {token_id, logprob}",
}


def rows(fields: Sequence[Field]) -> list[list[str]]:
    return [[f.name, _TYPES.get(str(f.kind), str(f.kind)), f.unit, f.meaning] for f in fields]


def columns_text(width: int | None = None) -> str:
    """Write a line per column; `width` folds long meanings, None cuts nothing."""
    lines = []
    for title, fields in TABLES.values():
        texts = rows(fields)
        sizes = [max(len(row[i]) for row in texts) for i in range(3)]
        indent = sum(sizes) + 2 * len(sizes)
        lines += [title, ""]
        for row in texts:
            head = "".join(f"{text:<{size}}  " for text, size in zip(row, sizes, strict=False))
            folded = [row[3]] if width is None else textwrap.wrap(row[3], max(24, width - indent))
            lines += [head + folded[0], *(" " * indent + more for more in folded[1:])]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def columns_markdown() -> str:
    lines = ["# Columns", ""]
    for title, fields in TABLES.values():
        texts = [[f"`{name}`", *rest] for name, *rest in rows(fields)]
        lines += [f"## {title}", "", *markdown_table(TITLES, texts), ""]
    return "\n".join(lines)


def columns_csv() -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", *TITLES])
    writer.writerows([table, *row] for table, (_, fields) in TABLES.items() for row in rows(fields))
    return out.getvalue()


def columns_json() -> str:
    told = {
        table: [dict(zip(TITLES, [n, k, u or None, m], strict=True)) for n, k, u, m in rows(fields)]
        for table, (_, fields) in TABLES.items()
    }
    return json.dumps(told, indent=2) + "\n"


FORMATS: dict[str, Callable[[], str]] = {"md": columns_markdown, "csv": columns_csv, "json": columns_json}
