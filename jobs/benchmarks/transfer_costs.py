"""What rayk.transfer.costs should say on this machine, and how far what it says is off.

A second process serves its memory; this one reads it over NIXL in descriptors of many sizes and numbers,
joined and scattered, copies runs as a staged read does, and fits the constants of the linear model to the
times (least squares of relative errors, none below 0), as engines on devices do at their start with fewer
cases. Times are the least of several rounds, in which the cases take turns: others may use the machine.

    python jobs/benchmarks/transfer_costs.py --rounds 9 --record

It also compares the two ways of naming descriptors to NIXL: strided rows (address, length, device, stride,
count) against one row each (address, length, device).
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Generator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install
from jobs.benchmarks.harness import Page, run, second_process
from rayk.kv.caches import empty_bytes
from rayk.transfer.agent import DescriptorList
from rayk.transfer.costs import TransferCosts, transfer_costs
from rayk.transfer.measuring import Copy, CostProbe, Move, PeerMemory, Timed, Times, fit_costs, least_ns
from rayk.transfer.nixl_agent import NixlAgent

MIB = 1 << 20
REGION_BYTES = 256 * MIB
LENGTHS = (64, 512, 4096, 65536, 1 << 20)
COUNTS = (1, 16, 256, 4096, 32768)
MAX_BYTES = 64 * MIB


MOVES = tuple(
    Move(count, length, is_joined)
    for count, length, is_joined in itertools.product(COUNTS, LENGTHS, (True, False))
    if count * length <= MAX_BYTES and not (is_joined and count == 1)
)


COPIES = tuple(
    Copy(runs, length, blocks)
    for runs, length, blocks in itertools.product((16, 256, 4096), (32, 128, 512, 4096), (1, 16, 64))
    if runs * length * blocks <= MAX_BYTES
)


class Flat(DescriptorList):
    """The same descriptors with a row each."""

    def strided(self, device_index: int) -> npt.NDArray[np.uint64]:
        """uint64 [descriptors, 3] of (address, length, device)."""
        blocks = np.arange(self.num_blocks)[None, :]
        rows = np.empty((len(self.addresses) * self.num_blocks, 3), dtype=np.uint64)
        rows[:, 0] = (self.addresses[:, None] + blocks * self.strides[:, None]).reshape(-1)
        rows[:, 1] = np.repeat(self.lengths, self.num_blocks)
        rows[:, 2] = device_index
        return rows


def serve(pipe: Connection) -> None:
    """The other process: its memory, until told to end."""
    agent = NixlAgent(f"costs-p-{os.getpid()}")
    memory = torch.randint(-128, 128, (REGION_BYTES,), dtype=torch.int8)
    pipe.send((agent.name, agent.register(memory), agent.metadata()))
    while not pipe.poll(0.001):
        agent.notifications()
    agent.close()


def probe(pipe: Connection) -> CostProbe:
    """Between memory of ours and the other process'."""
    agent = NixlAgent(f"costs-d-{os.getpid()}")
    memory = empty_bytes(REGION_BYTES, torch.device("cpu")).zero_()
    agent.register(memory)
    name, address, metadata = pipe.recv()
    agent.add_peer(name, metadata)
    peer = PeerMemory(agent_name=name, address=address, num_bytes=REGION_BYTES, device="cpu")
    return CostProbe(agent, memory, peer, time.perf_counter_ns)


def finished(timed: Timed | Generator[None, None, Times]) -> Any:
    """What a measurement returns, when nobody else wants the time between its reads."""
    while True:
        try:
            next(timed)
        except StopIteration as end:
            return end.value


def strided_rows(bench: CostProbe, rounds: int) -> list[str]:
    """N x 5 beside N x 3: preparing, and reading 4,096 scattered descriptors of 512 bytes."""
    lines = ["| rows | blocks prepared | prepare us | read us |", "|---|---|---|---|"]
    random = np.random.default_rng(0)
    kinds = {"N x 5": DescriptorList, "N x 3": Flat}
    for num_blocks in (4096, 65536):
        prepare: dict[str, list[int]] = {name: [] for name in kinds}
        read: dict[str, list[int]] = {name: [] for name in kinds}
        ours, theirs = (random.permutation(num_blocks)[:4096].astype(np.int32) for _ in range(2))
        for i in range(2 * rounds + 2):
            name = [*kinds][i % 2]
            lists = [kinds[name](**vars(made)) for made in bench.lists(512, 1024, num_blocks)]
            began = time.perf_counter_ns()
            handle = bench.agent.prepare(bench.peer.agent_name, *lists)
            prepare[name].append(time.perf_counter_ns() - began)
            read[name].append(finished(bench.read(handle, ours, theirs)))
            bench.agent.forget(handle)
        lines += [
            f"| {n} | {num_blocks:,} | {min(prepare[n][1:]) / 1e3:.0f} | {min(read[n][1:]) / 1e3:.0f} |"
            for n in kinds
        ]
    return lines


def report(measured: TransferCosts, moves: Times, copies: Times) -> list[str]:
    """Constants, and what the code's constants make of every case."""
    coded = transfer_costs("nixl/UCX", "cpu")
    lines = ["| constant | here | in the code | code / here |", "|---|---|---|---|"]
    for (name, here), there in zip(asdict(measured).items(), asdict(coded).values(), strict=True):
        ratio = f"{there / here:.2f}" if here else "-"
        lines.append(f"| {name} | {here:.4g} | {there:.4g} | {ratio} |")
    ratios = []
    rows = ["| case | measured us | fit | code |", "|---|---|---|---|"]
    for case, ns in zip((*MOVES, *COPIES), (*moves, *copies), strict=True):
        guesses = [_guess(costs, case) for costs in (measured, coded)]
        ratios.append([guess / ns for guess in guesses])
        rows.append(f"| {_name(case)} | {ns / 1e3:.1f} | {ratios[-1][0]:.2f} | {ratios[-1][1]:.2f} |")
    for which, column in zip(("the fit", "the code"), np.array(ratios).T, strict=True):
        off = np.quantile(np.abs(np.log2(column)), [0.5, 0.9])
        lines.append("")
        lines.append(
            f"Guesses by {which}: off by a factor of {2 ** off[0]:.2f} in the median case, "
            f"{2 ** off[1]:.2f} in nine of ten."
        )
    return [*lines, "", "Guess / measured:", "", *rows]


def _guess(costs: TransferCosts, case: Move | Copy) -> float:
    if isinstance(case, Move):
        return costs.move_ns(case.count, case.num_merged, case.count * case.length)
    return costs.repack_ns(case.runs * case.blocks, case.runs * case.blocks * case.length)


def _name(case: Move | Copy) -> str:
    if isinstance(case, Move):
        return f"read {case.count:,} x {case.length:,} B, {'joined' if case.is_joined else 'scattered'}"
    return f"copy {case.runs * case.blocks:,} x {case.length:,} B"


def fill(options: argparse.Namespace, page: Page) -> None:
    """Add the constants, and what they make of every case."""
    torch.set_num_threads(1)
    with second_process(serve) as pipe:
        bench = probe(pipe)
        cases = [*map(bench.move, MOVES), *map(bench.copy, COPIES)]
        times = finished(least_ns(cases, options.rounds, time.perf_counter_ns))
        moves, copies = np.split(times, [len(MOVES)])
        measured = fit_costs(MOVES, moves, COPIES, copies)
        page.say(*report(measured, moves, copies))
        page.say("", "Rows of descriptor lists:", "", *strided_rows(bench, options.rounds))
        bench.agent.close()


def main() -> int:
    return run(fill, __file__, title="Constants of the cost model", rounds=9)


if __name__ == "__main__":
    sys.exit(main())
