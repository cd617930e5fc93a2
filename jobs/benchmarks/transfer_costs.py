"""What rayk.transfer.costs should say on this machine, and how far what it says is off.

A second process serves its memory; this one reads it over NIXL in descriptors of many sizes and numbers,
joined and scattered, copies runs as a staged read does, and fits the constants of the linear model to the
times (least squares of relative errors, none below 0). Times are the least of several rounds, in which the
cases take turns: others may use the machine.

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install
from jobs.benchmarks.harness import Page, run, second_process
from rayk.kernels.copy_runs import copy_runs, make_run_table
from rayk.kv.caches import empty_bytes
from rayk.transfer.agent import DescriptorList, TransferState
from rayk.transfer.costs import TransferCosts, transfer_costs
from rayk.transfer.nixl_agent import NixlAgent

MIB = 1 << 20
REGION_BYTES = 256 * MIB
LENGTHS = (64, 512, 4096, 65536, 1 << 20)
COUNTS = (1, 16, 256, 4096, 32768)
MAX_BYTES = 64 * MIB
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Move:
    """`count` descriptors of `length` bytes: neighbours that join, or none that do."""

    count: int
    length: int
    is_joined: bool

    @property
    def num_merged(self) -> int:
        return 1 if self.is_joined else self.count

    def terms(self) -> tuple[float, ...]:
        """What request, descriptor, index and byte are multiplied by."""
        return (1, self.num_merged, self.count, self.count * self.length)


MOVES = tuple(
    Move(count, length, is_joined)
    for count, length, is_joined in itertools.product(COUNTS, LENGTHS, (True, False))
    if count * length <= MAX_BYTES and not (is_joined and count == 1)
)


@dataclass(frozen=True)
class Copy:
    """`runs` runs of `length` bytes in each of `blocks` blocks, spread as heads are among tokens."""

    runs: int
    length: int
    blocks: int

    def terms(self) -> tuple[float, ...]:
        """What chunk, run and byte are multiplied by."""
        count = self.runs * self.blocks
        return (1, count, count * self.length)


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


class Bench:
    def __init__(self, pipe: Connection) -> None:
        self.agent = NixlAgent(f"costs-d-{os.getpid()}")
        self.memory = empty_bytes(REGION_BYTES, torch.device("cpu")).zero_()
        self.base = self.agent.register(self.memory)
        self.peer, self.remote, metadata = pipe.recv()
        self.agent.add_peer(self.peer, metadata)

    def lists(
        self, length: int, stride: int, num_blocks: int, kind: type[DescriptorList] = DescriptorList
    ) -> tuple[DescriptorList, DescriptorList]:
        """Ours and the peer's: one run over `num_blocks` blocks."""
        sizes, strides = np.array([length]), np.array([stride])
        return (
            kind(np.array([self.base]), sizes, strides, num_blocks),
            kind(np.array([self.remote]), sizes, strides, num_blocks),
        )

    def read_ns(self, handle: int, ours: npt.NDArray[np.int32], theirs: npt.NDArray[np.int32]) -> int:
        began = time.perf_counter_ns()
        transfer = self.agent.read(handle, ours, theirs)  # type: ignore[arg-type]
        while (state := self.agent.poll(transfer)) is TransferState.PENDING:
            self.agent.notifications()
        self.agent.release(transfer)
        if state is not TransferState.DONE:
            raise RuntimeError("a read failed")
        return time.perf_counter_ns() - began

    def prepare_move(self, move: Move) -> Callable[[], int]:
        # Blocks twice as far apart as they are long never join.
        stride = move.length if move.is_joined else 2 * move.length
        handle = self.agent.prepare(self.peer, *self.lists(move.length, stride, move.count))
        order = np.arange(move.count, dtype=np.int32)
        random = np.random.default_rng(0)
        ours, theirs = (order, order) if move.is_joined else (random.permutation(order) for _ in range(2))
        return lambda: self.read_ns(handle, ours, theirs)

    def prepare_copy(self, copy: Copy) -> Callable[[], int]:
        """A staged chunk without its read: its lists and its copies."""
        page = 2 * copy.runs * copy.length
        starts = np.arange(copy.runs, dtype=np.int64) * copy.length
        # Runs that are neighbours in the page come from far apart.
        order = np.random.default_rng(0).permutation(copy.runs)
        columns = (
            starts[order],
            starts,
            np.full(copy.runs, copy.length),
            np.full(copy.runs, page // 2),
            np.full(copy.runs, page // 2),
        )
        source, destination = self.memory[: 64 * MIB], self.memory[128 * MIB : 192 * MIB]
        blocks = np.arange(copy.blocks)
        num_blocks = min(4096, REGION_BYTES // page)
        table = make_run_table(*columns, torch.device("cpu"))

        def timed() -> int:
            began = time.perf_counter_ns()
            handle = self.agent.prepare(self.peer, *self.lists(copy.length, page // 2, num_blocks))
            copy_runs(source, destination, table, blocks, blocks)
            self.agent.forget(handle)
            return time.perf_counter_ns() - began

        return timed


def least(timed: Sequence[Callable[[], int]], rounds: int) -> npt.NDArray[np.float64]:
    """Least ns of each; one round more, the first, is not counted."""
    found = [[call() for call in timed] for _ in range(rounds + 1)]
    return np.array([min(times[1:]) for times in zip(*found, strict=True)])


def fit(terms: Sequence[tuple[float, ...]], times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Constants >= 0 that minimise the sum of squared relative errors: least squares, dropping the most
    negative constant until none is."""
    weighted = np.array(terms) / times[:, None]
    kept = list(range(weighted.shape[1]))
    while True:
        constants, *_ = np.linalg.lstsq(weighted[:, kept], np.ones(len(times)), rcond=None)
        if constants.min() >= 0:
            found = np.zeros(weighted.shape[1])
            found[kept] = constants
            return found
        del kept[int(constants.argmin())]


def strided_rows(bench: Bench, rounds: int) -> list[str]:
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
            lists = bench.lists(512, 1024, num_blocks, kinds[name])
            began = time.perf_counter_ns()
            handle = bench.agent.prepare(bench.peer, *lists)
            prepare[name].append(time.perf_counter_ns() - began)
            read[name].append(bench.read_ns(handle, ours, theirs))
            bench.agent.forget(handle)
        lines += [
            f"| {n} | {num_blocks:,} | {min(prepare[n][1:]) / 1e3:.0f} | {min(read[n][1:]) / 1e3:.0f} |"
            for n in kinds
        ]
    return lines


def report(
    measured: TransferCosts, moves: npt.NDArray[np.float64], copies: npt.NDArray[np.float64]
) -> list[str]:
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
        bench = Bench(pipe)
        moves = least([bench.prepare_move(m) for m in MOVES], options.rounds)
        copies = least([bench.prepare_copy(c) for c in COPIES], options.rounds)
        request, descriptor, index, byte = fit([m.terms() for m in MOVES], moves)
        chunk, run_ns, copied = fit([c.terms() for c in COPIES], copies)
        measured = TransferCosts(request, descriptor, index, byte, chunk, run_ns, copied)
        page.say(*report(measured, moves, copies))
        page.say("", "Rows of descriptor lists:", "", *strided_rows(bench, options.rounds))
        bench.agent.close()


def main() -> int:
    return run(fill, __file__, title="Constants of the cost model", rounds=9)


if __name__ == "__main__":
    sys.exit(main())
