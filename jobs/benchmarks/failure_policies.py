"""Three failure policies under one load and the same faults: who is answered, how late, what is done twice.

    python jobs/benchmarks/failure_policies.py [--out DIR] [--record]
    ray job submit --working-dir . -- python jobs/benchmarks/failure_policies.py --out /absolute/path

Two prefill engines and one decode engine of a tiny Qwen3 take `--requests` prompts at once, `--repeats`
times per policy. Among their transfers a seed chooses some whose read is lost, some whose bytes are changed
under way, one whose blocks are given away early, and it ends one prefill engine in the middle. `fail` ends
what these strike; `recompute` has the decode engine compute what it cannot prove to have; `migrate` prefills
again. A fourth cell has no faults. Every token of every answer is compared with transformers', every byte by
digests.

Exit status 1 when a policy that saves requests left one unanswered, when a token differs, or when blocks are
held at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, option, run
from rayk import Experiment, load
from rayk.cli.guard import run_guarded
from rayk.reports.page import Column, Plot
from rayk.types.errors import UserError
from rayk.types.fault_table import FAILURE_POLICIES

TINY = "checkpoints/qwen3-tiny"
NO_FAULTS = "no faults"
LENGTHS = [64, 300, 150, 400]
MAX_BATCH_TOKENS = 256
MIN_REQUESTS = 6
"""Three reads of the first half of the requests are struck."""


def draw_faults(num_requests: int, seed: int, mode: str = "pull") -> list[dict[str, Any]]:
    """Faults of one cell: which of the decode engine's reads or of a prefill engine's writes, and which step
    of the other prefill engine. At least MIN_REQUESTS requests; they take turns at the prefill engines."""
    draw = random.Random(seed)
    lost, changed, fenced = draw.sample(range(1, num_requests // 2 + 1), 3)
    pusher = {"engine": 1} if mode == "push" else {}  # without it, each prefill engine would commit them
    num_first_tokens = sum(LENGTHS[i % len(LENGTHS)] for i in range(0, num_requests, 2))
    num_steps = -(-num_first_tokens // MAX_BATCH_TOKENS)  # that engine 0 takes at the least
    return [
        {"kind": "drop", "point": "post", "step": lost, **pusher},
        {"kind": "corrupt", "point": "mid_transfer", "step": changed, "seed": draw.randrange(64), **pusher},
        {"kind": "corrupt", "point": "notify", "step": fenced, **pusher},
        # Requests of odd numbers are prefilled by engine 1.
        {"kind": "early_reuse", "request": draw.randrange(num_requests // 2) | 1, "engine": 1},
        {
            "kind": "kill",
            "point": "prefill",
            "engine": 0,
            "step": draw.randint(min(4, num_steps), min(6, num_steps)),
        },
    ]


def make_spec(options: argparse.Namespace) -> dict[str, Any]:
    """The experiment: a cell per policy, and one without faults."""
    faults = draw_faults(options.requests, options.seed, options.mode)
    return {
        "name": "failure-policies",
        "model": TINY,
        "checkpoints": {TINY: "qwen3"},
        "device": options.device,
        "prompts": {"random": {"count": options.requests, "input_tokens": LENGTHS, "seed": options.seed}},
        "sampling": {"max_tokens": options.max_tokens, "ignore_eos": True},
        "engine": {"num_blocks": 512, "max_batch_tokens": MAX_BATCH_TOKENS, "max_seqs": 32},
        "prefill": {"num_engines": 2},
        "transfer": {"mode": options.mode, "lease_s": 5.0},
        "matrix": [
            {"failure_policy": list(FAILURE_POLICIES), "faults": [faults]},
            {"failure_policy": ["fail"], "faults": [[]]},
        ],
        "repeat": options.repeats,
        "checks": ["tokens", "kv_bytes"],
        "deadlines": {"cell_s": 200.0, "request_s": 90.0, "transfer_s": options.transfer_s},
    }


def policy_rows(folder: Path) -> list[dict[str, Any]]:
    """One row per cell of a run: see the columns of the report."""
    result = load(folder)
    rows = []
    for cell in result.cells.to_dict("records"):
        requests = [r for r in result.requests.to_dict("records") if r["cell_id"] == cell["cell_id"]]
        transfers = [t for t in result.transfers.to_dict("records") if t["cell_id"] == cell["cell_id"]]
        policy = cell["failure_policy"] if json.loads(cell["faults"]) else NO_FAULTS
        rows.append({"policy": policy, **_numbers(cell, requests, transfers)})
    return rows


def _numbers(
    cell: Mapping[str, Any], requests: Sequence[Mapping[str, Any]], transfers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    answered = [r for r in requests if not _is_told(r["error"])]
    migrated = [r for r in requests if r["recovered_by"] == "migrate"]
    moved = sum(t["bytes"] for t in transfers)
    # Of each answer's transfers the last one counted.
    kept = sum(t["bytes"] for t in transfers if t["verdict"] == "OK")
    twice = sum(int(r["num_recomputed_tokens"]) for r in requests)
    twice += sum((int(r["num_attempts"]) - 1) * int(r["num_prompt_tokens"]) for r in migrated)
    return {
        "verdict": cell["verdict"],
        "num_requests": len(requests),
        "num_answered": len(answered),
        "answered_share": len(answered) / len(requests),
        "num_recovered": sum(_is_told(r["recovered_by"]) for r in requests),
        "num_wrong": _count(cell["num_token_mismatches"]),
        "ttft_ms_p50": _percentile([r["ttft_ms"] for r in answered], 50),
        "ttft_ms_p99": _percentile([r["ttft_ms"] for r in answered], 99),
        "e2e_ms_p50": _percentile([r["e2e_ms"] for r in answered], 50),
        "e2e_ms_p99": _percentile([r["e2e_ms"] for r in answered], 99),
        "e2e_ms": [r["e2e_ms"] for r in answered],
        "num_recomputed_tokens": twice,
        "num_valid_tokens": sum(
            int(r["num_valid_tokens"]) for r in requests if _is_told(r["num_valid_tokens"])
        ),
        "moved_bytes": int(moved),
        "wasted_bytes": int(moved - kept),
        "again_bytes": int(sum(t["bytes"] for t in transfers if t["retries"])),
        "num_blocks_held": _count(cell["num_blocks_held"]),
        "reason": cell["reason"],
    }


def _is_told(value: Any) -> bool:
    # Of a table without missing values there are none of these; else None or, of numbers, NaN.
    return value is not None and not (isinstance(value, float) and math.isnan(value)) and str(value) != "<NA>"


def _count(value: Any) -> int:
    return int(value) if _is_told(value) else 0


def _percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else None


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for row in rows:
        if row["policy"] in ("recompute", "migrate", NO_FAULTS) and row["num_answered"] < row["num_requests"]:
            lost = row["num_requests"] - row["num_answered"]
            found.append(f"{row['policy']}: {lost} of {row['num_requests']} requests without an answer")
        if row["num_wrong"]:
            found.append(f"{row['policy']}: {row['num_wrong']} answers have other tokens than the reference")
        if row["num_blocks_held"]:
            found.append(f"{row['policy']}: {row['num_blocks_held']} blocks are held at the end")
    return found


COLUMNS = (
    Column(title="policy", key="policy"),
    Column(title="verdict", key="verdict"),
    Column(title="answered", key="answered_share", spec=".1%"),
    Column(title="saved", key="num_recovered", spec=",d"),
    Column(title="wrong answers", key="num_wrong", spec=",d"),
    Column(title="TTFT p50, ms", key="ttft_ms_p50", spec=",.0f"),
    Column(title="TTFT p99, ms", key="ttft_ms_p99", spec=",.0f"),
    Column(title="E2E p50, ms", key="e2e_ms_p50", spec=",.0f"),
    Column(title="E2E p99, ms", key="e2e_ms_p99", spec=",.0f"),
)
COSTS = (
    Column(title="policy", key="policy"),
    Column(title="prompt tokens computed again", key="num_recomputed_tokens", spec=",d"),
    Column(title="kept: arrived and proven", key="num_valid_tokens", spec=",d"),
    Column(title="moved, KiB", key="moved_kib", spec=",.0f"),
    Column(title="for nothing, KiB", key="wasted_kib", spec=",.0f"),
    Column(title="moved again, KiB", key="again_kib", spec=",.0f"),
    Column(title="blocks held at the end", key="num_blocks_held", spec=",d"),
)
FAULTS = (
    Column(title="kind", key="kind"),
    Column(title="point", key="point"),
    Column(title="which", key="which"),
)
NOTE = (
    "Times are of answered requests: under `fail` the struck ones are missing, which flatters it. A lost "
    "read is noticed at the transfer's deadline, so that its request waits that long under the other two. "
    "`recompute` keeps the first token and what of the KV is proven; `migrate` moves all of it again."
)


def fault_rows(faults: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    known = ("kind", "point", "seed")
    return [
        {
            "kind": f["kind"],
            "point": f.get("point", "transfer"),
            "which": ", ".join(f"{k} {v}" for k, v in f.items() if k not in known),
        }
        for f in faults
    ]


def about(options: argparse.Namespace) -> str:
    return (
        f"{options.requests} prompts at once, {options.repeats} times per policy, transfer mode "
        f"{options.mode}, transfers' deadline {options.transfer_s:g} s, seed {options.seed}; two prefill "
        "engines, one decode engine. Each repeat plants every fault once; one whose point is not passed that "
        "often, because an engine died before, strikes nothing."
    )


def fill(options: argparse.Namespace, page: Page) -> None:
    """Run the cells; add what each policy answered, what it cost and what was planted."""
    if options.requests < MIN_REQUESTS:
        raise UserError(
            f"--requests {options.requests}: at least {MIN_REQUESTS}; faults are drawn among their transfers"
        )
    spec = make_spec(options)
    Experiment(spec).run(options.out / "run", address=options.address)
    rows = policy_rows(options.out / "run")
    page.environment["seeds"] = {"prompts and faults": options.seed}
    page.tables = {"policies": rows}
    page.wrong += failures(rows)
    kib = {key: f"{key.removesuffix('_bytes')}_kib" for key in rows[0] if key.endswith("_bytes")}
    shown = [row | {name: row[key] / 1024 for key, name in kib.items()} for row in rows]
    boxes = [{"type": "box", "name": row["policy"], "y": row["e2e_ms"], "boxpoints": "all"} for row in rows]
    layout = {"yaxis": {"title": {"text": "E2E of answered requests, ms"}, "rangemode": "tozero"}}
    page.say(about(options), "")
    page.section(
        "Answers",
        COLUMNS,
        shown,
        plots=[Plot(id="e2e", title="How late answers are", data=boxes, layout=layout)],
    )
    page.section("What it costs", COSTS, shown, note=NOTE)
    page.section("Faults of every repeat", FAULTS, fault_rows(spec["matrix"][0]["faults"][0]))
    page.say(NOTE, "", *(f"- {row['policy']}: {row['reason']}" for row in rows if row["reason"]))


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        fill,
        __file__,
        title="Failure policies on one load",
        argv=argv,
        keeps=True,
        requests=option(24, "of each cell, at once"),
        repeats=option(3, "of every cell"),
        max_tokens=option(24, "of an answer"),
        seed=option(0, "of prompts and faults"),
        transfer_s=option(3.0, "deadline"),
        mode=option("pull", "of transfers", choices=["pull", "push"]),
        device=option("auto", "of the engines", choices=["auto", "cpu", "cuda"]),
        address=option(None, "Ray cluster; else RAY_ADDRESS, else a local one", type=str),
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
