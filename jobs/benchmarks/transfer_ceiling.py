"""Rates of transfers beside bare NIXL, memcpy and Ray's own transport.

    python jobs/benchmarks/transfer_ceiling.py --check --record

The cells under `ceiling` of jobs/transfer_sweep.yaml, larger than those of the sweep: rayk and bare NIXL with
the very same descriptors take turns in one process, with a dense copy of as many bytes before each. Rates are
medians by the wall's clock. `of bare NIXL` is the median of the rounds' ratios of CPU time, with its 95 %
interval: posting copies and waiting spins here, so that CPU time is the wall's without what other processes
take. CPU time per GB of both sides stands in a table of its own, and what rayk adds to a pull, stage by
stage, in another. The transport is what UCX says it chose for runs of that size, beside what the loopback
network carried. Every byte is checked after the last round.

--check: the median of every pull in which nothing is staged is at least 95 % of bare NIXL, and the CPU time
of reading and of proving is under its targets. A pull whose interval has the 95 % in it is measured again,
with MORE_ROUNDS times the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import statistics
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, above_zero, option, run
from jobs.sweep_actors import CALL_S, Hosts
from jobs.sweep_cells import SPEC, SweepCell, load_sweep, some_of
from rayk.actors.launch import connect
from rayk.cli.guard import run_guarded
from rayk.reports.page import Column
from rayk.transfer.nixl_agent import nixl_api

MIN_OF_RAW = 0.95
"""Of bare NIXL's rate, under --check."""
MORE_ROUNDS = 8
"""For a pull of which the first rounds do not say on which side of MIN_OF_RAW it is."""
MAX_READ_CPU = 1.1
"""CPU time of a read, of bare NIXL's."""
MAX_PROVEN_CPU = 1.0
"""CPU time of a pull to its verdict, of bare NIXL's and one copy's: a proof may cost what a copy does."""
MAX_OFFER_CPU = 1.0
"""CPU time of the producer for a pull, of that of one copy."""


RDT_NOTES = {
    "dense": "one tensor",
    "blocks": "a tensor per block",
}


COLUMNS = (
    Column(title="what", key="what"),
    Column(title="mode", key="mode"),
    Column(title="TP", key="tp"),
    Column(title="layouts", key="layouts"),
    Column(title="blocks", key="block_sizes"),
    Column(title="tables", key="tables"),
    Column(title="run, bytes", key="run_bytes", spec=",d"),
    Column(title="bytes", key="num_bytes", spec=",d"),
    Column(title="descriptors", key="num_descriptors", spec=",d"),
    Column(title="merged", key="num_merged", spec=",d"),
    Column(title="GB/s", key="gb_per_s", spec=".2f"),
    Column(title="bare NIXL, GB/s", key="raw_gb_per_s", spec=".2f"),
    Column(title="memcpy, GB/s", key="memcpy_gb_per_s", spec=".2f"),
    Column(title="of bare NIXL", key="of_raw", spec=".1%"),
    Column(title="interval", key="of_raw_interval"),
    Column(title="rounds", key="rounds"),
    Column(title="by the wall", key="of_raw_wall", spec=".1%"),
    Column(title="post, ms", key="post_ms", spec=".2f"),
    Column(title="wait, ms", key="wait_ms", spec=".2f"),
    Column(title="staging", key="staging"),
    Column(title="staged", key="staged"),
    Column(title="transport", key="transport"),
    Column(title="loopback, % of bytes", key="loopback_percent", spec=".1f"),
    Column(title="note", key="note"),
)
SIDES = COLUMNS[2:6]
CPU_COLUMNS = (
    *SIDES,
    Column(title="bare NIXL, ms/GB", key="bare_cpu", spec=".1f"),
    Column(title="read, ms/GB", key="read_cpu", spec=".1f"),
    Column(title="of bare NIXL", key="read_of_bare", spec=".3f"),
    Column(title="to the verdict, ms/GB", key="proven_cpu", spec=".1f"),
    Column(title="one copy, ms/GB", key="copy_cpu", spec=".1f"),
    Column(title="of bare NIXL and a copy", key="proven_of_both", spec=".3f"),
    Column(title="producer, ms/GB", key="offer_cpu", spec=".1f"),
    Column(title="of a copy", key="offer_of_copy", spec=".3f"),
)
STAGES = {
    "bare_nixl": "bare: NIXL",
    "bare_rest": "bare: rest",
    "nixl": "NIXL",
    "plan": "plan",
    "choice": "choice",
    "indices": "indices",
    "lists": "lists",
    "rest": "session",
    "added": "added",
    "ticket": "ticket",
    "fence": "generations",
    "digests": "digests",
    "compare": "compare",
    "report": "release",
}
STAGE_COLUMNS = (
    *SIDES,
    *(Column(title=title, key=key, spec=",.0f") for key, title in STAGES.items()),
    Column(title="added, of bare", key="added_share", spec=".1%"),
)
NOTE = """\
On one CPU host posting a transfer blocks until it is done. A pull's time counts lowering the plan and
choosing descriptors; `wait` is what is not posting. Pushes have no bare NIXL beside them: they are written by
descriptors made beforehand. Ray's RDT moves whole tensors by pulls only: a reader cannot pick some blocks of
a tensor, nor slices, nor lay them out anew; it knows no leases.
"""
CPU_NOTE = f"""\
CPU time of the consumer's process per GB (10^9 bytes), medians of the rounds, and of the producer's: digests,
lease, ticket and release; bare NIXL costs a producer nothing. Targets: reading {MAX_READ_CPU:g} of bare NIXL;
to the verdict, with generations and digests, {MAX_PROVEN_CPU:g} of bare NIXL and one copy of the bytes; the
producer {MAX_OFFER_CPU:g} of one copy.
"""
STAGE_NOTE = """\
Microseconds of CPU time of one pull of 64 MiB on all consumer ranks, medians. `added` is what rayk's read
takes beyond bare NIXL's: plan, choice, indices, lists and session less what bare NIXL spends outside NIXL.
The posts are the same call of NIXL with the same descriptors: they differ by noise. Behind `added` stands
what bare NIXL does not do: looking through the ticket before the read, and generations, digests, their
comparison and the release after it. All but posts and digests is a fixed cost per pull and rank, whatever it
moves: each part runs once, with the processor's caches emptied by the bytes that went before. The plan knows
the request's length, to 16 tokens, from the pull before: of one that none of the last 128 had it takes twice
as long.
"""


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per cell, and per way of Ray's own transport; returns those below MIN_OF_RAW."""
    sweep = load_sweep(options.spec)
    cells = some_of(sweep.ceiling, options.limit)
    with connect(options.address):
        hosts = Hosts()
        rows = [measure_cell(cell, hosts, sweep.rounds) for cell in cells]
        name_transports(rows, hosts)
        hosts.close()
        num_bytes = cells[0].num_tokens * (128 << 10)
        rows += [rdt_row(kind, num_bytes, sweep.rounds) for kind in RDT_NOTES]
    pulls = [row for row in rows if "stages" in row]
    cpu = [row.pop("cpu") for row in pulls]
    # Staged pulls move other descriptors than bare NIXL's.
    stages = [found for row in pulls for found in [row.pop("stages")] if not row["staged"]]
    more = f"{sweep.rounds} rounds, of {MORE_ROUNDS * sweep.rounds} where these leave {MIN_OF_RAW:.0%} open"
    page.say(f"Medians of {more}. {NOTE}")
    page.section("Rates", COLUMNS, rows, note=NOTE.replace("\n", " "))
    page.say(CPU_NOTE)
    page.section("CPU time", CPU_COLUMNS, cpu, note=CPU_NOTE.replace("\n", " "))
    page.say(STAGE_NOTE)
    page.section("What a pull adds", STAGE_COLUMNS, stages, note=STAGE_NOTE.replace("\n", " "))
    page.tables = {"ceiling": rows, "cpu": cpu, "stages": stages}
    return missed(rows, cpu)


def measure_cell(cell: SweepCell, hosts: Any, rounds: int) -> dict[str, Any]:
    """Rates of one transfer: a row with the columns of COLUMNS; of a pull also those of the other tables,
    under `cpu` and `stages`."""
    found = hosts.measure(cell, rounds)
    if cell.mode == "pull" and not found["staged"] and leaves_open(found["of_raw_low"], found["of_raw_high"]):
        rounds *= MORE_ROUNDS
        found = hosts.measure(cell, rounds)
    seconds, num_bytes = found["wall_s"], found["num_bytes"]
    row = dict.fromkeys((column.key for column in COLUMNS), None) | {
        "what": "rayk",
        "mode": cell.mode,
        **cell.sides,
        **{
            name: found[name]
            for name in ("run_bytes", "num_bytes", "num_descriptors", "num_merged", "staged")
        },
        "gb_per_s": num_bytes / seconds / 1e9,
        "memcpy_gb_per_s": num_bytes / found["memcpy_s"] / 1e9,
        "post_ms": found["post_s"] * 1e3,
        "wait_ms": max(0.0, seconds - found["post_s"]) * 1e3,
        "transport": "",
        "loopback_percent": 100.0 * found["loopback_bytes"] / num_bytes,
        "note": "",
    }
    print(f"{cell.cell_id}: {row['gb_per_s']:.2f} GB/s", file=sys.stderr)
    if cell.mode == "push":
        return row
    low, high = found["of_raw_low"], found["of_raw_high"]
    row |= {name: found[name] for name in ("of_raw", "of_raw_wall")}
    row["raw_gb_per_s"] = num_bytes / found["raw_s"] / 1e9
    row["of_raw_interval"] = "" if low is None else f"{100 * low:.1f} to {100 * high:.1f} %"
    row["rounds"] = rounds
    row["cpu"] = cell.sides | cpu_row(found["cpu"] | {"offer": found["offer_cpu_s"]}, num_bytes)
    stages = found["stages"]
    own = sum(stages[n] for n in ("plan", "choice", "indices", "lists", "rest"))
    stages["added"] = own - stages["bare_rest"]
    share = stages["added"] / (stages["bare_nixl"] + stages["bare_rest"])
    row["stages"] = cell.sides | stages | {"added_share": share}
    return row


def leaves_open(low: float | None, high: float | None) -> bool:
    """Whether a share of bare NIXL may be on either side of MIN_OF_RAW, by its interval. None: none."""
    return low is None or high is None or low < MIN_OF_RAW <= high


def cpu_row(seconds: dict[str, float], num_bytes: int) -> dict[str, float]:
    """CPU time in ms per GB, and beside what it is held to. `seconds`: of `bare` NIXL, of a pull's `read` and
    `all` of it, of a `copy`, and of the producer (`offer`)."""
    bare, read, whole, copy, offer = (seconds[n] for n in ("bare", "read", "all", "copy", "offer"))
    per_gb = {"bare": bare, "read": read, "proven": whole, "copy": copy, "offer": offer}
    return {f"{name}_cpu": taken * 1e12 / num_bytes for name, taken in per_gb.items()} | {
        "read_of_bare": read / bare,
        "proven_of_both": whole / (bare + copy),
        "offer_of_copy": offer / copy,
    }


def name_transports(rows: Sequence[dict[str, Any]], hosts: Any) -> None:
    """What carried each row's runs: of pulls as the consumer's UCX says, of pushes as the producer's. UCX
    writes its log late: it is read when all is done."""
    logs = hosts.ucx_logs()
    for row in rows:
        row["transport"] = chosen_transport(logs[row["mode"]], row["mode"], row["run_bytes"])


_TITLE = re.compile(r"\| .*remote memory (read|write) by ucp_(?:get|put)\*")
_ROW = re.compile(r"\|\s+(\d+)\.\.(\d+|inf)\s+\|\s+([^|]+?)\s+\|\s+([^|]+?)\s+\|")
_PEER = re.compile(r"\| .*\b(inter-node|intra-node|self) cfg#")


def chosen_transport(log: str, mode: str, run_bytes: int) -> str:
    """What UCX, which prints it with UCX_PROTO_INFO=y, chose: e.g. `cma/memory (zero-copy)`.

    It is of reads (pull) or writes (push) of runs of so many bytes, to a peer in another process; what was
    said last counts. "" where UCX said nothing.
    """
    wanted = {"pull": "read", "push": "write"}[mode]
    found = ""
    is_wanted = is_self = False
    for line in log.splitlines():
        if peer := _PEER.search(line):
            is_self, is_wanted = peer.group(1) == "self", False
        if title := _TITLE.search(line):
            is_wanted = title.group(1) == wanted and not is_self
        elif is_wanted and (row := _ROW.search(line)):
            first, last, how, lane = row.groups()
            if int(first) <= run_bytes and (last == "inf" or run_bytes <= int(last)):
                found = f"{lane} ({how})"
    return found


@ray.remote(num_cpus=0.5, enable_tensor_transport=True)
class _Tensors:
    """One side of Ray's own transport."""

    def __init__(self, num_bytes: int, num_parts: int, fill: int) -> None:
        lend_nixl()
        self._whole = torch.full((num_bytes,), fill, dtype=torch.int8)
        self._parts = list(self._whole.split(num_bytes // num_parts))

    def put(self) -> list[ray.ObjectRef]:
        return [ray.put(self._parts, _tensor_transport="nixl")]

    def get(self, refs: list[ray.ObjectRef]) -> tuple[float, float, bool]:
        """(wall, CPU of this thread, whether the bytes are the producer's)."""
        from ray.experimental import set_target_for_ref

        began, cpu = time.perf_counter(), time.thread_time()
        set_target_for_ref(refs[0], self._parts)
        ray.get(refs[0])
        return time.perf_counter() - began, time.thread_time() - cpu, bool((self._whole == 1).all())


def lend_nixl() -> None:
    """Ray asks for the package `nixl`, which only hands on to the wheel of a CUDA version, which is there."""
    if importlib.util.find_spec("nixl") is None:
        package = types.ModuleType("nixl")
        package.__path__ = []
        sys.modules |= {"nixl": package, "nixl._api": nixl_api()}


def rdt_row(kind: str, num_bytes: int, rounds: int) -> dict[str, Any]:
    """A row of Ray's own NIXL transport: tensors of as many bytes, whole (dense) or in blocks."""
    num_parts = 1 if kind == "dense" else 256
    producer, consumer = _Tensors.remote(num_bytes, num_parts, 1), _Tensors.remote(num_bytes, num_parts, 2)
    times = []
    for _ in range(rounds + 1):  # the first makes agents and registers
        refs = ray.get(producer.put.remote(), timeout=CALL_S)
        wall, cpu, right = ray.get(consumer.get.remote(refs), timeout=CALL_S)
        if not right:
            raise RuntimeError("Ray's transport brought other bytes")
        times.append((wall, cpu))
    for actor in (producer, consumer):
        ray.kill(actor)
    wall, cpu = (statistics.median(t[i] for t in times[1:]) for i in (0, 1))
    return dict.fromkeys((column.key for column in COLUMNS), None) | {
        "what": f"Ray RDT, {kind}",
        "mode": "pull",
        "tp": "1->1",
        "tables": "dense",
        "run_bytes": num_bytes // num_parts,
        "num_bytes": num_bytes,
        "num_descriptors": num_parts,
        "gb_per_s": num_bytes / wall / 1e9,
        "staged": False,
        "transport": "nixl through Ray",
        "note": f"{RDT_NOTES[kind]}; {cpu * 1e12 / num_bytes:.0f} ms of CPU time per GB",
    }


def missed(rows: Sequence[dict[str, Any]], cpu: Sequence[dict[str, Any]]) -> list[str]:
    """Pulls below MIN_OF_RAW of bare NIXL with the same descriptors, and CPU times over their targets. Staged
    pulls move other descriptors than bare NIXL's, in a fraction of its time."""

    def name(row: dict[str, Any]) -> str:
        return (
            f"TP {row['tp']}, layouts {row['layouts']}, blocks {row['block_sizes']}, {row['tables']}, "
            f"staging {row['staging']}"
        )

    slow = [
        f"{name(row)}: {100 * row['of_raw']:.1f} % of bare NIXL, the limit is {100 * MIN_OF_RAW:.0f} %"
        for row in rows
        if row["of_raw"] is not None and not row["staged"] and row["of_raw"] < MIN_OF_RAW
    ]
    limits = {"read_of_bare": MAX_READ_CPU, "proven_of_both": MAX_PROVEN_CPU, "offer_of_copy": MAX_OFFER_CPU}
    titles = {column.key: column.title for column in CPU_COLUMNS}
    return slow + [
        f"{name(row)}: CPU time {row[key]:.2f} {titles[key]} ({key}), the limit is {limit:g}"
        for row in cpu
        for key, limit in limits.items()
        if row[key] > limit
    ]


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        fill,
        __file__,
        title="The ceiling of transfers",
        argv=argv,
        keeps=True,
        spec=option(SPEC, "a sweep's file", type=Path),
        limit=option(None, "only so many cells, spread over all", type=above_zero, metavar="N"),
        address=option(None, "a running Ray cluster; else a local one is started", type=str),
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))
