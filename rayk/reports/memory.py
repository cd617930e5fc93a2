"""Where KV memory goes: used, padding and wasted bytes of each KV group of each side."""

from __future__ import annotations

from typing import Any

from rayk.reports.result import Result

COLUMNS = (
    ("engines", "side", ""),
    ("group", "group", "d"),
    ("kind", "kind", ""),
    ("layers", "num_layers", "d"),
    ("block, tokens", "block_size", "d"),
    ("used MiB", "used_bytes", "MiB"),
    ("padding MiB", "padding_bytes", "MiB"),
    ("wasted MiB", "wasted_bytes", "MiB"),
    ("used %", "used_percent", ".1f"),
    ("cells", "num_cells", ",d"),
)
"""(title, column, format)."""
NOTE = (
    "Of a request of 4096 tokens, or as many as the model takes, before tensor parallelism. Used are rows of "
    "live tokens; padding are positions without a layer and pages smaller than the largest; wasted are the "
    "other rows of blocks. Cells whose groups are alike share rows."
)


def memory_rows(result: Result) -> list[dict[str, Any]]:
    """A row per side and KV group; see COLUMNS. Empty for runs that did not tell."""
    seen: dict[tuple[Any, ...], int] = {}
    for cell in result.cells.to_dict(orient="records"):
        for side in ("prefill", "decode"):
            groups = cell[f"{side}.kv_groups"]
            if groups is not None and not isinstance(groups, float):
                key = (side, tuple(tuple(group.items()) for group in groups))
                seen[key] = seen.get(key, 0) + 1
    return [
        {"side": side, "group": number, "num_cells": count, **_row(dict(group))}
        for (side, groups), count in seen.items()
        for number, group in enumerate(groups)
    ]


def _row(group: dict[str, Any]) -> dict[str, Any]:
    held = group["used_bytes"] + group["padding_bytes"] + group["wasted_bytes"]
    return {**group, "used_percent": 100 * group["used_bytes"] / held if held else None}
