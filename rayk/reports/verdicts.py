"""What a run's verdicts amount to: the headline, the table, the exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rayk.reports.load_tables import is_load, load_headline
from rayk.reports.values import format_value

STYLES = {
    "PASS": "green",
    "NEAR_TIE": "yellow",
    "UNSUPPORTED": "dim",
    "KV_MISMATCH": "bold red",
    "NOT_FINITE": "bold red",
    "TRANSFER_ERROR": "bold red",
    "ENGINE_ERROR": "bold red",
    "TIMEOUT": "bold red",
    "TOKEN_MISMATCH": "bold red",
}
"""Verdict -> rich style."""


def headline(cells: pd.DataFrame, *, verdicts: bool = True, num_missing: int = 0) -> str:
    """E.g. `18 of 19 PASS, 1 UNSUPPORTED`; with faults also how many cells ended as expected.

    Without `verdicts` only PASS is counted. `num_missing`: cells that have not ended. Of a bench: `2 loads: 1
    VALID, 1 NOISY`.
    """
    if is_load(cells):
        return load_headline(cells)
    counts = cells["verdict"].value_counts().to_dict()
    parts = [f"{counts.pop('PASS', 0)} of {len(cells)} PASS"]
    if verdicts:
        parts += [f"{count} {verdict}" for verdict, count in counts.items()]
    if len(cells) and (cells["expected_verdict"] != "PASS").any():
        parts.append(f"{int(cells['met'].sum())} of {len(cells)} as expected")
    if num_missing:
        parts.append(f"unfinished: {num_missing} of {len(cells) + num_missing} cells are missing")
    return ", ".join(parts)


def exit_code(cells: pd.DataFrame, *, strict: bool = False) -> int:
    """0: every cell met; 1: some did not (or, if strict, some is UNSUPPORTED); 2: all UNSUPPORTED."""
    unsupported = cells["verdict"] == "UNSUPPORTED"
    if len(cells) and unsupported.all():
        return 2
    failed = ~cells["met"].astype(bool)
    return int(bool(failed.any()) or (strict and bool(unsupported.any())))


def tone(record: Mapping[Any, Any]) -> str:
    """How a cell is coloured: `unmet`, `met` (ended as its faults ask for), else as its verdict is."""
    if not record["met"]:
        return "unmet"
    expected = record["expected_verdict"]
    return "met" if expected not in (None, "PASS") and record["verdict"] == expected else record["verdict"]


def gravest_first(cells: pd.DataFrame) -> pd.DataFrame:
    """Those that are not met first, by their verdicts; otherwise in the order of the run."""
    order = [verdict for verdict in STYLES if verdict not in ("PASS", "NEAR_TIE", "UNSUPPORTED")]
    ended = zip(cells["verdict"].astype(str), cells["met"].astype(bool), strict=True)
    ranks = [
        (met, order.index(verdict) if verdict in order and not met else len(order)) for verdict, met in ended
    ]
    return cells.iloc[sorted(range(len(cells)), key=ranks.__getitem__)]


def told_wrong_bytes(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells, without a count of wrong KV bytes where it is 0 and yet KV was found wrong: digests count
    them, and another check found it."""
    untold = (cells["verdict"] == "KV_MISMATCH") & (cells["num_kv_bytes_mismatched"] == 0)
    return cells.assign(num_kv_bytes_mismatched=cells["num_kv_bytes_mismatched"].mask(untold))


TONE_STYLES = {**STYLES, "met": "green", "unmet": "bold red"}
"""tone() -> rich style."""


COLUMNS = (
    ("cell_id", "cell_id", ""),
    ("verdict", "verdict", ""),
    ("requests", "num_requests", "d"),
    ("wrong tokens", "num_token_mismatches", "d"),
    ("KV bytes", "num_kv_bytes_checked", ",d"),
    ("KV wrong", "num_kv_bytes_mismatched", ",d"),
    ("KV waste %", "kv_waste_percent", ".1f"),
    ("kernel block", "min_cut_kernel_block_size", "d"),
    ("token-layers", "num_token_layers", ",d"),
    ("fast layers", "num_fast_prefill_layers", "d"),
    ("cached tokens", "num_cached_tokens", ",d"),
    ("held MiB", "held_bytes", "MiB"),
    ("GB/s", "transfer_gb_per_s", ".3g"),
    ("TTFT ms", "ttft_ms_p50", ".1f"),
    ("TPOT ms", "tpot_ms_p50", ".1f"),
    ("wall s", "wall_s", ".1f"),
    ("reason", "reason", ""),
)
"""(title, column, format) of the verdict table; see `told_columns` and `format_value`."""


def tells_fast_prefill(cells: pd.DataFrame) -> bool:
    """Whether any cell's prefill had layers that compute sampled tokens only."""
    return bool(cells["num_fast_prefill_layers"].fillna(0).gt(0).any())


def told_columns(cells: pd.DataFrame) -> list[tuple[str, str, str]]:
    """COLUMNS, less those of fast prefill and of prefix caches where no cell used them, and of kernel blocks
    where all are whole."""
    untold: set[str] = set()
    if not tells_fast_prefill(cells):
        untold |= {"num_token_layers", "num_fast_prefill_layers"}
    if not cells["min_cut_kernel_block_size"].notna().any():
        untold.add("min_cut_kernel_block_size")
    for column in ("num_cached_tokens", "held_bytes"):
        if not cells[column].fillna(0).gt(0).any():
            untold.add(column)
    return [c for c in COLUMNS if c[1] not in untold]


def table_rows(cells: pd.DataFrame) -> list[list[str]]:
    """Texts of the verdict table, in the order of `told_columns`."""
    columns = told_columns(cells)
    return [
        [format_value(row[column], spec) for _, column, spec in columns]
        for row in told_wrong_bytes(cells).to_dict(orient="records")
    ]


DROPPED_FIRST = (
    "KV waste %",
    "kernel block",
    "TPOT ms",
    "requests",
    "wall s",
    "GB/s",
    "fast layers",
    "token-layers",
    "held MiB",
    "TTFT ms",
    "KV bytes",
    "cached tokens",
)
"""Columns a narrow terminal does without, in this order."""
MIN_REASON_WIDTH = 24


class _Capped:
    """A text of which a table's cell shows its first lines."""

    def __init__(self, text: Text, num_lines: int) -> None:
        self._text = text
        self._num_lines = num_lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self._text.wrap(console, options.max_width, overflow="fold")
        yield from lines[: self._num_lines - 1]
        for last in lines[self._num_lines - 1 : self._num_lines]:
            if len(lines) > self._num_lines:
                last.rstrip()
                last.truncate(options.max_width - 2)
                last.append(" …")
            yield last


def verdict_table(cells: pd.DataFrame, *, width: int | None = None, reason_lines: int | None = None) -> Table:
    """The verdict table for a terminal of `width` columns (None: as wide as it gets).

    The reason column is left out when nobody has one, and shows `reason_lines` lines (None: all).
    """
    rows, columns = table_rows(cells), told_columns(cells)
    shown = _shown_columns(rows, columns, width)
    table = Table(title=headline(cells), title_justify="left", title_style="bold")
    for i in shown:
        title, column, spec = columns[i]
        table.add_column(
            title,
            justify="right" if spec else "left",
            overflow="fold",
            no_wrap=bool(spec) or column == "verdict",
        )
    for row, record in zip(rows, cells.to_dict(orient="records"), strict=True):
        style = TONE_STYLES.get(tone(record), "")
        texts: list[Text | _Capped] = [
            Text(text, style=style if i == 1 else "") for i, text in enumerate(row)
        ]
        if reason_lines is not None:
            # Requests are named after their cell, which the row begins with.
            reason = row[-1].replace(f"{record['cell_id']}/", "request ")
            texts[-1] = _Capped(Text(reason), reason_lines)
        table.add_row(*(texts[i] for i in shown))
    return table


def _shown_columns(
    rows: list[list[str]], columns: list[tuple[str, str, str]], width: int | None
) -> list[int]:
    """Indexes of the columns that fit, each as wide as its texts (the reason column folds)."""
    widths: dict[str, int] = {}
    for i, (title, column, _) in enumerate(columns):
        longest = max((len(row[i]) for row in rows), default=0)
        if column == "reason":
            longest = min(longest, MIN_REASON_WIDTH)
        if longest or column != "reason":
            widths[title] = max(longest, len(title)) + 3  # padding and a border
    for title in DROPPED_FIRST:
        if width is None or sum(widths.values()) + 1 <= width:
            break
        widths.pop(title, None)
    return [i for i, (title, _, _) in enumerate(columns) if title in widths]
