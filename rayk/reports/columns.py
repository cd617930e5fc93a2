"""Turn rows into the columns of the tables. Rows hold nanoseconds, tables milliseconds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa

from rayk.reports.fields import (
    BOOL,
    CELLS,
    DRAFT_FIELDS,
    FLOAT,
    INT,
    LOADED,
    MEASURED_FIELDS,
    OFFLOAD_FIELDS,
    REQUESTS,
    STEPS,
    TEXT,
    TRANSFERS,
    kinds,
)
from rayk.reports.fields import EFFECTIVE as EFFECTIVE_MEANINGS
from rayk.reports.fields import STAGES as STAGE_MEANINGS
from rayk.types.rows import CellRow, RequestRow, TransferRow, moving_ns
from rayk.types.steps import StepRow

NS_PER_MS = 1e6
NS_PER_S = 1e9
STAGES = tuple(STAGE_MEANINGS)  # stages every request row has a column for
EFFECTIVE = tuple(f"{side}.{fact}" for side in ("prefill", "decode") for fact in EFFECTIVE_MEANINGS)
MEASURED = tuple(field.name for field in MEASURED_FIELDS)
OFFLOADED = tuple(field.name for field in OFFLOAD_FIELDS)  # columns of what a cell's host tier did
DRAFTED = tuple(field.name for field in DRAFT_FIELDS)  # columns of what was proposed and accepted

CELL_FIELDS = kinds(CELLS)  # columns of cells.parquet beside the axes, with their types
REQUEST_FIELDS = kinds(REQUESTS)
TRANSFER_FIELDS = kinds(TRANSFERS)

STEP_FIELDS = kinds(STEPS)

FIELDS = {
    "cells": CELL_FIELDS,
    "requests": REQUEST_FIELDS,
    "transfers": TRANSFER_FIELDS,
    "steps": STEP_FIELDS,
}


def request_record(row: RequestRow) -> dict[str, Any]:
    gaps_ms = [(b - a) / NS_PER_MS for a, b in pairwise(row.token_times_ns)]
    record: dict[str, Any] = {name: getattr(row, name) for name in REQUEST_FIELDS if hasattr(row, name)}
    record |= {
        "output_top_logprobs": _tops(row.output_top_logprobs),
        "prompt_top_logprobs": _tops(row.prompt_top_logprobs),
        "due_ms": row.due_ns / NS_PER_MS,
        "ttft_ms": _ms(row.ttft_ns),
        "tpot_ms": _ms(row.tpot_ns),
        "itl_ms": gaps_ms,
        "e2e_ms": _ms(row.e2e_ns),
        "exposed_ms": _ms(row.exposed_ns),
        "load_ms": row.load_ns / NS_PER_MS if row.load_ns else None,
        "swap_ms": row.swap_ns / NS_PER_MS if row.swap_ns else None,
        **_drafted([row]),
    }
    for stage in dict.fromkeys((*STAGES, *row.stage_ns)):
        record[f"stage_{stage}_ns"] = row.stage_ns.get(stage)
    return record


def _ms(length_ns: float | None) -> float | None:
    return None if length_ns is None else length_ns / NS_PER_MS


def _tops(tops: Sequence[Sequence[tuple[int, float]] | None] | None) -> list[Any] | None:
    if tops is None:
        return None
    return [top and [{"token_id": token, "logprob": value} for token, value in top] for top in tops]


def transfer_record(row: TransferRow) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(row, name) for name in TRANSFER_FIELDS if hasattr(row, name)}
    record |= {
        **{
            f"{part}_ms": getattr(row, f"{part}_ns") / NS_PER_MS
            for part in ("post", "transfer", "repack", "convert", "digest")
        },
        "begin_ms": _ms(row.begin_ns),
        "end_ms": _ms(row.end_ns),
        "gb_per_s": row.bytes / row.transfer_ns if row.transfer_ns > 0 else None,
    }
    return record


def step_record(row: StepRow) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(row, name) for name in STEP_FIELDS if hasattr(row, name)}
    windowed = [list(pair) for pair in row.windowed]
    return record | {"begin_ms": row.begin_ns / NS_PER_MS, "windowed": windowed}


def cell_record(
    row: CellRow, requests: Sequence[RequestRow], transfers: Sequence[TransferRow]
) -> dict[str, Any]:
    """Make a row of cells.parquet: what the cell found, and sums over its requests and transfers. Columns of
    transfers count hand-overs only: what the host tier moves has columns of its own."""
    relayed = sum(t.bytes for t in transfers if t.purpose == "relay")
    transfers = [t for t in transfers if t.purpose == "handover"]
    divergence = row.first_divergence
    moved_ns = _moved_ns(transfers)
    num_bytes = sum(t.bytes for t in transfers)
    record: dict[str, Any] = {"cell_id": row.cell_id}
    record |= {name: _axis_value(value) for name, value in row.axes.items()}
    record |= {name: getattr(row, name) for name in CELL_FIELDS if hasattr(row, name)}
    record |= {
        "first_divergence": divergence and {"request": divergence[0], "token_index": divergence[1]},
        "prefill.effective_block_sizes": row.prefill_effective_block_sizes,
        "decode.effective_block_sizes": row.decode_effective_block_sizes,
        "prefill.effective_kernel_block_sizes": row.prefill_effective_kernel_block_sizes,
        "decode.effective_kernel_block_sizes": row.decode_effective_kernel_block_sizes,
        **_loaded(row.load_memory),
        "min_cut_kernel_block_size": _min_cut(row),
        **_waste(row.kv_waste),
        **{f"{side}.kv_groups": row.kv_groups.get(side) for side in ("prefill", "decode")},
        **{f"{side}.kv_held": row.kv_held.get(side) for side in ("prefill", "decode")},
        "decode.num_token_layers": row.decode_num_token_layers,
        **{name: row.effective.get(name) for name in EFFECTIVE},
        **{name: row.measured.get(name) for name in MEASURED},
        **{name: row.offloaded.get(name) for name in OFFLOADED},
        "host_relayed_bytes": relayed if row.offloaded else None,
        **_drafted(requests),
        "num_requests": len(requests),
        "transfer_bytes": num_bytes if transfers else None,
        "held_bytes": sum(t.held_bytes for t in transfers) if transfers else None,
        **{
            name: sum(getattr(r, name) for r in requests)
            for name in ("num_cached_tokens", "num_host_tokens", "num_disk_tokens", "num_swaps")
        },
        "num_descriptors": sum(t.num_descriptors for t in transfers) if transfers else None,
        "num_descriptors_merged": _sum(t.num_descriptors_merged for t in transfers),
        "num_staged": sum(t.staged for t in transfers) if transfers else None,
        "num_recovered": sum(r.recovered_by is not None for r in requests),
        "digest_percent": _digest_percent(transfers),
        "transfer_gb_per_s": num_bytes / moved_ns if moved_ns > 0 else None,
        "wall_s": row.wall_ns / NS_PER_S if row.wall_ns else None,
    }
    return record | _latencies(requests)


def _drafted(requests: Sequence[RequestRow]) -> dict[str, Any]:
    """Fill the columns of drafts, of a request or of a cell; null where nothing was proposed."""
    proposed, accepted = (
        [sum(counts) for counts in zip_longest(*(getattr(r, name) for r in requests), fillvalue=0)]
        for name in ("drafted_by_position", "accepted_by_position")
    )
    if not proposed:
        return dict.fromkeys(DRAFTED)
    # The tokens of one step have one time.
    told = [r.token_times_ns for r in requests if r.token_times_ns]
    num_steps, num_later = (sum(len(kind(times)) - 1 for times in told) for kind in (set, list))
    return {
        "num_drafts": proposed[0],
        "num_drafted": sum(proposed),
        "num_accepted": sum(accepted),
        "drafted_by_position": proposed,
        "accepted_by_position": accepted,
        "acceptance_rate": sum(accepted) / sum(proposed),
        "num_decode_steps": num_steps,
        "tokens_per_step": num_later / num_steps if num_steps else None,
    }


def _loaded(memory: Mapping[str, Sequence[Mapping[str, int | None]]]) -> dict[str, Any]:
    """List each number by rank; null where no rank tells it."""
    lists = {
        f"{side}.{name}": [of_rank.get(name) for of_rank in memory.get(side, ())]
        for side in ("prefill", "decode")
        for name in LOADED
    }
    return {name: values if any(v is not None for v in values) else None for name, values in lists.items()}


def _min_cut(row: CellRow) -> int | None:
    """Return the smallest kernel block that is less than its group's block; None where all are whole."""
    sides = (
        (row.prefill_effective_block_sizes, row.prefill_effective_kernel_block_sizes),
        (row.decode_effective_block_sizes, row.decode_effective_kernel_block_sizes),
    )
    pairs = (pair for blocks, parts in sides if blocks and parts for pair in zip(blocks, parts, strict=True))
    return min((part for block, part in pairs if part < block), default=None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _moved_ns(transfers: Sequence[TransferRow]) -> int:
    """Add up what moving each request's KV took, failed attempts included."""
    attempts: dict[tuple[int, str, int], list[TransferRow]] = {}
    for t in transfers:
        attempts.setdefault((t.repeat, t.request_id, t.retries), []).append(t)
    return sum(moving_ns(rows) for rows in attempts.values())


def _digest_percent(transfers: Sequence[TransferRow]) -> float | None:
    """Give digest time in percent of transfer time: per request and consumer rank, the longest of each."""
    longest: dict[tuple[int, str, int], tuple[int, int]] = {}
    for t in transfers:
        key = (t.repeat, t.request_id, t.consumer_rank)
        moved, digested = longest.get(key, (0, 0))
        longest[key] = (max(moved, t.transfer_ns), max(digested, t.digest_ns))
    moved_ns = sum(moved for moved, _ in longest.values())
    return 100.0 * sum(d for _, d in longest.values()) / moved_ns if moved_ns else None


def _waste(by_side: Mapping[str, tuple[int, float]]) -> dict[str, Any]:
    """List each side's bytes, and the bytes and percent of the side that wastes more."""
    worst = max(by_side.values(), default=(None, None))
    record: dict[str, Any] = {"kv_waste_bytes": worst[0], "kv_waste_percent": worst[1]}
    return record | {
        f"{side}.kv_waste_bytes": by_side[side][0] if side in by_side else None
        for side in ("prefill", "decode")
    }


def _latencies(requests: Sequence[RequestRow]) -> dict[str, Any]:
    records = [request_record(r) for r in requests]

    def percentile(column: str, percent: float) -> float | None:
        values = [r[column] for r in records if r[column] is not None]
        return float(np.percentile(values, percent)) if values else None

    return {
        "ttft_ms_p50": percentile("ttft_ms", 50),
        "ttft_ms_p99": percentile("ttft_ms", 99),
        "tpot_ms_p50": percentile("tpot_ms", 50),
        "e2e_ms_p50": percentile("e2e_ms", 50),
        "exposed_ms_p50": percentile("exposed_ms", 50),
        "output_tokens_per_s": _tokens_per_s(requests),
    }


def _tokens_per_s(requests: Sequence[RequestRow]) -> float | None:
    """Divide the output tokens by the time from the first arrival to the last token, repeats added up."""
    num_tokens, span_ns = 0, 0
    for repeat in {r.repeat for r in requests}:
        rows = [r for r in requests if r.repeat == repeat and r.token_times_ns]
        if rows:
            num_tokens += sum(len(r.token_times_ns) for r in rows)
            span_ns += max(r.token_times_ns[-1] for r in rows) - min(r.arrival_ns for r in rows)
    return num_tokens * NS_PER_S / span_ns if span_ns > 0 else None


def _axis_value(value: object) -> object:
    return json.dumps(value) if isinstance(value, list | dict) else value


# --- tables ---------------------------------------------------------------------------------------


def make_table(records: Sequence[dict[str, Any]], fields: dict[str, Any]) -> pa.Table:
    """Make a table with at least `fields`, whose types hold even without values; other columns get inferred
    types."""
    names = dict.fromkeys(name for record in records for name in record)
    extra = {n: _infer([r.get(n) for r in records]) for n in names if n not in fields}
    order = [*(n for n in names), *(n for n in fields if n not in names)]
    schema = pa.schema([(n, fields[n] if n in fields else extra[n]) for n in order])
    texts = [n for n, kind in extra.items() if kind == TEXT]
    rows = [r | {n: _as_text(r[n]) for n in texts if n in r} for r in records]
    return pa.Table.from_pylist(rows, schema=schema)


def typed(table: pa.Table, fields: dict[str, Any]) -> pa.Table:
    """Cast a table to the types that make_table gives. Raises pyarrow.ArrowInvalid if a value does not
    fit."""
    for index, name in enumerate(table.column_names):
        if name in fields and table.schema.field(name).type != fields[name]:
            column = table.column(name).cast(fields[name])
            table = table.set_column(index, pa.field(name, fields[name]), column)
    return table


def _infer(values: list[Any]) -> Any:
    present = [v for v in values if v is not None]
    for kind, types in ((BOOL, bool), (INT, int), (FLOAT, int | float)):
        if present and all(isinstance(v, types) for v in present):
            return kind
    return TEXT


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


# --- what may differ between two runs of one spec -------------------------------------------------

# both depend on times
_OF_TIER = (
    r"^(host|disk|swapped)_|^(num_host_tokens|num_disk_tokens|num_swaps|num_(swaps|loads)_declined|offload_)"
)
_OF_PROCESS = r"\.load_(device_)?peak_bytes$|^reference_kept_since$"  # memory of processes, and earlier runs
_INCIDENTAL = re.compile(rf"_(ms|ns|s)(_p\d+)?$|_per_s$|^digest_percent$|\.node$|{_OF_TIER}|{_OF_PROCESS}")


def incidental_columns(table: str, columns: Iterable[str]) -> list[str]:
    """Name a table's columns that hold times, what depends on times, nodes, peak memory, or what an earlier
    run left: two runs of one spec may differ in them."""
    fields = FIELDS[table]
    # An axis such as deadlines.cell_s is a setting, not a measurement.
    is_incidental = {c for c in columns if _INCIDENTAL.search(c)} | {*DRAFTED}
    return [c for c in columns if c in is_incidental and (c in fields or c.startswith("stage_"))]
