"""A cell as AIPerf's `profile_export_aiperf.json`, schema 1.4 (aiperf 0.13.0).

Tags, units and definitions are AIPerf's: latencies count from when a request was sent, not from when it was
due; rates are over the time from the first measured request to the last response. AIPerf's
inter_token_latency is rayk's TPOT, its inter_chunk_latency rayk's ITL of a load. `aiperf_version` and
`input_config` are left out: AIPerf did not measure this.
"""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from rayk.reports.export import MS_PER_S, CellExport, numbers, send_lag_ms, statistics, without_nothing
from rayk.reports.values import json_value

SCHEMA_VERSION = "1.4"
FILE_NAME = "profile_export_aiperf.json"


def aiperf_json(export: CellExport) -> str:
    return json.dumps(aiperf_export(export), indent=2, default=json_value) + "\n"


def aiperf_export(export: CellExport) -> dict[str, Any]:
    reason = str(export.cell.get("reason", ""))
    cancelled = export.is_load and reason.startswith("interrupted")
    return without_nothing(
        {
            "schema_version": SCHEMA_VERSION,
            **_records(export, export.answered),
            **_totals(export),
            "run_info": _run_info(export),
            "was_cancelled": cancelled,
            "is_complete": not cancelled,
            "incomplete_reason": reason if cancelled else None,
            "error_summary": _errors(export.failed),
            "warmup_metrics": _records(export, export.warmup) or None,
            "metadata": {
                "producer": f"rayk {export.version}",
                "cell_id": export.cell["cell_id"],
                "model": export.model,
                "verdict": export.cell["verdict"],
                "reason": reason,
            },
        }
    )


def _records(export: CellExport, rows: pd.DataFrame) -> dict[str, Any]:
    lag = send_lag_ms(rows)
    tpot, output = numbers(rows["tpot_ms"]), numbers(export.output_tokens(rows))
    gaps = [list(g) for g in rows["itl_ms"] if g is not None]
    found = {
        "request_latency": ("ms", numbers(rows["e2e_ms"] - lag)),
        "time_to_first_token": ("ms", numbers(rows["ttft_ms"] - lag)),
        "time_to_second_token": ("ms", [float(g[0]) for g in gaps if g]),
        "inter_token_latency": ("ms", tpot),
        "inter_chunk_latency": ("ms", [float(g) for of in gaps for g in of] if export.is_load else []),
        "output_token_throughput_per_user": ("tokens/sec/user", [MS_PER_S / t for t in tpot if t > 0]),
        "input_sequence_length": ("tokens", numbers(rows["num_prompt_tokens"])),
        "output_sequence_length": ("tokens", output),
        "output_token_count": ("tokens", output),
        "usage_prompt_cache_read_tokens": ("tokens", numbers(rows["num_cached_tokens"])),
    }
    return {tag: metric for tag, (unit, values) in found.items() if (metric := _metric(unit, values))}


def _metric(unit: str, values: list[float]) -> dict[str, Any] | None:
    told = statistics(values)
    if told is None:
        return None
    return {"unit": unit, "avg": told.pop("mean"), "std": told.pop("stddev"), **told}


def _totals(export: CellExport) -> dict[str, Any]:
    answered, span_s = export.answered, export.span_s()
    num_input, num_output = (
        sum(numbers(answered["num_prompt_tokens"])),
        sum(numbers(export.output_tokens(answered))),
    )
    num, num_failed = len(answered), len(export.failed)
    values = {
        "request_count": ("requests", num),
        "error_request_count": ("requests", num_failed or None),
        "request_error_rate": ("%", 100.0 * num_failed / (num + num_failed)),
        "total_isl": ("tokens", num_input),
        "total_osl": ("tokens", num_output),
        "total_output_tokens": ("tokens", num_output),
        "benchmark_duration": ("sec", span_s),
        **_rates(span_s, num, num_input, num_output),
    }
    if "slo" in export.cell:
        num_good = int(answered["is_good"].sum())
        values["good_request_count"] = ("requests", num_good)
        values["goodput"] = ("requests/sec", num_good / span_s if span_s > 0 else None)
    return {tag: {"unit": unit, "avg": float(v)} for tag, (unit, v) in values.items() if v is not None}


def _rates(span_s: float, num: int, num_input: float, num_output: float) -> dict[str, tuple[str, float]]:
    if span_s <= 0:
        return {}
    return {
        "request_throughput": ("requests/sec", num / span_s),
        "input_token_throughput": ("tokens/sec", num_input / span_s),
        "output_token_throughput": ("tokens/sec", num_output / span_s),
        "total_token_throughput": ("tokens/sec", (num_input + num_output) / span_s),
    }


def _run_info(export: CellExport) -> dict[str, Any]:
    seeds = export.environment.get("seeds") or {}
    seed = export.cell.get("seed", seeds.get("prompts"))
    command = export.environment.get("command") or []
    return without_nothing(
        {
            "random_seed": None if seed is None else int(seed),
            "run_label": export.cell["cell_id"],
            "variation_label": export.cell["cell_id"],
            "variation_index": export.index,
            "variation_values": export.axes,
            "cli_command": " ".join(command) or None,
        }
    )


def _errors(failed: pd.DataFrame) -> list[dict[str, Any]]:
    counts = failed["error"].fillna("unknown").value_counts()
    return [
        {"error_details": {"type": "RequestError", "message": str(text)}, "count": int(count)}
        for text, count in counts.items()
    ]
