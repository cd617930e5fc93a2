"""Three failure policies under one load and the same faults: who is answered, how late, what is done twice.

    python jobs/failure_policies.py [--out DIR]
    ray job submit --working-dir . -- python jobs/failure_policies.py --out /absolute/path

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
import datetime
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install
sys.path.insert(0, str(Path(__file__).resolve().parent))

from failure_policies_report import TABLES, make_page, markdown  # noqa: E402

from rayk import Experiment, load  # noqa: E402
from rayk.cli.guard import run_guarded  # noqa: E402
from rayk.reports import collect_environment  # noqa: E402
from rayk.reports.files import write_text  # noqa: E402
from rayk.reports.html import write_page  # noqa: E402
from rayk.reports.table_files import claim_folder, write_tables  # noqa: E402
from rayk.types.fault_table import FAILURE_POLICIES  # noqa: E402

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
    """What must not be, in words."""
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


def run_job(options: argparse.Namespace) -> int:
    """Run, write, print; the exit status."""
    environment = collect_environment(command=sys.argv, seeds={"prompts and faults": options.seed})
    now = datetime.datetime.now().astimezone()
    out = options.out or Path("runs") / f"failure-policies-{now:%Y%m%d-%H%M%S}"
    claim_folder(out, TABLES)
    spec = make_spec(options)
    Experiment(spec).run(out / "run", address=options.address)
    rows = policy_rows(out / "run")
    write_tables({"policies": rows}, out)
    write_text(out / "environment.json", json.dumps(environment, indent=2) + "\n")
    faults = spec["matrix"][0]["faults"][0]
    write_page(make_page(rows, faults, options, environment), out / "report.html")
    text = markdown(rows, faults, options)
    write_text(out / "report.md", text + "\n")
    print(text)
    wrong = failures(rows)
    print("\n".join([*wrong, f"report: {out / 'report.html'}"]), file=sys.stderr)
    return int(bool(wrong))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=24, help="of each cell, at once (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of every cell (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=24, help="of an answer (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and faults (default: %(default)s)")
    parser.add_argument("--transfer-s", type=float, default=3.0, help="deadline (default: %(default)s)")
    parser.add_argument("--mode", default="pull", choices=["pull", "push"], help="default: %(default)s")
    parser.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: %(default)s"
    )
    parser.add_argument("--address", help="Ray cluster (default: RAY_ADDRESS, else a local one)")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: runs/failure-policies-<time>)"
    )
    options = parser.parse_args(arguments)
    if options.requests < MIN_REQUESTS:
        parser.error(
            f"--requests {options.requests}: at least {MIN_REQUESTS}; faults are drawn among their transfers"
        )
    return options


if __name__ == "__main__":
    chosen = parse_options()
    sys.exit(run_guarded(lambda: run_job(chosen)))
