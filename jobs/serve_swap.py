"""A server whose engines swap all the time, under many streaming clients: each answer compared with
transformers' tokens; also while its host tier is killed.

    python jobs/serve_swap.py [--clients 64] [--requests 400] [--kills 2] [--out DIR] [--record]

Aggregated engines, one of each TP size, share a host tier (`rayk serve`, on a local Ray cluster of this job).
Their pools hold the blocks of few requests and their batches have rows for many, so requests are preempted
and swapped out and in without end. First the load runs in peace, then once more while the tier's process is
killed again and again. No token may be wrong, no request lost, requests must have been swapped, every kill
must have been seen by every engine, and in the end every block must be free.

Exit status 1 when any of this does not hold, and 2, before anything starts, where no server could do it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from jobs.benchmarks.harness import Page, option, run
from jobs.serve_stress import CHECKPOINTS, GRACE_S, look_at_the_end, only_fleet, prepare
from jobs.serving import serving
from jobs.stress_chaos import until_told, until_true
from jobs.stress_load import Clients, draw_cases, judge, percentile
from jobs.stress_tables import Run
from rayk.cli.guard import run_guarded
from rayk.oracle.checkpoint import write_checkpoint
from rayk.reports.page import Column
from rayk.specs.server_plan import ServerOptions, parse_tp_sizes, plan_server
from rayk.types.errors import DeadlineExceeded, UserError

REOPEN_S = 120.0
"""How long another tier may take to be there, with every engine."""
COUNTERS = ("swaps", "swaps_failed", "swapped_out_bytes", "swapped_in_bytes", "loads", "tier_losses")
SWAPS = (
    Column(title="load", key="load"),
    Column(title="kills of the tier", key="num_kills", spec=",d"),
    Column(title="requests", key="num_requests", spec=",d"),
    Column(title="right", key="num_right", spec=",d"),
    Column(title="near ties", key="num_near_tie", spec=",d"),
    Column(title="error", key="num_failed", spec=",d"),
    Column(title="wrong", key="num_wrong", spec=",d"),
    Column(title="hung", key="num_hung", spec=",d"),
    Column(title="swapped out", key="swaps", spec=",d"),
    Column(title="swaps failed", key="swaps_failed", spec=",d"),
    Column(title="MB out", key="out_mb", spec=",.1f"),
    Column(title="MB in", key="in_mb", spec=",.1f"),
    Column(title="prompts loaded", key="loads", spec=",d"),
    Column(title="tokens/s", key="tokens_per_s", spec=",.0f"),
    Column(title="TTFT p50, s", key="ttft_s_p50", spec=".2f"),
    Column(title="E2E p99, s", key="e2e_s_p99", spec=".2f"),
    Column(title="blocks held at the end", key="num_blocks_held", spec=",d"),
)


def server_options(options: argparse.Namespace, address: str) -> list[str]:
    return [
        *("--address", address, "--http", "uvicorn", "--device", options.device),
        *("--mode", "aggregated", "--prefill-tp", options.tp, "--dtype", "float32"),
        *("--request-timeout", str(options.request_s)),
        *(f"--set={text}" for text in settings(options)),
    ]


def settings(options: argparse.Namespace) -> list[str]:
    return [
        f"engine.num_blocks={options.num_blocks}",
        f"engine.max_seqs={options.max_seqs}",
        f"offload.host_gib={options.host_gib}",
        *("offload.swap=always", "offload.load=always"),
        *options.overrides,
    ]


def check(options: argparse.Namespace) -> None:
    """Write the model, and refuse numbers that mean nothing, and a server that cannot be or that some request
    is too long for. Raises UserError."""
    for name in ("clients", "requests", "num_blocks", "max_seqs", "host_gib", "request_s", "start_s"):
        if not getattr(options, name) > 0:
            number = f"--{name.replace('_', '-')} {getattr(options, name)}"
            raise UserError(f"{number}: a number above 0 is needed")
    if not 0 <= options.kills < options.requests:
        raise UserError(f"--kills {options.kills}: 0 or more, and fewer than --requests {options.requests}")
    if options.prompts < 2 or options.max_tokens < 8 or options.longest < 4:
        raise UserError("--prompts is at least 2, --max-tokens 8 and --longest 4")
    write_checkpoint(options.family, CHECKPOINTS / options.family)
    asked = ServerOptions(
        model=str(CHECKPOINTS / options.family),
        mode="aggregated",
        prefill_tp=parse_tp_sizes(options.tp, "--tp"),
        dtype="float32",
        device=options.device,
        request_s=options.request_s,
        overrides=tuple(settings(options)),
    )
    model = plan_server(asked, is_local=options.address is None).settings.model
    longest = options.longest + options.max_tokens
    most = model.max_positions if model.pool_tokens is None else model.pool_tokens
    if longest > most:
        raise UserError(
            f"a prompt of {options.longest} tokens and its answer of {options.max_tokens} are {longest}; "
            f"a request has at most {most} here",
            where=f"--num-blocks {options.num_blocks}",
            mend="more --num-blocks, or less --longest and --max-tokens",
        )


async def counters(fleet: Any) -> dict[str, Counter[str]]:
    """What each engine counted of its offloading."""
    engines = await until_told(lambda: fleet.engines.remote(), "how engines are")
    return {e.name: Counter({n: int((e.offload or {}).get(n, 0)) for n in COUNTERS}) for e in engines}


async def kill_tier(fleet: Any, num_before: int) -> None:
    """And wait until every engine has seen that, and has another. Raises DeadlineExceeded."""

    async def pids() -> set[int]:
        told = await until_told(lambda: fleet.tiers.remote(), "the host tier")
        return {tier["pid"] for tier in told.values()}

    old = await pids()
    for pid in old:
        os.kill(pid, signal.SIGKILL)

    async def is_replaced() -> bool:
        now, seen = await pids(), await counters(fleet)
        engines = await until_told(lambda: fleet.engines.remote(), "how engines are")
        # One that has no tier yet would not see the next kill.
        have_one = all((e.offload or {}).get("why_off") == "" for e in engines)
        has_seen = all(c["tier_losses"] > num_before for c in seen.values())
        return bool(now) and not now & old and have_one and has_seen

    if not await until_true(is_replaced, REOPEN_S):
        seen = {name: dict(counts) for name, counts in (await counters(fleet)).items()}
        raise DeadlineExceeded("another host tier", REOPEN_S, {"before": old, "now": await pids()} | seen)


async def go(
    load: str, clients: Clients, cases: Any, fleet: Any, num_kills: int, options: argparse.Namespace
) -> tuple[Run, dict[str, Any]]:
    """One load, to its end, and what engines counted meanwhile."""
    run = Run(family=options.family, began_ns=time.monotonic_ns())
    before, first = await counters(fleet), len(clients.met)
    running = asyncio.create_task(
        clients.run(options.clients, itertools.islice(cases, options.requests)), name=load
    )
    done = 0
    try:
        for number in range(num_kills):
            wanted = first + options.requests * (number + 1) // (num_kills + 1)
            while len(clients.met) < wanted and not running.done():
                await asyncio.sleep(0.05)
            await kill_tier(fleet, number + min(c["tier_losses"] for c in before.values()))
            done += 1
    finally:
        await running
    run.ended_ns, run.met = time.monotonic_ns(), clients.met[first:]
    after = await counters(fleet)
    await look_at_the_end(fleet, run)
    told = {n: sum(after[e][n] - before[e][n] for e in after) for n in COUNTERS}
    return run, {"load": load, "num_kills": done, **told}


async def ask_all(
    url: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> list[tuple[Run, dict[str, Any]]]:
    fleet = await only_fleet()
    clients = Clients(url, options.family, prompts, options.request_s + GRACE_S)
    cases = draw_cases(len(prompts), options.max_tokens, 0.0, options.seed)
    found = [await go("in peace", clients, cases, fleet, 0, options)]
    if options.kills:
        found.append(await go("tier killed", clients, cases, fleet, options.kills, options))
    return found


def row_of(run: Run, told: Mapping[str, Any], verdicts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    counts = Counter(verdict for verdict, _ in verdicts)
    answered = [m.observed for m, (v, _) in zip(run.met, verdicts, strict=True) if v in ("right", "near_tie")]
    seconds = (run.ended_ns - run.began_ns) / 1e9
    return {
        **told,
        "num_requests": len(verdicts),
        **{f"num_{v}": counts[v] for v in ("right", "near_tie", "failed", "wrong", "hung")},
        "out_mb": told["swapped_out_bytes"] / 1e6,
        "in_mb": told["swapped_in_bytes"] / 1e6,
        "tokens_per_s": sum(len(m.observed.output_token_ids) for m in run.met) / seconds,
        "ttft_s_p50": percentile([(o.chunk_ns[0] - o.sent_ns) / 1e9 for o in answered], 50),
        "e2e_s_p99": percentile([(o.ended_ns - o.sent_ns) / 1e9 for o in answered], 99),
        "num_blocks_held": sum(total - 1 - free for free, total in run.blocks.values()),
        "num_engines": len(run.blocks),
    }


def failures(rows: Sequence[Mapping[str, Any]], num_requests: int, num_kills: int) -> list[str]:
    found = []
    for row in rows:
        name = row["load"]
        for what in ("failed", "wrong", "hung"):
            if row[f"num_{what}"]:
                found.append(f"{name}: {row[f'num_{what}']} requests {what}")
        if row["num_requests"] != num_requests:
            found.append(f"{name}: {row['num_requests']} of {num_requests} requests ended")
        if not row["swaps"] or not row["swapped_in_bytes"]:
            found.append(f"{name}: nobody was swapped out and in")
        if row["num_blocks_held"] or not row["num_engines"]:
            found.append(f"{name}: {row['num_blocks_held']} blocks are held at the end")
        wanted = num_kills if name == "tier killed" else 0
        if row["num_kills"] != wanted or row["tier_losses"] != wanted * row["num_engines"]:
            found.append(f"{name}: engines lost their tier {row['tier_losses']} times in {wanted} kills")
    return found


def fill(options: argparse.Namespace, page: Page) -> None:
    """Run the loads; add a row for each, and what must not be. Raises UserError before anything starts."""
    from rayk.actors import launch

    check(options)
    prompts, expected, references = prepare(options.family, options)
    model, log = CHECKPOINTS / options.family, options.out / "server.log"
    with (
        launch.connect(options.address) as joined,
        serving(model, server_options(options, joined.address), log, options.start_s) as server,
    ):
        found = asyncio.run(ask_all(server.url, prompts, options))
    rows, requests = [], []
    for seen, told in found:
        cases = [(m, m.case.prompt_index) for m in seen.met]
        verdicts = [judge(m, prompts[i], expected[i], references) for m, i in cases]
        rows.append(row_of(seen, told, verdicts))
        requests += [
            {"load": told["load"], "prompt_index": i, "verdict": verdict, "why": why}
            for (_, i), (verdict, why) in zip(cases, verdicts, strict=True)
        ]
    page.environment["seeds"] = {"prompts and load": options.seed}
    page.tables = {"swaps": rows, "requests": requests}
    page.say(about(options), "")
    page.section("Loads", SWAPS, rows)
    page.wrong += failures(rows, options.requests, options.kills)


def about(options: argparse.Namespace) -> str:
    return (
        f"{options.clients} streaming clients in a closed load; {options.prompts} prompts of 4 to "
        f"{options.longest} tokens, answers of {options.max_tokens // 2} to {options.max_tokens}; aggregated "
        f"engines of TP {options.tp} with {options.num_blocks} blocks of 16 tokens and {options.max_seqs} "
        f"rows each; one host tier of {options.host_gib:g} GiB; float32; seed {options.seed}. "
        "Swaps that failed were computed again."
    )


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        fill,
        __file__,
        title="A server that swaps all the time",
        argv=argv,
        keeps=True,
        family=option("qwen3", "of the model"),
        clients=option(64, "at once"),
        requests=option(400, "of each load"),
        kills=option(2, "of the host tier in the second load; 0: there is none"),
        prompts=option(40, "distinct ones, at least 2"),
        longest=option(160, "tokens of the longest prompt"),
        max_tokens=option(64, "of the longest answer, at least 8"),
        tp=option("1,2", "of the engines, one of each size"),
        num_blocks=option(24, "of each engine"),
        max_seqs=option(16, "rows of each engine"),
        host_gib=option(0.1, "of the host tier"),
        request_s=option(180.0, "what a request may last"),
        set=option([], "an engine's setting; repeatable", type=str, action="append", dest="overrides"),
        device=option("cpu", "of the engines", choices=["auto", "cpu", "cuda"]),
        seed=option(0, "of prompts and load"),
        start_s=option(300.0, "seconds the server may take to start"),
        address=option(
            None, "Ray cluster with no server; its workers must be this machine's, else a local one", type=str
        ),
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
