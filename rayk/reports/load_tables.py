"""Tables of load tests: a cell per load, a row per request; columns as a run's where they mean the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rayk.reports.columns import CELL_FIELDS, REQUEST_FIELDS, TRANSFER_FIELDS, make_table
from rayk.reports.files import atomic_path, make_folder, write_text
from rayk.reports.folder import check_directory

VERDICTS = ("VALID", "NOISY", "INVALID")
"""Of a load's numbers: to be trusted, imprecise, not what they say."""
METRICS = ("ttft", "tpot", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")

_INT, _FLOAT, _TEXT, _BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()

LOAD_CELL_FIELDS: dict[str, Any] = {
    **{name: CELL_FIELDS[name] for name in ("cell_id", "verdict", "reason", "met", "num_requests", "wall_s")},
    **dict.fromkeys(("url", "model", "arrival", "slo"), _TEXT),
    **dict.fromkeys(("rate", "burstiness"), _FLOAT),
    **dict.fromkeys(("concurrency", "seed"), _INT),
    **dict.fromkeys((f"num_{what}" for what in ("measured", "warmup", "cooldown")), _INT),
    **dict.fromkeys((f"num_{what}" for what in ("failed", "refused", "timeouts")), _INT),
    # Sums over the answers that tell of both; `num_cached_tokens` / `num_prompt_tokens` were found in caches.
    **dict.fromkeys(("num_prompt_tokens", "num_cached_tokens"), _INT),
    "tokens_per_chunk": _FLOAT,
    # Of the measured window.
    "window_s": _FLOAT,
    **dict.fromkeys(("offered_per_s", "answered_per_s", "output_tokens_per_s", "goodput_per_s"), _FLOAT),
    **dict.fromkeys(("good_share", "failed_share", "mean_in_flight"), _FLOAT),
    # With the ends of their 95% intervals.
    **{
        f"{metric}_ms_{statistic}{end}": _FLOAT
        for metric in METRICS
        for statistic in STATISTICS
        for end in ("", "_low", "_high")
    },
    **{f"num_{metric}_values": _INT for metric in METRICS},
    "generator_cpu_share": _FLOAT,
    **{f"{name}_lag_ms_p{percent}": _FLOAT for name in ("send", "loop") for percent in (50, 90, 99)},
}
"""Columns of a bench's cells.parquet."""

LOAD_REQUEST_FIELDS: dict[str, Any] = {
    **{
        name: REQUEST_FIELDS[name]
        for name in (
            *(
                "cell_id",
                "repeat",
                "request_id",
                "prompt_index",
                "prompt_token_ids",
                "output_token_ids",
                "error",
            ),
            *("num_prompt_tokens", "num_cached_tokens", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"),
            *("finish_reason", "seed"),
        )
    },
    "outcome": _TEXT,
    "http_status": _INT,
    "phase": _TEXT,
    "num_output_tokens": _INT,
    "max_tokens": _INT,
    "num_chunks": _INT,
    # Since the load began; e2e_ms counts from due_ms, and so does send_lag_ms.
    "due_ms": _FLOAT,
    "send_lag_ms": _FLOAT,
    "ended_ms": _FLOAT,
    "is_good": _BOOL,
}
"""Columns of a bench's requests.parquet."""


def is_load(cells: pd.DataFrame) -> bool:
    """Whether cells are loads that were sent to a server."""
    return len(cells) > 0 and bool(cells["verdict"].isin(VERDICTS).all())


def load_headline(cells: pd.DataFrame) -> str:
    """E.g. `2 loads: 1 VALID, 1 NOISY`."""
    counts = cells["verdict"].value_counts().to_dict()
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if verdict in counts)
    return f"{len(cells)} load{'s'[: len(cells) != 1]}: {told}"


class LoadWriter:
    """Writes a bench's folder: after each load its tables, whole, and the report."""

    def __init__(
        self, directory: Path, *, spec: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]
    ) -> None:
        text = yaml.safe_dump({"name": "bench", "loads": [dict(load) for load in spec]}, sort_keys=False)
        check_directory(directory, text, resume=False)
        make_folder(directory)
        self.directory = directory
        self._cells: list[Mapping[str, Any]] = []
        self._requests: list[Mapping[str, Any]] = []
        write_text(directory / "spec.yaml", text)
        write_text(directory / "environment.json", json.dumps(environment, indent=2, default=str) + "\n")

    def write(self, cell: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> None:
        """Add a load, and put tables and report on disk; cells last, as a run does."""
        from rayk.reports.html import write_html

        self._cells.append(cell)
        self._requests += requests
        self._table("transfers", [], TRANSFER_FIELDS)
        self._table("requests", self._requests, LOAD_REQUEST_FIELDS)
        self._table("cells", self._cells, LOAD_CELL_FIELDS)
        write_html(self.directory)

    def _table(self, name: str, rows: Sequence[Mapping[str, Any]], fields: dict[str, Any]) -> None:
        with atomic_path(self.directory / f"{name}.parquet") as path:
            pq.write_table(make_table([dict(row) for row in rows], fields), path)
