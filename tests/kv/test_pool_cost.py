"""What a step of many requests costs the pool does not grow with the pool: counted, not timed.

Work is opcodes of Python and the most bytes that are held at once: an array operation over the whole pool is
one opcode, and an array as long as the pool.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from rayk.kv.block_pool import BlockPool
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from tests.kv.brute import full

SMALL, LARGE = 2_000, 40_000
MAX_GROWTH = 1.6
"""A tree over twenty times the ids is 16 levels deep in place of 11."""
NUM_REQUESTS = 32


def num_opcodes(act: Callable[[], object]) -> int:
    """How many opcodes run."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def num_bytes(act: Callable[[], object]) -> int:
    """How many bytes more than before are held at the peak."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        act()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def decode(num_blocks: int) -> Callable[[], object]:
    """A step in which every request of a manager gets a token, and some a block; single blocks are free all
    over the pool."""
    manager = KVCacheManager([KVCacheGroup(0, full(4), (0,), 1)], num_blocks)
    lengths = {}
    for i in range(NUM_REQUESTS):
        lengths[f"r{i}"] = 4 * 8 + i % 4
        assert manager.extend(f"r{i}", lengths[f"r{i}"]) is not None
    rest = manager.pool.allocate(manager.pool.num_free_blocks)
    manager.pool.free(rest[::2])

    def step() -> None:
        for name in lengths:
            lengths[name] += 1
            assert manager.extend(name, lengths[name]) is not None

    return step


def reuse(num_blocks: int) -> Callable[[], object]:
    """Blocks change hands in a pool that is full of blocks whose content can be found."""
    pool = BlockPool(num_blocks)
    everything = pool.allocate(num_blocks - 1)
    for block in everything:
        pool.keep(block)
    pool.free(everything)

    def step() -> None:
        for size in (1, 3, 8) * 4:
            taken = pool.allocate(size, after=7)
            for block in taken[1:]:
                pool.keep(block)
            pool.free(taken)

    return step


def tell(num_blocks: int) -> Callable[[], object]:
    """Metrics ask what is held, where nearly all is."""
    manager = KVCacheManager([KVCacheGroup(0, full(4), (0,), 1)], num_blocks)
    for i in range(NUM_REQUESTS):
        assert manager.extend(f"r{i}", num_blocks // NUM_REQUESTS * 4 - 4) is not None
    manager.lease("r0", "lease")
    return manager.count_blocks


@pytest.mark.parametrize("begin", [decode, reuse, tell])
@pytest.mark.parametrize("count", [num_opcodes, num_bytes])
def test_a_step_costs_the_same_in_a_large_pool(
    begin: Callable[[int], Callable[[], object]], count: Callable[[Callable[[], object]], int]
):
    costs = []
    for size in (SMALL, LARGE):
        step = begin(size)
        step()
        # Now and then a dictionary moves to other memory, as Python's do.
        costs.append(min(count(step) for _ in range(2)))
    assert costs[1] <= MAX_GROWTH * costs[0] + 2_000, costs
