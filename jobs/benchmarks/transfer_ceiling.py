"""Rates of transfers beside bare NIXL, memcpy and Ray's own transport.

    python jobs/benchmarks/transfer_ceiling.py --check --record

The cells under `ceiling` of jobs/transfer_sweep.yaml, larger than those of the sweep: rayk and bare NIXL with
the very same descriptors take turns in one process, with a dense copy of as many bytes before each. Medians
over rounds of the wall's clock; `of bare NIXL` is the median of the rounds' ratios. CPU time, posting and
waiting are told apart, descriptors before and after merging, and the transport that UCX says it chose for
runs of that size, beside what the loopback network carried. Every byte is checked after the last round.

--check: 90 % of bare NIXL, where runs have 64 KiB or more and nothing is staged.
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

MIN_OF_RAW = 0.9
"""Of bare NIXL's rate, under --check."""
MIN_RUN_BYTES = 64 << 10
"""Shorter runs are not judged."""


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
    Column(title="of bare NIXL", key="of_raw", spec=".0%"),
    Column(title="CPU with digests, ms", key="cpu_ms", spec=".2f"),
    Column(title="post, ms", key="post_ms", spec=".2f"),
    Column(title="wait, ms", key="wait_ms", spec=".2f"),
    Column(title="staging", key="staging"),
    Column(title="staged", key="staged"),
    Column(title="transport", key="transport"),
    Column(title="loopback, % of bytes", key="loopback_percent", spec=".1f"),
    Column(title="note", key="note"),
)
NOTE = """\
On one CPU host posting a transfer blocks until it is done. A pull's time counts lowering the plan and
choosing descriptors; `wait` is what is not posting. Pushes have no bare NIXL beside them: they are written by
descriptors made beforehand. Ray's RDT moves whole tensors by pulls only: a reader cannot pick some blocks of
a tensor, nor slices, nor lay them out anew; it knows no leases.
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
    page.say(f"Medians of {sweep.rounds} rounds. {NOTE}")
    page.section("Rates", COLUMNS, rows, note=NOTE.replace("\n", " "))
    page.tables = {"ceiling": rows}
    return missed(rows)


def measure_cell(cell: SweepCell, hosts: Any, rounds: int) -> dict[str, Any]:
    """Rates of one transfer; a row with the columns of COLUMNS."""
    found = hosts.measure(cell, rounds)
    seconds, raw = found["wall_s"], found["raw_s"]
    row = {
        "what": "rayk",
        "mode": cell.mode,
        **cell.sides,
        "run_bytes": found["run_bytes"],
        "num_bytes": found["num_bytes"],
        "num_descriptors": found["num_descriptors"],
        "num_merged": found["num_merged"],
        "gb_per_s": found["num_bytes"] / seconds / 1e9,
        "raw_gb_per_s": None if raw is None else found["num_bytes"] / raw / 1e9,
        "memcpy_gb_per_s": None
        if found["memcpy_s"] is None
        else found["num_bytes"] / found["memcpy_s"] / 1e9,
        "of_raw": found["of_raw"],
        "cpu_ms": found["cpu_s"] * 1e3,
        "post_ms": found["post_s"] * 1e3,
        "wait_ms": max(0.0, seconds - found["post_s"]) * 1e3,
        "staged": found["staged"],
        "transport": "",
        "loopback_percent": 100.0 * found["loopback_bytes"] / found["num_bytes"],
        "note": "",
    }
    assert set(row) == {column.key for column in COLUMNS}
    print(f"{cell.cell_id}: {row['gb_per_s']:.2f} GB/s", file=sys.stderr)
    return row


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
    return {
        "what": f"Ray RDT, {kind}",
        "mode": "pull",
        "tp": "1->1",
        "layouts": "",
        "block_sizes": "",
        "tables": "dense",
        "staging": "",
        "run_bytes": num_bytes // num_parts,
        "num_bytes": num_bytes,
        "num_descriptors": num_parts,
        "num_merged": None,
        "gb_per_s": num_bytes / wall / 1e9,
        "raw_gb_per_s": None,
        "memcpy_gb_per_s": None,
        "of_raw": None,
        "cpu_ms": cpu * 1e3,
        "post_ms": None,
        "wait_ms": None,
        "staged": False,
        "transport": "nixl through Ray",
        "loopback_percent": None,
        "note": RDT_NOTES[kind],
    }


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows below MIN_OF_RAW of bare NIXL with the same descriptors, where runs are long enough for it to
    count."""
    return [
        f"{row['mode']}, TP {row['tp']}, layouts {row['layouts']}, blocks {row['block_sizes']}, "
        f"{row['tables']}: {row['gb_per_s']:.2f} GB/s, {100 * row['of_raw']:.0f} % of bare NIXL, "
        f"the limit is {100 * MIN_OF_RAW:.0f} %"
        for row in rows
        if row["of_raw"] is not None
        and not row["staged"]
        and row["run_bytes"] >= MIN_RUN_BYTES
        and row["of_raw"] < MIN_OF_RAW
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
