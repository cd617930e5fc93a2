"""The first day on a GPU as one command: everything that tests without one cannot say, row by row.

    make gpu-day PY=python3 ARGS='--out DIR --only decode --minutes 9'
    python jobs/gpu_day.py [--out runs/gpu-day] [--only NAME ...] [--minutes N] [--commit SHA]
    python jobs/gpu_day.py --device cpu --out DIR      # a stand-in: Triton's interpreter, small shapes

Needs torch, Triton and pytest. What needs more and lacks it is a row "skipped: no NAME". Each stage is a
process of its own that ends within 8 minutes. A row is on disk when it is measured; called again with the
same --out, only rows that are not there are measured, so --minutes may cut the day into shorter commands.
Beside rows.jsonl there are gpu-day.csv, gpu-day.json and gpu-day.html; `rayk report DIR` draws the page in
full where pandas is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works without an install

import torch

from jobs.gpu import attention, engine, kernels, sanitizer, suite, sums, tiles, transfers
from jobs.gpu.rows import Row, Rows, nvidia_clocks
from jobs.gpu.stages import Stage
from rayk.reports.environment import collect_environment

STAGES: tuple[Stage, ...] = (
    suite.STAGE,
    sanitizer.STAGE,
    attention.STAGE,
    tiles.STAGE,
    kernels.STAGE,
    engine.STAGE,
    transfers.STAGE,
    sums.STAGE,
)
LIMIT_S = 8 * 60.0
"""For one stage in one call."""
LEAST_S = 20.0
"""With less time left, no stage begins."""


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """What the first call in this folder ran on; read again by later ones."""
    path = options.out / "environment.json"
    if path.is_file():
        return dict(json.loads(path.read_text()))
    device = "a CPU, as a stand-in for a GPU: no measurement"
    if options.device != "cpu":
        of = torch.cuda.get_device_properties(options.device)
        size = f"{of.total_memory / 2**30:.0f} GiB, {of.multi_processor_count} multiprocessors"
        device = f"{of.name}, {size}, CUDA {torch.version.cuda}"
    found = collect_environment(command=sys.argv, device=device)
    found["git_commit"] = options.commit or found["git_commit"]
    path.write_text(json.dumps(found, indent=2) + "\n")
    return found


def run_stage(stage: Stage, rows: Rows, options: argparse.Namespace, until: float) -> None:
    """Measure what is missing, in processes that have LIMIT_S together, or until then."""
    ends = min(time.monotonic() + LIMIT_S, until)
    before = rows.count(stage.name)
    while missing := stage.missing(rows, options.device):
        status = _child(stage, options, ends - time.monotonic())
        if status is None:
            # What is not done in a whole stage's time would not be the next time, either.
            if rows.count(stage.name) == before and ends < until:
                note = f"not done within {LIMIT_S:.0f} s"
                rows.append(stage.name, missing[0], [Row(kernel=missing[0], status="failed", note=note)])
            return
        if stage.missing(rows, options.device) == missing:  # it came to no item's end
            note = f"the process ended with status {status}"
            rows.append(stage.name, missing[0], [Row(kernel=missing[0], status="failed", note=note)])


def _child(stage: Stage, options: argparse.Namespace, limit_s: float) -> int | None:
    """The status of a process that measures a stage; None where it was ended for its time."""
    own = ["--stage", stage.name, "--out", str(options.out), "--device", options.device]
    own += ["--only", *options.only] if options.only else []
    interpreted = {"TRITON_INTERPRET": "1"} if options.device == "cpu" else {}
    child = subprocess.Popen(
        [sys.executable, __file__, *own, "--commit", options.commit],
        env=os.environ | interpreted,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        return child.wait(max(0.0, limit_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [stage.name for stage in STAGES]
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-day"), help="folder of the rows")
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=f"stages ({', '.join(names)}), or words of their items, such as decode",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="when to stop for now")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", default="", help="what runs, where this is no work tree of git")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    if not chosen_stages(options):
        parser.error(
            f"--only {' '.join(options.only)} names no stage ({', '.join(names)}) and no item of one"
        )
    return options


def chosen_stages(options: argparse.Namespace) -> list[Stage]:
    """Every stage, or those that --only names, and of the others what has its other words in its name."""
    if not options.only:
        return list(STAGES)
    words = [word for word in options.only if word not in {stage.name for stage in STAGES}]
    found = [stage if stage.name in options.only else stage.only(words) for stage in STAGES]
    return [stage for stage in found if stage.items(options.device)]


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when a row of the stages that were asked for says failed."""
    options = parsed(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_day: no CUDA device, nothing measured (--device cpu makes a stand-in)")
        return 0
    rows = Rows(options.out, nvidia_clocks if options.device == "cuda" else dict, options.commit)
    chosen = chosen_stages(options)
    if options.stage:
        (own,) = (stage for stage in chosen if stage.name == options.stage)
        return own.run(rows, options.device)
    facts = environment(options)
    until = time.monotonic() + options.minutes * 60
    for stage in chosen:
        missing = stage.missing(rows, options.device)
        if not missing:
            print(f"{stage.name}: every row is there", flush=True)
        elif until - time.monotonic() < LEAST_S:
            print(f"{stage.name}: {len(missing)} items left for another call", flush=True)
        else:
            print(f"== {stage.name}: {stage.about}, {len(missing)} items", flush=True)
            run_stage(stage, rows, options, until)
            rows.write_tables(facts)
    rows.write_tables(facts)
    measured = [row for row in rows.read() if row["stage"] in {stage.name for stage in chosen}]
    counts = {
        status: sum(row["status"] == status for row in measured)
        for status in sorted({row["status"] for row in measured})
    }
    print(f"{', '.join(f'{n} {status}' for status, n in counts.items())}: {options.out / 'gpu-day.html'}")
    return int(counts.get("failed", 0) > 0)


if __name__ == "__main__":
    # Whoever ends this process ends the stage's, which has a session of its own.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
