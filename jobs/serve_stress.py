"""A server under many streaming clients, each answer compared with transformers' tokens; also while its ranks
are killed.

    python jobs/serve_stress.py [--clients 64] [--requests 1000] [--out DIR]
    python jobs/serve_stress.py --kill --minutes 5

Per family of models a server is started (`rayk serve`, on a local Ray cluster of this job), one after the
other. Clients in a closed load stream answers to prompts of a few up to some hundred tokens; some leave half
way. What transformers answers to each prompt is computed once, before. In the end no request may be lost, no
token wrong, and every KV block must be free.

With --kill, a rank of each engine is killed under that load and the restart timed, until the engine takes
requests and as many spares wait as before; then any rank of any engine is killed every three restart times
for some minutes. No token may be wrong, no request may hang, at
least 80 % must be answered, and tokens per second must be back at half of what they were within 20 s of each
kill.

With --structured every answer is JSON of one of a few schemas: its tokens are those of the same engine,
aggregated, and whole answers fit their schema in the eyes of `jsonschema`.

Exit status 1 when any of this does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from jobs.benchmarks.harness import Page, option, run
from jobs.serving import serving
from jobs.stress_chaos import BACK_S, WINDOW_S, Killer, until_told, until_true
from jobs.stress_forms import aggregated, fields_of, judge_form
from jobs.stress_load import Clients, Met, draw_cases, draw_prompts, judge
from jobs.stress_tables import (
    FAMILIES,
    FIRE,
    KILLS,
    NOTE,
    Run,
    Tables,
    failures,
    family_row,
    kill_rows,
    request_rows,
)
from rayk.cli.guard import run_guarded
from rayk.oracle.checkpoint import write_checkpoint
from rayk.reports.table_files import write_tables
from rayk.types.errors import RaykError, UserError

CHECKPOINTS = Path("checkpoints/stress")
REFERENCES = Path("checkpoints/reference-cache")
GRACE_S = 20.0
"""A client waits so much longer than the server says that a request may last; then it hangs."""
QUIET_S = 90.0
"""After the last answer, within which every block must be free."""
STEADY_S = 30.0
"""Load before the first kill, the first WINDOW_S of it not counted."""
MAX_SHOWN = 8
"""Notes on requests that did not go well, of each kind."""
Judge = Callable[[Met], tuple[str, str]]
_ID = re.compile(r"cmpl-[0-9a-f]+(-\d+)?")


def server_options(options: argparse.Namespace, address: str) -> list[str]:
    return [
        *("--address", address, "--http", options.http, "--device", options.device),
        *("--dtype", "float32", "--failure-policy", "migrate"),
        *("--num-prefill", str(options.num_prefill), "--prefill-tp", str(options.prefill_tp)),
        *("--num-decode", str(options.num_decode), "--decode-tp", str(options.decode_tp)),
        *("--request-timeout", str(options.request_s), "--spares", str(options.spares)),
        *(f"--set={text}" for text in options.overrides),
    ]


async def only_fleet() -> Any:
    """The actor that owns the server's engines. Raises UserError where there is not one."""
    from rayk.actors.fleets import find_fleet, fleet_names

    names = fleet_names()
    if len(names) != 1:
        raise UserError(f"{len(names)} servers on the cluster", mend="one of this job's alone")
    return await asyncio.to_thread(find_fleet, names[0])


async def stress(url: str, prompts: Sequence[Sequence[int]], options: argparse.Namespace, run: Run) -> None:
    """One server under load, to its end; what is seen goes to `run`."""
    fleet = await only_fleet()
    more = (fields_of,) if options.structured else ()
    clients = Clients(url, run.family, prompts, options.request_s + GRACE_S, *more)
    cases = draw_cases(len(prompts), options.max_tokens, options.leave / 100, options.seed)
    run.began_ns = time.monotonic_ns()
    if options.kill:
        await under_fire(clients, Killer(fleet, options.seed), cases, run, options)
    else:
        await clients.run(options.clients, itertools.islice(cases, options.requests))
    run.ended_ns = time.monotonic_ns()
    run.met = clients.met
    await look_at_the_end(fleet, run)


async def under_fire(
    clients: Clients, killer: Killer, cases: Any, run: Run, options: argparse.Namespace
) -> None:
    """Load that goes on while ranks are killed, and long enough behind the last kill to see it recover."""
    over = asyncio.Event()
    load = asyncio.create_task(clients.run(options.clients, cases, over))
    try:
        await asyncio.sleep(STEADY_S)
        run.kills = killer.kills
        run.restart_s = await killer.measure(options.spares)
        run.measured_kills = len(killer.kills)
        print(f"restarts take {run.restart_s:.1f} s", file=sys.stderr, flush=True)
        await killer.go_on(3 * run.restart_s, 60 * options.minutes)
        since_s = (time.monotonic_ns() - killer.kills[-1].at_ns) / 1e9
        await asyncio.sleep(max(0.0, BACK_S + WINDOW_S - since_s))
    except RaykError as error:
        # What was seen until then is worth telling; the run fails for this.
        run.trouble = f"{type(error).__name__}: {error}"
    finally:
        over.set()
        await load


async def look_at_the_end(fleet: Any, run: Run) -> None:
    """Wait until nothing runs and all blocks are free, as they must soon be, and note what is so."""

    async def is_quiet() -> bool:
        run.requests_left = await until_told(lambda: fleet.num_requests.remote(), "its requests")
        run.blocks = await until_told(lambda: fleet.blocks.remote(), "its blocks")
        health = await until_told(lambda: fleet.health.remote(), "its health")
        # The null block of each engine is never free.
        is_free = all(free == total - 1 for free, total in run.blocks.values())
        return bool(health.is_ready) and not any(run.requests_left) and is_free

    await until_true(is_quiet, QUIET_S)


def prepare(family: str, options: argparse.Namespace) -> tuple[list[list[int]], Judge]:
    """Prompts, and who judges answers to them: by what transformers says, or for --structured by what the
    same engine says aggregated."""
    import torch

    from rayk.actors.tokenizer import load_decoder
    from rayk.experiments.references import References
    from rayk.oracle.cache import AnswerStore
    from rayk.types.request import SamplingParams

    torch.set_num_threads(1)  # of tiny matrices more threads make no quicker work
    folder = write_checkpoint(family, CHECKPOINTS / family)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = draw_prompts(options.prompts, (4, options.longest), vocab_size, options.seed)
    if options.structured:
        said, decode = aggregated(folder, prompts, options.max_tokens), load_decoder(str(folder))
        return prompts, lambda met: judge_form(met, said[met.case.prompt_index], decode)
    references = References(str(folder), AnswerStore(REFERENCES))
    sampling = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    outputs = references.outputs(prompts, sampling)

    def judge_tokens(met: Met) -> tuple[str, str]:
        index = met.case.prompt_index
        return judge(met, prompts[index], outputs[index].token_ids, references)

    return prompts, judge_tokens


def add_family(family: str, options: argparse.Namespace, address: str, tables: Tables) -> None:
    """Serve one family, and add its rows to the tables."""
    whom = "an aggregated engine" if options.structured else "transformers"
    print(f"{family}: asking {whom}", file=sys.stderr, flush=True)
    prompts, judge_one = prepare(family, options)
    print(f"{family}: serving", file=sys.stderr, flush=True)
    run, log = Run(family=family), options.out / f"{family}.log"
    with serving(CHECKPOINTS / family, server_options(options, address), log, options.start_s) as server:
        asyncio.run(stress(server.url, prompts, options, run))
    run.exit_status = server.exit_status
    verdicts = [judge_one(met) for met in run.met]
    tables["families"].append(family_row(run, verdicts))
    tables["kills"] += kill_rows(run)
    tables["requests"] += request_rows(run, verdicts)


def show(page: Page, tables: Tables) -> None:
    """Add what came of each family, and of each kill."""
    page.section("Families", FAMILIES, tables["families"])
    if tables["kills"]:
        page.say("## Ranks killed", "", NOTE, "")
        page.section("Under fire", FIRE, tables["families"], note=NOTE)
        page.section("Ranks killed", KILLS, tables["kills"])
    # Requests are told apart by ids, which nobody wants to read.
    notes = Counter(
        f"{row['family']}: {_ID.sub('...', note)}" for row in tables["families"] for note in row["notes"]
    )
    page.say(*(f"- {count} x {note}" for note, count in notes.most_common(MAX_SHOWN)))


def fill(options: argparse.Namespace, page: Page) -> None:
    """Serve each family; add its rows, and what must not be."""
    from rayk.actors import launch

    settle(options)
    page.environment["seeds"] = {"prompts, load and kills": options.seed}
    if options.structured:
        page.name = "serve_structured"
    tables: Tables = {"families": [], "kills": [], "requests": []}
    with launch.connect(options.address) as joined:
        for family in options.families:
            add_family(family, options, joined.address, tables)
            # After each family: what is interrupted later has been seen still.
            write_tables(tables, options.out)
    page.tables = tables
    page.say(about(options), "")
    show(page, tables)
    page.wrong += failures(tables, options.requests if not options.kill else None)


def about(options: argparse.Namespace) -> str:
    prefill = (
        f"{options.num_prefill} prefill engine{'s' * (options.num_prefill > 1)} of TP {options.prefill_tp}"
    )
    decode = f"{options.num_decode} decode engine{'s' * (options.num_decode > 1)} of TP {options.decode_tp}"
    answers = "JSON answers" if options.structured else "answers"
    spares = f" and {options.spares} spare{'s' * (options.spares > 1)}" if options.spares else ""
    return (
        f"{options.clients} streaming clients in a closed load; {options.prompts} prompts of 4 to "
        f"{options.longest} tokens, {answers} of {options.max_tokens // 2} to "
        f"{options.max_tokens}; "
        f"{options.leave:g} % of clients leave half way; {prefill}, {decode}{spares}; float32, HTTP by "
        f"{options.http}; requests may last {options.request_s:g} s; seed {options.seed}."
    )


def settle(options: argparse.Namespace) -> None:
    """Share the requests out, and fill in the spares. Raises UserError for what cannot be sent."""
    if options.prompts < 2 or options.max_tokens < 8 or options.longest < 4:
        raise UserError("--prompts is at least 2, --max-tokens 8 and --longest 4")
    if options.requests % len(options.families):
        raise UserError(
            f"--requests {options.requests} are not to be split over {len(options.families)} families"
        )
    options.requests //= len(options.families)
    options.spares = 2 * options.kill if options.spares is None else options.spares


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        fill,
        __file__,
        title="A server under streaming clients",
        argv=argv,
        keeps=True,
        families=option(["qwen3", "falcon_h1"], "of models, one server each", type=str, nargs="+"),
        clients=option(64, "at once"),
        requests=option(1000, "over all families; without --kill"),
        prompts=option(60, "distinct ones, at least 2"),
        longest=option(400, "tokens of the longest prompt"),
        max_tokens=option(48, "of the longest answer, at least 8"),
        leave=option(5.0, "percent of clients that leave half way"),
        structured={"action": "store_true", "help": "ask for JSON of a schema"},
        kill={"action": "store_true", "help": "kill ranks meanwhile"},
        minutes=option(5.0, "of killing"),
        num_prefill=option(1, "engines"),
        prefill_tp=option(1, "of each"),
        num_decode=option(1, "engines"),
        decode_tp=option(2, "of each"),
        spares=option(None, "idle workers; 2 with --kill", type=int),
        request_s=option(120.0, "what a request may last"),
        set=option([], "an engine's setting; repeatable", type=str, action="append", dest="overrides"),
        http=option("uvicorn", "front", choices=["uvicorn", "serve"]),
        device=option("cpu", "of the engines", choices=["auto", "cpu", "cuda"]),
        seed=option(0, "of prompts, load and kills"),
        start_s=option(300.0, "seconds a server may take to start"),
        address=option(
            None, "Ray cluster with no server; its workers must be this machine's, else a local one", type=str
        ),
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
