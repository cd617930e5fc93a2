"""Steps on the cores of one machine slow each other down for as long as they overlap."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rayk.costs.table import HostTable
from rayk.simulate import SimOutcome, cell_arrivals, simulate_cell
from rayk.simulate.host import SimHost
from tests.simulate.cells import BOOK, MODEL, sim_cell

SLOW = 0.4


@dataclass
class Engine:
    """Takes steps one after the other, the first one at `begin_ns`."""

    begin_ns: int
    lengths_ns: list[int]
    num_ranks: int


def drawn(seed: int, num_engines: int) -> list[Engine]:
    draw = random.Random(seed)
    return [
        Engine(
            begin_ns=draw.randrange(300),
            lengths_ns=[draw.randrange(50, 400) for _ in range(draw.randrange(5, 40))],
            num_ranks=draw.choice([1, 1, 2]),
        )
        for _ in range(num_engines)
    ]


def host_ends(table: HostTable, engines: list[Engine]) -> list[int]:
    """When each engine's last step ends, as SimHost has it: steps begin in the order of time."""
    host = SimHost(table)
    now = [engine.begin_ns for engine in engines]
    num_done = [0] * len(engines)
    while any(done < len(e.lengths_ns) for done, e in zip(num_done, engines, strict=True)):
        going = [i for i, e in enumerate(engines) if num_done[i] < len(e.lengths_ns)]
        i = min(going, key=lambda i: (now[i], i))
        now[i] += host.slowed(str(i), engines[i].num_ranks, now[i], engines[i].lengths_ns[num_done[i]])
        num_done[i] += 1
    return now


def true_ends(table: HostTable, engines: list[Engine]) -> list[float]:
    """The same by time in small parts, in each of which everybody goes on at the pace of that moment."""
    part_ns = 0.25
    left = [float(sum(engine.lengths_ns)) for engine in engines]
    ends, at = [0.0] * len(engines), 0.0
    while max(left) > 0:
        busy = [e.begin_ns <= at and rest > 0 for e, rest in zip(engines, left, strict=True)]
        for i, is_busy in enumerate(busy):
            if not is_busy:
                continue
            beside = sum(e.num_ranks for j, e in enumerate(engines) if busy[j] and j != i)
            left[i] -= part_ns / (1 + table.slow * min(1.0, beside / (table.num_cores - 1)))
            ends[i] = at + part_ns
        at += part_ns
    return ends


@pytest.mark.parametrize(("num_cores", "num_engines"), [(2, 2), (2, 3), (4, 3), (8, 4)])
def test_steps_that_overlap_take_as_long_as_cores_allow(num_cores: int, num_engines: int) -> None:
    for seed in range(4):
        engines = drawn(seed, num_engines)
        table = HostTable(num_cores=num_cores, slow=SLOW)
        found = zip(host_ends(table, engines), true_ends(table, engines), engines, strict=True)
        for end_ns, true_ns, engine in found:
            assert abs(end_ns - true_ns) <= SLOW * max(engine.lengths_ns) + len(engine.lengths_ns)
            assert end_ns > engine.begin_ns + sum(engine.lengths_ns), "it was not alone"


def test_who_is_alone_is_not_slowed_down() -> None:
    host = SimHost(HostTable(num_cores=2, slow=SLOW))
    assert host.slowed("a", 1, 0, 100) == 100
    assert host.slowed("b", 1, 100, 100) == 100, "the other one is over"
    lost_ns = round(50 * (1 - 1 / (1 + SLOW)))
    assert host.slowed("a", 1, 150, 100) == 100 + lost_ns, "50 ns of it are beside the other"
    assert host.slowed("b", 1, 400, 100) == 100 + lost_ns, "it owes what it lost"
    assert host.slowed("b", 1, 900, 100) == 100
    host.slowed("a", 1, 1000, 100)
    host.died("a", 1000)
    assert host.slowed("b", 1, 1000, 100) == 100, "the dead take no core"


def simulated(host: HostTable, **changes: Any) -> SimOutcome:
    cell = sim_cell(prefill={"num_engines": 2}, sampling={"max_tokens": 30}, **changes)
    prompts = [tuple(range(i, i + 5)) for i in range(4)]
    return simulate_cell(cell, MODEL, cell_arrivals(cell, prompts), replace(BOOK, host=host))


def test_engines_of_one_machine_share_its_cores() -> None:
    alone = simulated(HostTable(num_cores=2, slow=0.0))
    beside = simulated(HostTable(num_cores=2, slow=SLOW))
    many = simulated(HostTable(num_cores=5, slow=SLOW))
    ratios = []
    for other in (beside, many):
        first, last = (max(row.token_times_ns[-1] for row in o.requests) for o in (alone, other))
        ratios.append(last / first)
    assert ratios[0] == pytest.approx(1 + SLOW, rel=0.04)
    assert ratios[1] == pytest.approx(1 + SLOW / 4, rel=0.02)
    assert simulated(HostTable(num_cores=2, slow=SLOW)).requests == beside.requests
