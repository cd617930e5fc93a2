"""Sum up a run's verdicts: the headline, the table, the exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.table import Table

from rayk.reports.load_fields import is_load, load_headline
from rayk.reports.page import Column
from rayk.reports.terminal import STYLES, terminal_table


def headline(cells: pd.DataFrame, *, verdicts: bool = True, num_missing: int = 0) -> str:
    """Write e.g. `18 of 19 PASS, 1 UNSUPPORTED`, and with faults how many cells ended as expected. Without
    `verdicts` only PASS is counted; `num_missing` cells have not ended. A bench gives `2 loads: 1 VALID, 1
    NOISY`."""
    if is_load(cells):
        return load_headline(cells)
    counts = cells["verdict"].value_counts().to_dict()
    if len(cells) and set(counts) <= {"PREDICTED", "UNSUPPORTED"}:
        named = [f"{counts.pop('PREDICTED', 0)} of {len(cells)} cells PREDICTED"]
        return ", ".join([*named, *(f"{count} {verdict}" for verdict, count in counts.items())])
    parts = [f"{counts.pop('PASS', 0)} of {len(cells)} PASS"]
    if verdicts:
        parts += [f"{count} {verdict}" for verdict, count in counts.items()]
    if len(cells) and (cells["expected_verdict"] != "PASS").any():
        parts.append(f"{int(cells['met'].sum())} of {len(cells)} as expected")
    if num_missing:
        parts.append(f"unfinished: {num_missing} of {len(cells) + num_missing} cells are missing")
    return ", ".join(parts)


def exit_code(cells: pd.DataFrame, *, strict: bool = False) -> int:
    """Return 0 if every cell met; 1 if some did not (or, if strict, is UNSUPPORTED); 2 if all are
    UNSUPPORTED."""
    unsupported = cells["verdict"] == "UNSUPPORTED"
    if len(cells) and unsupported.all():
        return 2
    failed = ~cells["met"].astype(bool)
    return int(bool(failed.any()) or (strict and bool(unsupported.any())))


def tone(record: Mapping[Any, Any]) -> str:
    """Name a cell's colour: `unmet`, `met` (its faults had the asked effect), else its verdict."""
    if not record["met"]:
        return "unmet"
    expected = record["expected_verdict"]
    return "met" if expected not in (None, "PASS") and record["verdict"] == expected else record["verdict"]


def gravest_first(cells: pd.DataFrame) -> pd.DataFrame:
    """Put cells that are not met first, by verdict; the others keep their order."""
    order = [verdict for verdict in STYLES if verdict not in ("PASS", "NEAR_TIE", "UNSUPPORTED", "PREDICTED")]
    ended = zip(cells["verdict"].astype(str), cells["met"].astype(bool), strict=True)
    ranks = [
        (met, order.index(verdict) if verdict in order and not met else len(order)) for verdict, met in ended
    ]
    return cells.iloc[sorted(range(len(cells)), key=ranks.__getitem__)]


def known_wrong_bytes(cells: pd.DataFrame) -> pd.DataFrame:
    """Drop the count of wrong KV bytes where it is 0 and yet KV was found wrong, by another check than
    digests."""
    untold = (cells["verdict"] == "KV_MISMATCH") & (cells["num_kv_bytes_mismatched"] == 0)
    return cells.assign(num_kv_bytes_mismatched=cells["num_kv_bytes_mismatched"].mask(untold))


# see `shown_columns`
COLUMNS = (
    Column("cell_id", "cell_id"),
    Column("verdict", "verdict", tone="tone"),
    Column("refused by", "refused_by"),
    Column("requests", "num_requests", "d"),
    Column("wrong tokens", "num_token_mismatches", "d"),
    Column("KV bytes", "num_kv_bytes_checked", ",d"),
    Column("KV wrong", "num_kv_bytes_mismatched", ",d"),
    Column("KV waste %", "kv_waste_percent", ".1f"),
    Column("kernel block", "min_cut_kernel_block_size", "d"),
    Column("token-layers", "num_token_layers", ",d"),
    Column("fast layers", "num_fast_prefill_layers", "d"),
    Column("cached tokens", "num_cached_tokens", ",d"),
    Column("held MiB", "held_bytes", "MiB"),
    Column("accepted", "acceptance_rate", ".0%"),
    Column("tokens/step", "tokens_per_step", ".2f"),
    Column("GB/s", "transfer_gb_per_s", ".3g"),
    Column("TTFT ms", "ttft_ms_p50", ".1f"),
    Column("TPOT ms", "tpot_ms_p50", ".1f"),
    Column("wall s", "wall_s", ".1f"),
    Column("reason", "reason", is_under_first=True),
)


def has_fast_prefill(cells: pd.DataFrame) -> bool:
    return bool(cells["num_fast_prefill_layers"].fillna(0).gt(0).any())


def shown_columns(cells: pd.DataFrame) -> list[Column]:
    """Drop the columns of fast prefill, prefix caches, cut kernel blocks, drafts and refusals where no cell
    has any."""
    untold: set[str] = set()
    if not has_fast_prefill(cells):
        untold |= {"num_token_layers", "num_fast_prefill_layers"}
    if not cells["min_cut_kernel_block_size"].notna().any():
        untold.add("min_cut_kernel_block_size")
    untold |= {
        name for name in ("refused_by", "acceptance_rate", "tokens_per_step") if not cells[name].notna().any()
    }
    for column in ("num_cached_tokens", "held_bytes"):
        if not cells[column].fillna(0).gt(0).any():
            untold.add(column)
    return [c for c in COLUMNS if c.key not in untold]


# what a narrow terminal does without, in this order
DROPPED_FIRST = (
    "refused by",
    "KV waste %",
    "kernel block",
    "TPOT ms",
    "requests",
    "wall s",
    "GB/s",
    "fast layers",
    "token-layers",
    "held MiB",
    "tokens/step",
    "accepted",
    "TTFT ms",
    "KV bytes",
    "cached tokens",
)


def verdict_rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    records = known_wrong_bytes(cells).to_dict(orient="records")
    return [{**{str(k): v for k, v in record.items()}, "tone": tone(record)} for record in records]


def verdict_table(cells: pd.DataFrame, *, width: int | None = None, reason_lines: int | None = None) -> Table:
    """Make the verdict table for a terminal of `width` columns (None: any), with reasons of up to
    `reason_lines` lines (None: all)."""
    columns, rows = shown_columns(cells), verdict_rows(cells)
    if reason_lines is not None:
        # Requests are named after their cell, which the row begins with.
        rows = [
            {**row, "reason": str(row["reason"] or "").replace(f"{row['cell_id']}/", "request ")}
            for row in rows
        ]
    return terminal_table(
        headline(cells), columns, rows, width=width, dropped_first=DROPPED_FIRST, max_lines=reason_lines
    )
