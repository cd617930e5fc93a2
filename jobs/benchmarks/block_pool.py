"""Time what a decode step of many requests costs the block pool, in a small pool and one ten times as large.

    python jobs/benchmarks/block_pool.py [--requests 256] [--steps 64] [--rounds 5] [--check]

Every request gets a token in each step, and a block of 16 tokens in every sixteenth, as the scheduler asks.
The rest of the pool is free in single blocks, or full of blocks whose content can still be found: no run of
free ids is at hand. Milliseconds of the thread's processor time per step: the least of several rounds, in
which the pools take turns: what else the machine does only adds.

Target: a step in the large pool costs less than twice one in the small pool.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from rayk.kv.specs import FullAttentionSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run

MAX_GROWTH = 2.0
NUM_BLOCKS = (20_000, 200_000)
SPEC = FullAttentionSpec(
    block_size=16, num_kv_heads=8, head_size_k=128, head_size_v=128, dtype="bfloat16", num_query_heads=32
)
STATES = ("scattered", "cached")


def begin(state: str, num_blocks: int, num_requests: int) -> Callable[[], float]:
    """What takes a step, and says how many milliseconds it took."""
    manager = KVCacheManager([KVCacheGroup(0, SPEC, (0,), 1)], num_blocks)
    lengths = {f"request {i}": 16 * 8 + i % 16 for i in range(num_requests)}
    for name, length in lengths.items():
        manager.extend(name, length)
    rest = manager.pool.allocate(manager.pool.num_free_blocks)
    if state == "cached":
        for block in rest:
            manager.pool.keep(block)
    manager.pool.free(rest if state == "cached" else rest[::2])

    def step() -> float:
        for name in lengths:
            lengths[name] += 1
        started = time.thread_time_ns()
        for name, length in lengths.items():
            if manager.extend(name, length) is None:
                raise AssertionError(f"the pool of {num_blocks} blocks is too small for so many steps")
        return (time.thread_time_ns() - started) / 1e6

    return step


def measure(state: str, num_requests: int, num_steps: int, num_rounds: int) -> list[float]:
    """Milliseconds per step, by pool."""
    found = []
    for _ in range(num_rounds):
        steps = [begin(state, num_blocks, num_requests) for num_blocks in NUM_BLOCKS]
        found.append([sum(step() for _ in range(num_steps)) / num_steps for step in steps])
    return [min(column) for column in zip(*found, strict=True)]


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row for each state of the pools; returns those that miss the target."""
    page.head("free blocks", *(f"{num:,} blocks, ms" for num in NUM_BLOCKS), "growth")
    missed = []
    for state in STATES:
        costs = measure(state, options.requests, options.steps, options.rounds)
        growth = costs[1] / costs[0]
        page.row(state, *(f"{number:.2f}" for number in (*costs, growth)))
        if growth >= MAX_GROWTH:
            missed.append(f"{state}: growth {growth:.2f}, the limit is {MAX_GROWTH:g}")
    return missed


def main() -> int:
    return run(fill, __file__, title="What a step costs the block pool", requests=256, steps=64, rounds=5)


if __name__ == "__main__":
    sys.exit(main())
