"""Aggregated against disaggregated serving on equal numbers of workers, under one seeded load.

    python jobs/serve_bench.py [--workers 4] [--rates 1,2,4] [--out DIR]
    ray job submit --working-dir . -- python jobs/serve_bench.py --out /absolute/path

Every way to split the workers is a setup: aggregated engines of each tensor-parallel size, and every ratio of
prefill to decode workers with every tensor-parallel size on either side. For each, a server is started
(`rayk serve`), warmed up, sent the same requests at each rate (`rayk bench`: same prompts, same lengths, same
arrivals), and stopped. What comes out is goodput by setup and rate, and what users get (tokens per second of
one stream) against what workers give (tokens per second of one worker), with the setups that no other one
beats in both.

Exit status 1 when a server did not start or stop in order, or a load's numbers are INVALID.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from jobs.benchmarks.harness import Page, option, run
from jobs.serve_goodput import ALL, figures, goodput_table, shown
from jobs.serving import serving
from rayk.bench import Load, parse_slo, run_bench
from rayk.cli.guard import run_guarded
from rayk.oracle.checkpoint import write_checkpoint
from rayk.reports.table_files import write_tables
from rayk.traces.drawn import parse_lengths
from rayk.types.errors import DeadlineExceeded, UserError

TINY = Path("checkpoints/qwen3-tiny")
WARMUP_REQUESTS = 8
"""Per worker, before what is measured: first connections between engines, first allocations."""
EDGE = 8
"""One of so many requests is cut off at the start, and one at the end."""
GOODPUT_NOTE = (
    "Requests per second that kept every objective, by the rate they were sent at. The same prompts came at "
    "the same times to every setup; workers are equal in number. A = aggregated, P = prefill, D = decode; "
    "NxTPk: N engines of k ranks."
)
PARETO_NOTE = (
    "On the right each point is a setup at a rate: along x the tokens per second that one stream gets after "
    "its first token (1 / mean TPOT), along y the tokens per second that one worker gives. The line joins "
    "the points that no other one beats in both. TTFT is not in it: the table has it."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How the workers are split. An aggregated one has its engines as `num_prefill` and no others."""

    num_prefill: int
    prefill_tp: int
    num_decode: int = 0
    decode_tp: int = 1

    @property
    def num_workers(self) -> int:
        return self.num_prefill * self.prefill_tp + self.num_decode * self.decode_tp

    @property
    def name(self) -> str:
        """E.g. `A 4xTP1`, `P 2xTP1 D 1xTP2`."""
        if not self.num_decode:
            return f"A {self.num_prefill}xTP{self.prefill_tp}"
        return f"P {self.num_prefill}xTP{self.prefill_tp} D {self.num_decode}xTP{self.decode_tp}"

    def options(self) -> list[str]:
        told = ["--num-prefill", str(self.num_prefill), "--prefill-tp", str(self.prefill_tp)]
        if not self.num_decode:
            return ["--mode", "aggregated", *told]
        decode = ["--num-decode", str(self.num_decode), "--decode-tp", str(self.decode_tp)]
        return ["--mode", "disaggregated", *told, *decode]


def all_setups(num_workers: int, tp_sizes: Sequence[int]) -> list[Setup]:
    """Every split of the workers into engines of these sizes, the engines of one role alike."""

    def sides(count: int) -> Iterator[tuple[int, int]]:
        return ((count // tp, tp) for tp in tp_sizes if count % tp == 0)

    found = [Setup(num_prefill=count, prefill_tp=tp) for count, tp in sides(num_workers)]
    for prefill in range(1, num_workers):
        found += [
            Setup(num_prefill=p, prefill_tp=p_tp, num_decode=d, decode_tp=d_tp)
            for p, p_tp in sides(prefill)
            for d, d_tp in sides(num_workers - prefill)
        ]
    return found


@contextmanager
def served(setup: Setup, options: argparse.Namespace, log: Path) -> Iterator[str]:
    """A setup's URL. Raises UserError where its server does not start or does not end in order."""
    told = ["--http", options.http, "--device", options.device, "--policy", options.policy]
    told += [*setup.options(), *(f"--set={text}" for text in options.overrides)]
    told += ["--address", options.address] if options.address else []
    with serving(options.model, told, log, options.start_s) as server:
        yield server.url
    if server.exit_status:
        problem = f"the server of {setup.name} ended with status {server.exit_status}"
        raise UserError(problem=problem, where=str(log))


def make_load(options: argparse.Namespace, url: str) -> Load:
    return Load(
        url=url,
        process=options.arrival,
        burstiness=options.burstiness,
        num_requests=options.requests,
        input_tokens=parse_lengths(options.input_tokens, where="--input-tokens"),
        output_tokens=parse_lengths(options.output_tokens, where="--output-tokens"),
        slo=parse_slo(options.slo),
        seed=options.seed,
        timeout_s=options.timeout,
        # The same requests are measured on every setup, in the same window of the schedule.
        warmup=options.requests // EDGE,
        cooldown=options.requests // EDGE,
        # Goodput under overload is what is asked for: who is turned away is not good, that is all.
        failed_share=1.0,
    )


def measure(
    setup: Setup, options: argparse.Namespace, environment: Mapping[str, Any]
) -> list[dict[str, Any]]:
    folder = options.out / setup.name.replace(" ", "-")
    folder.mkdir(parents=True)
    with served(setup, options, folder / "server.log") as url:
        load = make_load(options, url)
        warm = replace(
            load,
            concurrency=2 * setup.num_workers,
            num_requests=WARMUP_REQUESTS * setup.num_workers,
            seed=options.seed + 1,
        )
        run_bench([warm], folder / "warmup", environment=environment)
        loads = [replace(load, rate=rate) for rate in options.rates]
        cells = run_bench(loads, folder / "bench", environment=environment)
    return [row_of(setup, cell) for cell in cells]


def row_of(setup: Setup, cell: Mapping[str, Any]) -> dict[str, Any]:
    """What the report needs of a load on a setup."""
    tpot_ms = cell["tpot_ms_mean"]
    tokens_per_s = cell.get("output_tokens_per_s")
    return {
        "setup": setup.name,
        "mode": "disaggregated" if setup.num_decode else "aggregated",
        "num_workers": setup.num_workers,
        "num_prefill": setup.num_prefill,
        "prefill_tp": setup.prefill_tp,
        "num_decode": setup.num_decode,
        "decode_tp": setup.decode_tp if setup.num_decode else None,
        **{name: value for name, value in cell.items() if name not in ("cell_id", "url", "concurrency")},
        "user_tokens_per_s": 1000 / tpot_ms if tpot_ms else None,
        "worker_tokens_per_s": None if tokens_per_s is None else tokens_per_s / setup.num_workers,
    }


def fill(options: argparse.Namespace, page: Page) -> None:
    """Measure every setup that is asked for, and add its rows; what failed is wrong."""
    setups = chosen(options)
    if options.model == TINY:
        write_checkpoint("qwen3", TINY)
    page.environment["seeds"] = {"load": options.seed}
    rows: list[dict[str, Any]] = []
    for number, setup in enumerate(setups, start=1):
        print(f"{number}/{len(setups)} {setup.name}", file=sys.stderr, flush=True)
        try:
            rows += measure(setup, options, page.environment)
        except (UserError, DeadlineExceeded) as error:
            page.wrong.append(f"{setup.name}: {error}")
            print(page.wrong[-1], file=sys.stderr, flush=True)
        if rows:
            # After each setup: an interrupted comparison is still one.
            write_tables({"setups": rows}, options.out)
    if not rows:
        raise UserError(problem="no server started", where=str(options.out), mend="its server.log says why")
    page.tables = {"setups": rows}
    page.say(about(options), "", "## Goodput, requests per second", "")
    columns, goodput = goodput_table(rows)
    note = f"{about(options)} {GOODPUT_NOTE} {PARETO_NOTE}"
    page.section(
        "Goodput, and what users get for what workers give", columns, goodput, note=note, plots=figures(rows)
    )
    page.say(GOODPUT_NOTE, "", "## All numbers", "")
    page.section("All numbers", ALL, shown(rows))
    page.say(*(f"- failed: {text}" for text in page.wrong))
    for row in rows:
        where = f"{row['setup']} at {row['rate']:g}/s: {row['verdict']}"
        page.say(*([f"- {where}: {row['reason']}"] if row["reason"] else []))
        page.wrong += [where] if row["verdict"] == "INVALID" else []


def about(options: argparse.Namespace) -> str:
    return (
        f"{Path(options.model).name} on {options.workers} workers: {options.requests} requests per rate, "
        f"{options.arrival} arrivals, prompts of {options.input_tokens} tokens, answers of "
        f"{options.output_tokens}, seed {options.seed}. Good is what keeps {options.slo}."
    )


def chosen(options: argparse.Namespace) -> list[Setup]:
    """The setups that --only names, or all. Raises UserError for one that is none."""
    if options.workers < 1 or any(tp < 1 for tp in options.tp):
        raise UserError("--workers and --tp are at least 1")
    setups = all_setups(options.workers, options.tp)
    names = [setup.name for setup in setups]
    unknown = [name for name in options.only if name not in names]
    if unknown:
        raise UserError(f"--only {unknown[0]!r}: the setups are {', '.join(names)}")
    return [setup for setup in setups if not options.only or setup.name in options.only]


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        fill,
        __file__,
        title="Aggregated and disaggregated serving",
        argv=argv,
        keeps=True,
        model=option(TINY, "checkpoint", type=Path),
        workers=option(4, "of every setup"),
        tp=option([1, 2], "tensor-parallel sizes, with commas", type=_ints),
        rates=option([1.0, 2.0, 4.0], "requests per second, with commas", type=_floats),
        requests=option(100, "per rate"),
        arrival=option("poisson", "process", choices=["poisson", "gamma", "constant"]),
        burstiness=option(1.0, "of gamma arrivals"),
        input_tokens=option("32-256", "128, or 5,37 in turn, or 64-256 uniform"),
        output_tokens=option("16-48", "likewise"),
        slo=option("ttft=500ms,tpot=60ms", "what a good answer keeps"),
        seed=option(0, "of prompts, lengths and arrivals"),
        timeout=option(120.0, "seconds of a request"),
        only=option([], "names of setups, such as 'A 4xTP1'; repeatable", type=str, action="append"),
        http=option("uvicorn", "front", choices=["uvicorn", "serve"]),
        policy=option("round_robin", "of the server"),
        set=option([], "an engine's setting; repeatable", type=str, action="append", dest="overrides"),
        device=option("auto", "of the engines", choices=["auto", "cpu", "cuda"]),
        address=option(None, "Ray cluster; else each server has a local one", type=str),
        start_s=option(300.0, "seconds a server may take to start"),
    )


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(run_guarded(main))
