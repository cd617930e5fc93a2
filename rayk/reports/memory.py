"""Show where KV memory goes: used, padding and wasted bytes of each KV group of each side, and what was
moved."""

from __future__ import annotations

from typing import Any

from rayk.reports.divided import COLUMN, divided_side
from rayk.reports.page import Column
from rayk.reports.result import Result
from rayk.reports.values import format_bytes

COLUMNS = (
    Column("of", "what"),
    Column("engines", "side"),
    Column("TP", "tp", "d"),
    COLUMN,
    Column("group", "group", "d"),
    Column("kind", "kind"),
    Column("layers", "num_layers", "d"),
    Column("block, tokens", "block_size", "d"),
    Column("used MiB", "used_bytes", "MiB"),
    Column("padding MiB", "padding_bytes", "MiB"),
    Column("wasted MiB", "wasted_bytes", "MiB"),
    Column("replicated MiB", "replicated_bytes", "MiB"),
    Column("used %", "used_percent", ".1f"),
    Column("cells", "num_cells", ",d"),
)
OWN = "own requests, mean"
REFERENCE = "reference request"  # what a row describes
NOTE = (
    "Of this run's own requests the mean, each when it held most; and of a reference request of 4096 tokens, "
    "or as many as the model takes, by which groupings are chosen. Before tensor parallelism. Used are rows "
    "of live tokens; padding are positions without a layer and pages smaller than the largest; wasted are "
    "the other rows of blocks: past a request's last token, or before a window. Replicated is what the ranks "
    "of an engine held of these layers' blocks beyond one copy, where several need the same KV head; it is "
    "in none of the others. Cells that are alike share rows."
)
OLDER = " An older rayk wrote this run: it does not tell what its own requests held."


def memory_note(result: Result) -> str:
    return NOTE if any(row["what"] == OWN for row in memory_rows(result)) else NOTE + OLDER


def memory_rows(result: Result) -> list[dict[str, Any]]:
    """Make a row per side and KV group, own requests first (see COLUMNS); bytes are per request."""
    cells = result.cells.to_dict(orient="records")
    return [*_own_rows(cells), *_reference_rows(cells)]


def _told(cell: dict[Any, Any], column: str) -> list[dict[str, Any]]:
    groups = cell.get(column)
    return [] if groups is None or isinstance(groups, float) else [dict(group) for group in groups]


def _own_rows(cells: list[dict[Any, Any]]) -> list[dict[str, Any]]:
    """Share a row among cells with the same groups, divided alike."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in cells:
        for side in ("prefill", "decode"):
            groups = _told(cell, f"{side}.kv_held")
            alike = tuple((g["kind"], g["num_layers"], g["block_size"]) for g in groups)
            for number, group in enumerate(groups):
                tp, beside = int(cell[f"{side}.tp"]), divided_side(cell, side)
                row = found.setdefault(
                    (side, tp, beside, alike, number),
                    {**dict.fromkeys(group, 0), "what": OWN, "side": side, "tp": tp, "divided": beside}
                    | {"group": number, "num_cells": 0},
                )
                row["num_cells"] += 1
                for name, value in group.items():
                    is_sum = name.endswith("_bytes") or name == "num_requests"
                    row[name] = row[name] + int(value) if is_sum else value
    return [_mean(found[key]) for key in sorted(found, key=lambda key: (key[0] != "prefill", *key[1:]))]


def _mean(row: dict[str, Any]) -> dict[str, Any]:
    means = {name: row[name] / row["num_requests"] for name in row if name.endswith("_bytes")}
    return _row({**row, **means})


def _reference_rows(cells: list[dict[Any, Any]]) -> list[dict[str, Any]]:
    seen: dict[tuple[Any, ...], int] = {}
    for cell in cells:
        for side in ("prefill", "decode"):
            groups = _told(cell, f"{side}.kv_groups")
            key = (side, tuple(tuple(group.items()) for group in groups))
            if groups:
                seen[key] = seen.get(key, 0) + 1
    return [
        _row({"what": REFERENCE, "side": side, "tp": None, "divided": "", "group": number})
        | {"replicated_bytes": None, "num_cells": count, **_row(dict(group))}
        for (side, groups), count in seen.items()
        for number, group in enumerate(groups)
    ]


def _row(group: dict[str, Any]) -> dict[str, Any]:
    kept_bytes = sum(group.get(f"{name}_bytes", 0) for name in ("used", "padding", "wasted"))
    return {**group, "used_percent": 100 * group.get("used_bytes", 0) / kept_bytes if kept_bytes else None}


def moved_text(result: Result) -> str:
    """Explain why more bytes were moved than compared; empty where it was not so."""
    cells, transfers = result.cells, result.transfers
    compared = int(cells["num_kv_bytes_checked"].fillna(0).sum())
    moved = int(transfers["bytes"].fillna(0).sum())
    failed = int(transfers.loc[transfers["verdict"] == "TRANSFER_ERROR", "bytes"].fillna(0).sum())
    beside = moved - failed - compared
    if not compared or beside <= 0:
        return ""
    lost = f", {format_bytes(failed)} by attempts that failed" if failed else ""
    return (
        f"Of {format_bytes(moved)} of KV moved, {format_bytes(compared)} were rows of tokens, which digests "
        f"compare; {format_bytes(beside)} were other rows of the same blocks (past the prompt's last token, "
        "or before a window), which move along, a whole block being one descriptor, and mean nothing to "
        f"either side{lost}. A KV head counts once for every decode rank that holds it, in all of these."
    )
