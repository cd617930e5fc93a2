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
    """Takes steps one after the other, the first one at `begin_ns`, each of which comes to some tokens."""

    begin_ns: int
    lengths_ns: list[int]
    tokens: list[int]
    num_ranks: int


def drawn(seed: int, num_engines: int) -> list[Engine]:
    draw = random.Random(seed)
    found = []
    for _ in range(num_engines):
        num = draw.randrange(5, 40)
        found.append(
            Engine(
                begin_ns=draw.randrange(300),
                lengths_ns=[draw.randrange(50, 400) for _ in range(num)],
                tokens=[draw.randrange(8) for _ in range(num)],
                num_ranks=draw.choice([1, 1, 2]),
            )
        )
    return found


def host_ends(table: HostTable, engines: list[Engine]) -> list[int]:
    """When each engine's last step ends, as SimHost has it: steps begin in the order of time."""
    host = SimHost(table)
    now = [engine.begin_ns for engine in engines]
    num_done = [0] * len(engines)
    while any(done < len(e.lengths_ns) for done, e in zip(num_done, engines, strict=True)):
        going = [i for i, e in enumerate(engines) if num_done[i] < len(e.lengths_ns)]
        i = min(going, key=lambda i: (now[i], i))
        engine, step = engines[i], num_done[i]
        length_ns, num_tokens = engine.lengths_ns[step], engine.tokens[step]
        now[i] += host.step(str(i), engine.num_ranks, now[i], length_ns, num_tokens)
        num_done[i] += 1
    return now


def true_ends(table: HostTable, engines: list[Engine]) -> list[float]:
    """The same by time in small parts, in each of which everybody goes on at the pace of that moment: all
    alike where more is asked for than there are cores, and slower by what shared caches cost."""
    part_ns = 0.5
    steps = [list(zip(e.lengths_ns, e.tokens, strict=True)) for e in engines]
    left = [float(of[0][0]) for of in steps]
    ends, at = [0.0] * len(engines), 0.0
    while any(steps):
        busy = [bool(of) and e.begin_ns <= at for e, of in zip(engines, steps, strict=True)]
        asked = [
            e.num_ranks + of[0][1] * table.token_ns / of[0][0] if is_busy else 0.0
            for e, of, is_busy in zip(engines, steps, busy, strict=True)
        ]
        for i, is_busy in enumerate(busy):
            if not is_busy:
                continue
            beside = sum(e.num_ranks for j, e in enumerate(engines) if busy[j] and j != i)
            share = min(1.0, beside / (table.num_cores - 1))
            wanted = sum(asked) / table.num_cores if beside else 1.0
            left[i] -= part_ns / (max(1.0, wanted) + table.slow * share)
            ends[i] = at + part_ns
            if left[i] <= 0:
                steps[i].pop(0)
                left[i] += steps[i][0][0] if steps[i] else 0.0
        at += part_ns
    return ends


@pytest.mark.parametrize("token_ns", [0.0, 20.0])
@pytest.mark.parametrize(("num_cores", "num_engines"), [(2, 2), (2, 3), (4, 3), (8, 4)])
def test_steps_that_overlap_take_as_long_as_cores_allow(
    num_cores: int, num_engines: int, token_ns: float
) -> None:
    for seed in range(2):
        engines = drawn(seed, num_engines)
        table = HostTable(num_cores=num_cores, slow=SLOW, token_ns=token_ns)
        asked = sum(e.num_ranks + 7 * token_ns / 50 for e in engines)
        lost = max(1.0, asked / num_cores) + SLOW - 1  # at most, as a share
        found = zip(host_ends(table, engines), true_ends(table, engines), engines, strict=True)
        for end_ns, true_ns, engine in found:
            # Nobody pays for its own last step, nor for that of whoever was beside it.
            assert abs(end_ns - true_ns) <= 2 * lost * max(engine.lengths_ns) + len(engine.lengths_ns)
            assert end_ns > engine.begin_ns + sum(engine.lengths_ns), "it was not alone"


def test_who_is_alone_is_not_slowed_down() -> None:
    host = SimHost(HostTable(num_cores=2, slow=SLOW, token_ns=10.0))
    assert host.step("a", 1, 0, 100, 50) == 100
    assert host.step("b", 1, 100, 100, 0) == 100, "the other one is over"
    lost_ns = round(50 * (1 - 1 / (1 + SLOW)))
    assert host.step("a", 1, 150, 100, 0) == 100 + lost_ns, "50 ns of it are beside the other"
    assert host.step("b", 1, 400, 100, 0) == 100 + lost_ns, "it owes what it lost"
    assert host.step("b", 1, 900, 100, 0) == 100
    host.step("a", 1, 1000, 100, 0)
    host.died("a", 1000)
    assert host.step("b", 1, 1000, 100, 0) == 100, "the dead take no core"


def test_tokens_are_passed_on_by_cores_that_steps_want() -> None:
    """Of two cores, 0.6 are asked for by 30 tokens of 2 ns in 100 ns: 2.6 by all. A third core suffices."""
    for num_cores, factor in ((2, 1.3), (3, 1.0)):
        host = SimHost(HostTable(num_cores=num_cores, token_ns=2.0))
        host.step("a", 1, 0, 10_000, 3_000)
        assert host.step("b", 1, 0, 1000, 0) == pytest.approx(1000 * factor), "of whichever engine they are"


def test_what_a_step_lost_is_paid_by_a_step() -> None:
    host = SimHost(HostTable(num_cores=2, slow=SLOW))
    host.step("a", 1, 0, 100, 0)
    host.step("b", 1, 0, 50, 0)
    assert host.work("a", 1, 500, 10) == 10
    assert host.step("a", 1, 600, 100, 0) > 100


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
