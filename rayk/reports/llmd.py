"""A cell as llm-d's Benchmark Report v0.2.1 (`llmd-benchmark-report` 0.2.1), YAML.

Latencies are rayk's: from when a request was due. Rates are those of the tables: of a load those of its
measured window, of a cell from the first arrival to the last token. What the schema has no place for
(verdict, KV bytes checked and moved) stands under `results.observability.rayk`, where the schema allows it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import uuid
from typing import Any

import yaml

from rayk.reports.export import CellExport, numbers, statistics, without_nothing
from rayk.reports.values import json_value

VERSION = "0.2.1"
FILE_NAME = "benchmark_report_v0.2.yaml"
# columns of cells.parquet that go under `results.observability.rayk`
OWN = (
    "verdict",
    "reason",
    "num_kv_bytes_checked",
    "num_kv_bytes_mismatched",
    "transfer_bytes",
    "num_descriptors",
    "transfer_gb_per_s",
    "goodput_per_s",
    "good_share",
)
ROLES = {"prefill": "prefill", "decode": "decode", "aggregated": "replica"}


def llmd_yaml(export: CellExport) -> str:
    plain = json.loads(json.dumps(llmd_report(export), default=json_value))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110)


def llmd_report(export: CellExport) -> dict[str, Any]:
    stack = None if export.is_load else _stack(export)
    own = {name: export.cell[name] for name in OWN if name in export.cell}
    return {
        "version": VERSION,
        "run": _run(export),
        "scenario": without_nothing({"stack": stack, "load": _load(export)}),
        "results": {"request_performance": {"aggregate": _aggregate(export)}, "observability": {"rayk": own}},
    }


def _run(export: CellExport) -> dict[str, Any]:
    """Name the export; ids are the same whenever the same run is exported."""
    started = str(export.environment.get("started") or "")
    experiment = uuid.uuid5(uuid.NAMESPACE_OID, f"rayk {export.spec.get('name', '')} {started}")
    time = {"start": datetime.datetime.fromisoformat(started).isoformat()} if started else None
    return without_nothing(
        {
            "uid": str(uuid.uuid5(experiment, str(export.cell["cell_id"]))),
            "eid": str(experiment),
            "time": time,
            "description": f"{export.model} [{export.cell['cell_id']}]",
            "keywords": ["rayk", str(export.cell["verdict"])],
        }
    )


def _stack(export: CellExport) -> list[dict[str, Any]]:
    if export.setting("mode") == "aggregated":
        return [_engines(export, "aggregated", "prefill")]
    return [_engines(export, side, side) for side in ("prefill", "decode")]


def _engines(export: CellExport, label: str, side: str) -> dict[str, Any]:
    tp, pp, num = (int(export.setting(f"{side}.{key}") or 1) for key in ("tp", "pp", "num_engines"))
    devices = export.environment.get("devices") or {}
    gpus = [] if export.setting("device") == "cpu" else devices.get("gpus") or []
    config = {name: value for name, value in export.axes.items() if name.partition(".")[0] == side}
    return {
        "metadata": {"label": label, "cfg_id": _hash([export.model, tp, pp, num, config])},
        "standardized": {
            "kind": "inference_engine",
            "tool": "rayk",
            "tool_version": export.version,
            "role": ROLES[label],
            "replicas": num,
            "model": {"name": export.model},
            "accelerator": {
                "model": str(gpus[0] if gpus else devices.get("cpu") or "cpu"),
                "count": tp * pp * num,
                # The schema has no place for dealt tokens: those stand among the settings.
                "parallelism": {"tp": tp, "pp": pp},
            },
        },
        "native": {"config": config},
    }


def _load(export: CellExport) -> dict[str, Any]:
    rows = export.answered
    files = export.setting("prompts") if export.is_load else export.setting("prompts.file")
    rate = export.cell.get("rate") if export.is_load else export.setting("arrival.rate")
    limits = numbers(rows["max_tokens"]) if "max_tokens" in rows else [export.setting("sampling.max_tokens")]
    enforced = export.setting("ignore_eos") if export.is_load else export.setting("sampling.ignore_eos")
    standardized = {
        "tool": "rayk",
        "tool_version": export.version,
        "source": "sampled" if files else "random",
        "stage": export.index,
        "input_seq_len": _lengths(numbers(rows["num_prompt_tokens"])),
        "output_seq_len": _lengths(numbers(limits)) if enforced else None,
        "rate_qps": rate,
        "concurrency": int(export.cell["concurrency"]) if "concurrency" in export.cell else None,
    }
    command = " ".join(export.environment.get("command") or [])
    return {
        "metadata": {"cfg_id": _hash(export.spec)},
        "standardized": without_nothing(standardized),
        "native": {"args": {"command": command}, "config": dict(export.spec)},
    }


def _lengths(tokens: list[float]) -> dict[str, Any] | None:
    """Describe lengths as they were sent; how they were drawn is in the native part."""
    if not tokens:
        return None
    least, most = int(min(tokens)), int(max(tokens))
    if least == most:
        return {"distribution": "fixed", "value": least}
    return {"distribution": "other", "value": sum(tokens) / len(tokens), "min": least, "max": most}


def _aggregate(export: CellExport) -> dict[str, Any]:
    rows, output = export.answered, export.output_tokens(export.answered)
    gaps = [float(gap) for of in rows["itl_ms"] if of is not None for gap in of]
    per_token = rows["e2e_ms"] / output
    aborted = export.failed["outcome"] == "aborted" if export.is_load else None
    num_aborted = 0 if aborted is None else int(aborted.sum())
    return {
        "requests": without_nothing(
            {
                "total": len(rows) + len(export.failed),
                "failures": len(export.failed) - num_aborted,
                "incomplete": num_aborted,
                "input_length": _statistics("count", numbers(rows["num_prompt_tokens"])),
                "output_length": _statistics("count", numbers(output)),
            }
        ),
        "latency": without_nothing(
            {
                "time_to_first_token": _statistics("ms", numbers(rows["ttft_ms"])),
                "normalized_time_per_output_token": _statistics("ms/token", numbers(per_token)),
                "time_per_output_token": _statistics("ms/token", numbers(rows["tpot_ms"])),
                "inter_token_latency": _statistics("ms/token", gaps),
                "request_latency": _statistics("ms", numbers(rows["e2e_ms"])),
            }
        ),
        "throughput": _throughput(export),
    }


def _throughput(export: CellExport) -> dict[str, Any]:
    rows, span_s = export.answered, export.span_s()
    output = export.cell.get("output_tokens_per_s")
    window_s = export.cell.get("window_s") if export.is_load else span_s
    prompts = numbers(rows["num_prompt_tokens"])
    known = len(prompts) == len(rows) and window_s
    incoming = sum(prompts) / window_s if known and window_s else None
    requests = export.cell.get("answered_per_s") if export.is_load else len(rows) / span_s if span_s else None
    both = None if incoming is None or output is None else incoming + output
    rates = {
        "input_token_rate": ("tokens/s", incoming),
        "output_token_rate": ("tokens/s", output),
        "total_token_rate": ("tokens/s", both),
        "request_rate": ("queries/s", requests),
    }
    return {name: {"units": units, "mean": rate} for name, (units, rate) in rates.items() if rate is not None}


def _statistics(units: str, values: list[float]) -> dict[str, Any] | None:
    told = statistics(values)
    if told is None:
        return None
    return {"units": units} | {name: value for name, value in told.items() if name not in ("count", "sum")}


def _hash(config: Any) -> str:
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
