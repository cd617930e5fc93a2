"""What planning a request takes on one consumer rank: lowering the plan, picking descriptors; without NIXL.

    python jobs/benchmarks/planning.py --check --record

1,000 blocks of 16 tokens in 64 layers. The plan and its patterns are made once per pair of engines (first
column of times); a request then picks block ids and descriptor indices. Times are of the thread's processor,
medians over rounds, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import get_layout
from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from rayk.parallel.shard import EngineShape
from rayk.transfer.plan import TransferPlan, consecutive_tables, plan_transfer

NUM_TOKENS = 16_000
NUM_LAYERS = 64
LIMIT_MS = 5.0
MOST_DESCRIPTORS = 65_536
"""More are not read one by one: staging is mandatory above."""

ABOUT = """\
16,000 tokens in 64 layers, 8 KV heads of 128 + 128 bfloat16: 1,000 blocks of 16 tokens. One consumer rank,
block ids scattered. The plan, and the patterns of the first request, are made once per pair of engines
(`first`); every later request takes the times of the last columns: lowering the plan to block ids, and
picking the descriptor indices that NIXL is given. Milliseconds of processor time, medians.
Above 65,536 descriptors a request is not read one by one (staging).
"""


@dataclass(frozen=True)
class Case:
    """(producer, consumer) each."""

    layouts: tuple[str, str]
    tp: tuple[int, int]
    blocks: tuple[int, int] = (16, 16)
    window: int | None = None
    """Five layers of six see so many tokens."""

    def specs(self, side: int) -> dict[tuple[int, str], KVCacheSpec]:
        common = (self.blocks[side], 8, 128, 128, "bfloat16", 32)
        full = FullAttentionSpec(*common)
        local = full if self.window is None else SlidingWindowSpec(*common, self.window)
        return {(layer, "attention"): local if layer % 6 else full for layer in range(NUM_LAYERS)}

    def ranks(self, side: int) -> list[RankGeometry]:
        groups = group_layers(self.specs(side))
        num_blocks = 2 + len(groups) * -(-NUM_TOKENS // self.blocks[side])
        return [
            plan_rank(
                groups,
                get_layout(self.layouts[side]),
                shape=EngineShape(self.tp[side]),
                rank=rank,
                num_blocks=num_blocks,
            )
            for rank in range(self.tp[side])
        ]


CASES = (
    Case(("BHLNC", "BHLNC"), (1, 1)),
    Case(("LBHNC", "LBHNC"), (1, 1)),
    Case(("LBHNC", "LBHNC"), (8, 8)),
    Case(("BHLNC", "BHLNC"), (2, 1)),
    Case(("BHLNC", "BHLNC"), (8, 1)),
    Case(("BLHNC", "BLHNC"), (4, 8)),
    Case(("LBHNC", "BLHNC"), (1, 1)),
    Case(("BHLNC", "BHLNC"), (1, 1), (16, 24)),
    Case(("LBHNC", "LBHNC"), (1, 1), (24, 16), window=1024),
    Case(("LBHNC", "LBHNC"), (2, 1), window=1024),
)


@dataclass(frozen=True)
class Measured:
    num_reads: int
    num_descriptors: int
    first_ms: float
    lower_ms: float
    indices_ms: float

    @property
    def planning_ms(self) -> float:
        return self.lower_ms + self.indices_ms


def scattered(rank: RankGeometry, seed: int) -> list[list[int]]:
    ids = np.random.default_rng(seed).permutation(np.arange(1, rank.num_blocks))
    return [[b and int(ids[b - 1]) for b in table] for table in consecutive_tables(rank, NUM_TOKENS)]


def timed_ms(began_ns: int) -> float:
    return (time.thread_time_ns() - began_ns) / 1e6


def measure(case: Case, rounds: int) -> Measured:
    producers, consumers = case.ranks(0), case.ranks(1)
    consumer = consumers[-1]
    tables = scattered(producers[0], 0), scattered(consumer, 1)
    began = time.thread_time_ns()
    plan: TransferPlan = plan_transfer(producers, consumer)
    reads = plan.lower(NUM_TOKENS, *tables)
    first_ms = timed_ms(began)
    lowered, picked = [], []
    for _ in range(rounds):
        began = time.thread_time_ns()
        reads = plan.lower(NUM_TOKENS, *tables)
        lowered.append(timed_ms(began))
        began = time.thread_time_ns()
        for read in reads:
            read.indices(producers[0].num_blocks, consumer.num_blocks)
        picked.append(timed_ms(began))
    return Measured(
        len(reads),
        sum(read.num_descriptors for read in reads),
        first_ms,
        statistics.median(lowered),
        statistics.median(picked),
    )


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per case; returns those in which planning takes longer than the limit."""
    page.say(ABOUT)
    page.head(
        "layouts", "TP", "blocks", "reads", "descriptors", "first", "lower", "indices", "lower + indices"
    )
    slow = []
    for case in CASES:
        found = measure(case, options.rounds)
        window = f", window {case.window} in 5 of 6" if case.window else ""
        pairs = [" -> ".join(map(str, pair)) for pair in (case.layouts, case.tp, case.blocks)]
        times = (found.first_ms, found.lower_ms, found.indices_ms, found.planning_ms)
        numbers = [f"{found.num_reads:,}", f"{found.num_descriptors:,}", *(f"{ms:.2f}" for ms in times)]
        page.row(pairs[0] + window, *pairs[1:], *numbers)
        if found.planning_ms > LIMIT_MS and found.num_descriptors <= MOST_DESCRIPTORS:
            row = f"layouts {pairs[0]}{window}, TP {pairs[1]}, blocks {pairs[2]}"
            slow.append(f"{row}: {found.planning_ms:.2f} ms, the limit is {LIMIT_MS:g} ms")
    return slow


def main() -> int:
    return run(fill, __file__, title="Planning a request", rounds=51)


if __name__ == "__main__":
    sys.exit(main())
