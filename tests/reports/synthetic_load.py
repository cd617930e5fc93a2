"""A made-up bench: a folder as `rayk bench` writes it, with numbers drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayk.reports import Result, load
from rayk.reports.load_fields import LOAD_CELL_FIELDS, METRICS, STATISTICS
from rayk.reports.load_writer import LoadWriter

COMMAND = ["/x/.venv/bin/rayk", "bench", "--url", "http://127.0.0.1:8000", "--rate", "4", "--out", "/tmp/x"]


def write_bench(
    folder: Path,
    loads: Sequence[str] = ("poisson rate=4",),
    *,
    factor: float = 1.0,
    seed: int = 0,
    prompts: int = 0,
    verdict: str = "VALID",
    count: int = 100,
) -> Result:
    """Loads of requests 250 ms apart: sent 1 ms late, TTFT some 80 ms, 10 gaps of some 8 ms times `factor`.

    `prompts` is the first token of every prompt; of `count` requests the first ten are warm-up.
    """
    environment = {"command": COMMAND, "git_commit": "c" * 40}
    writer = LoadWriter(folder, spec=[{"name": name} for name in loads], environment=environment)
    for name in loads:
        noise = random.Random(f"{name} {seed}")
        rows = [_request(name, i, noise, factor, prompts) for i in range(count)]
        writer.write(_cell(name, rows, verdict), rows)
    return load(folder)


def _request(name: str, index: int, noise: random.Random, factor: float, first: int) -> dict[str, Any]:
    ttft = 80 * noise.uniform(0.97, 1.03)
    gaps = [8 * factor * noise.uniform(0.97, 1.03) for _ in range(10)]
    return {
        "cell_id": name,
        "repeat": 0,
        "request_id": f"{name}/{index}",
        "prompt_index": index,
        "prompt_token_ids": [first, index],
        "output_token_ids": list(range(11)),
        "num_prompt_tokens": 2,
        "ttft_ms": ttft,
        "tpot_ms": sum(gaps) / 10,
        "itl_ms": gaps,
        "e2e_ms": ttft + sum(gaps),
        "outcome": "ok",
        "phase": "warmup" if index < 10 else "measured",
        "num_output_tokens": 11,
        "num_chunks": 11,
        "due_ms": 250.0 * index,
        "send_lag_ms": 1.0,
        "ended_ms": 250.0 * index + ttft + sum(gaps),
        "is_good": True,
    }


def _cell(name: str, rows: list[dict[str, Any]], verdict: str) -> dict[str, Any]:
    cell: dict[str, Any] = dict.fromkeys(LOAD_CELL_FIELDS)
    cell |= {
        "cell_id": name,
        "verdict": verdict,
        "reason": "" if verdict == "VALID" else "means are known roughly",
        "met": verdict != "INVALID",
        "num_requests": len(rows),
        "num_measured": len(rows) - 10,
        "num_warmup": 10,
        "num_failed": 0,
        "wall_s": 0.25 * len(rows),
        "url": "http://127.0.0.1:8000",
        "model": "qwen3-tiny",
        "arrival": "poisson",
        "slo": "ttft=100ms",
        "answered_per_s": 4.0,
        "goodput_per_s": 3.9 if name.endswith("4") else 1.9,
        "good_share": 0.975,
        "output_tokens_per_s": 44.0,
        "generator_cpu_share": 0.1,
    }
    measured = rows[10:]
    for metric in METRICS:
        values = [v for row in measured for v in _values(row[f"{metric}_ms"])]
        cell[f"num_{metric}_values"] = len(values)
        for statistic in STATISTICS:
            middle = sum(values) / len(values)
            cell |= {
                f"{metric}_ms_{statistic}": middle,
                f"{metric}_ms_{statistic}_low": 0.98 * middle,
                f"{metric}_ms_{statistic}_high": 1.02 * middle,
            }
    return cell


def _values(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]
