"""Where the time goes from the start of `rayk run` until its first request is sent, and whose it is.

    python jobs/benchmarks/startup.py --record                     # under 5 minutes
    python jobs/benchmarks/startup.py --check                      # exit 1 beyond 10 s
    python jobs/benchmarks/startup.py --model checkpoints/smollm2  # a real model beside the tiny one

P/D at TP 1. The first run asks the reference anew, the others find its answers on disk. Stages are those of
`startup` in environment.json. Beside them: what importing costs a fresh process, and the floor, which is a
script without rayk that starts Ray and two actors that import torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import ROOT, Page, option, run
from rayk.experiments import startup

LIMIT_S = 10.0
RUN_S = 300  # for a run that hangs
TINY = "checkpoints/qwen3-tiny"
SPEC = """\
name: startup
model: {model}
checkpoints: {{{tiny}: qwen3}}
device: cpu
dtype: float32
prompts:
  random: {{count: 4, input_tokens: [16, 64, 300], seed: 0}}
sampling: {{max_tokens: 8, temperature: 0.0, ignore_eos: true}}
engine: {{num_blocks: 128, max_batch_tokens: 512, max_seqs: 8}}
prefill: {{tp: 1}}
decode: {{tp: 1}}
checks: [tokens, kv_bytes, kv_values]
"""
WHOSE = {
    startup.PLAN: "python, typer, pydantic, rayk",
    startup.IMPORTS: "pandas, rayk",
    startup.MACHINE: "rayk; with --fresh torch, too, to hold headers against the config",
    "starting Ray": "Ray, and its import",
    "starting workers": "rayk, Ray",
    "asking the reference": "transformers, torch; in a second run rayk, which reads what is kept",
    "waiting for the workers": "Ray, torch: processes of coordinator and ranks, and their imports",
    "workers are there": "rayk, Ray",
    "engines are formed": "rayk: weights, KV cache, NIXL agents",
    "engines are connected": "rayk, NIXL: handshakes",
    startup.SENT: "rayk",
}
"""Stage -> whose time it is."""
MODULES = (
    "typer",
    "pydantic",
    "pandas",
    "ray",
    "torch",
    "transformers",
    "rayk.cli.run",
    "rayk.actors.worker",
)
IMPORT = """\
import time
wall, cpu = time.perf_counter(), time.process_time()
import {module}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""
FLOOR = """\
import time
began = time.perf_counter()
import ray
imported = time.perf_counter()
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False,
         object_store_memory=160 << 20)
started = time.perf_counter()
class Rank:
    def __init__(self):
        import torch
    def here(self):
        return True
ranks = [ray.remote(Rank).options(num_cpus=1).remote() for _ in range(2)]
ray.get([rank.here.remote() for rank in ranks])
print(imported - began, started - imported, time.perf_counter() - started)
"""
FLOOR_STAGES = ("import ray", "ray.init", "two actors that import torch")
TITLE = "How soon the first request is sent"
ABOUT = """\
P/D at TP 1 on this machine, {rounds} runs of each spec after one with `--fresh`; medians, and the quickest.
Seconds of wall time from the start of the process; "driver CPU" is processor time of the process that the
user started. Limit: {limit:g} s until the first request of a second run is sent.
"""


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add the tables. Returns the models whose first request came too late."""
    page.say(ABOUT.format(rounds=options.rounds, limit=LIMIT_S))
    missed = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        for model in dict.fromkeys([TINY, *([options.model] if options.model else [])]):
            spec = Path(name) / "spec.yaml"
            spec.write_text(SPEC.format(model=model, tiny=TINY), encoding="utf-8")
            fresh, *again = [
                started(spec, Path(name) / f"{Path(model).name}-{i}", is_fresh=i == 0)
                for i in range(options.rounds + 1)
            ]
            middle = statistics.median(found["first_request_s"] for found in again)
            _stages(page, Path(model).name, fresh, again)
            if middle > LIMIT_S:
                missed.append(f"{model}: {middle:.1f} s until the first request, more than {LIMIT_S:g}")
    _floor(page, options.rounds)
    _imports(page, options.rounds)
    return missed


def main() -> int:
    return run(
        fill,
        __file__,
        title=TITLE,
        rounds=option(5, "runs of each spec that find the answers on disk"),
        model=option("", "also measure this checkpoint"),
    )


def started(spec: Path, out: Path, *, is_fresh: bool) -> dict[str, Any]:
    """Run the spec; returns `startup` of its environment.json. Raises CalledProcessError for a cell that
    fails."""
    command = [sys.executable, "-m", "rayk.cli.main", "run", str(spec), "--out", str(out)]
    _output([*command, *(["--fresh"] if is_fresh else [])])
    environment = json.loads((out / "environment.json").read_text(encoding="utf-8"))
    kept = environment["reference"]["answers_kept"]
    assert bool(kept) is not is_fresh, f"{kept} answers of the reference came from disk"
    found: dict[str, Any] = environment["startup"]
    return found


def _stages(page: Page, model: str, fresh: dict[str, Any], again: Sequence[dict[str, Any]]) -> None:
    """Add a row per stage: of the fresh run, and of those after it."""
    page.say(f"## {model}", "")
    page.head("stage", "--fresh, s", "again, s", "quickest, s", "driver CPU, s", "whose")
    for number, stage in enumerate(fresh["stages"]):
        of_all = [found["stages"][number] for found in again]
        walls, cpus = [s["wall_s"] for s in of_all], [s["cpu_s"] for s in of_all]
        cpu = "" if stage["cpu_s"] is None else f"{statistics.median(cpus):.2f}"
        times = f"{stage['wall_s']:.2f}", f"{statistics.median(walls):.2f}", f"{min(walls):.2f}"
        page.row(stage["stage"], *times, cpu, WHOSE.get(stage["stage"], ""))
    totals = [found["first_request_s"] for found in again]
    middle, least = statistics.median(totals), min(totals)
    page.row("**first request**", f"{fresh['first_request_s']:.2f}", f"{middle:.2f}", f"{least:.2f}", "", "")
    page.say("", "Processor time of each rank, s:", "")
    page.head("engine", "process and imports", "weights and KV cache", "NIXL")
    for engine in fresh["rank_cpu_s"]:
        parts = [found["rank_cpu_s"][engine][0] for found in again]
        page.row(
            engine, *(f"{statistics.median(p[n] for p in parts):.2f}" for n in ("start", "load", "transport"))
        )
    page.say("")


def _floor(page: Page, rounds: int) -> None:
    """Add what Ray and torch take without rayk."""
    found = _repeated(FLOOR, rounds)
    page.say("## The floor: Ray and torch without rayk", "")
    page.head("stage", "median, s", "quickest, s")
    for name, times in zip(FLOOR_STAGES, zip(*found, strict=True), strict=True):
        page.row(name, f"{statistics.median(times):.2f}", f"{min(times):.2f}")
    totals = [sum(times) for times in found]
    page.row("**all**", f"{statistics.median(totals):.2f}", f"{min(totals):.2f}")
    page.say("")


def _imports(page: Page, rounds: int) -> None:
    """Add what importing each module costs a process that has imported nothing."""
    page.say("## Imports", "")
    page.head("module", "median, s", "CPU, s")
    for module in MODULES:
        walls, cpus = zip(*_repeated(IMPORT.format(module=module), rounds), strict=True)
        page.row(f"`{module}`", f"{statistics.median(walls):.2f}", f"{statistics.median(cpus):.2f}")


def _repeated(script: str, rounds: int) -> list[list[float]]:
    """Run a script whose last line is of numbers; returns those of each run."""
    last = [_output([sys.executable, "-c", script]).splitlines()[-1] for _ in range(rounds)]
    return [[float(word) for word in line.split()] for line in last]


def _output(command: Sequence[str]) -> str:
    """Run a command in the repository. Returns its stdout. Raises CalledProcessError with its stderr told."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
