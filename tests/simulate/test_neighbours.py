"""Steps on the cores of one machine slow each other down for as long as they overlap."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from rayk.costs import CostBook
from rayk.costs.losses import NO_LOSSES, StepLosses
from rayk.costs.table import HostTable
from rayk.simulate import SimOutcome, cell_arrivals, simulate_cell
from rayk.simulate.host import HostShare, SimHost
from tests.simulate.cells import BOOK, MODEL, pair_book, pair_cell, sim_cell

NAMES = {False: "prefill", True: "decode"}
SLOW = 0.4
ALL_ALIKE = StepLosses(**dict.fromkeys(StepLosses.__slots__, SLOW))


def losing(own: str, other: str, share: float) -> StepLosses:
    """StepLosses of one class of steps beside one other, and none beside."""
    return StepLosses(**{f"{own}_beside_{other}": share})


@dataclass
class Engine:
    """Takes steps one after the other, the first one at `begin_ns`: (what it takes alone, is it a decode
    step)."""

    begin_ns: int
    steps: list[tuple[int, bool]]
    num_ranks: int
    lost: dict[tuple[bool, bool], float]
    """(a decode step, beside a decode step) -> share of its time."""

    @property
    def losses(self) -> StepLosses:
        return StepLosses(**{f"{NAMES[a]}_beside_{NAMES[b]}": share for (a, b), share in self.lost.items()})


def drawn(seed: int, num_engines: int) -> list[Engine]:
    draw = random.Random(seed)
    kinds = list(product((False, True), repeat=2))
    return [
        Engine(
            begin_ns=draw.randrange(300),
            steps=[(draw.randrange(50, 400), draw.random() < 0.5) for _ in range(draw.randrange(5, 40))],
            num_ranks=draw.choice([1, 1, 2]),
            lost={kind: draw.choice([0.0, 0.2, 0.5, 1.0]) for kind in kinds},
        )
        for _ in range(num_engines)
    ]


def host_ends(num_cores: int, engines: list[Engine]) -> list[int]:
    """When each engine's last step ends, as SimHost has it: steps begin in the order of time."""
    host = SimHost(num_cores)
    shares = [HostShare(host, str(i), e.num_ranks, e.losses) for i, e in enumerate(engines)]
    now = [engine.begin_ns for engine in engines]
    left = [list(engine.steps) for engine in engines]
    while any(left):
        i = min((i for i, steps in enumerate(left) if steps), key=lambda i: (now[i], i))
        length_ns, is_decode = left[i].pop(0)
        now[i] += shares[i].step(now[i], length_ns, is_decode=is_decode)
    return now


def true_ends(num_cores: int, engines: list[Engine]) -> list[float]:
    """The same by time in small parts, in each of which everybody goes on at the pace of that moment: all
    alike where there are more ranks than cores, and slower by what each loses to each rank beside it."""
    part_ns = 0.5
    left = [[[float(ns), is_decode] for ns, is_decode in e.steps] for e in engines]
    ends, at = [0.0] * len(engines), 0.0
    while any(left):
        busy = [i for i, e in enumerate(engines) if left[i] and e.begin_ns <= at]
        decodes = {i: bool(left[i][0][1]) for i in busy}
        for i in busy:
            beside = [j for j in busy if j != i]
            ranks = sum(engines[j].num_ranks for j in beside)
            own = engines[i].num_ranks
            over = max(0.0, (own + ranks) / num_cores - 1) if beside else 0.0
            lost = sum(engines[j].num_ranks * engines[i].lost[decodes[i], decodes[j]] for j in beside)
            left[i][0][0] -= part_ns / (1 + over + lost / max(num_cores - 1, ranks))
            ends[i] = at + part_ns
        for i in busy:
            if left[i][0][0] <= 0:
                done = left[i].pop(0)
                if left[i]:
                    left[i][0][0] += done[0]
        at += part_ns
    return ends


@pytest.mark.parametrize(("num_cores", "num_engines"), [(2, 2), (2, 3), (4, 3), (8, 4)])
def test_steps_that_overlap_take_as_long_as_cores_allow(num_cores: int, num_engines: int) -> None:
    for seed in range(3):
        engines = drawn(seed, num_engines)
        over = max(0.0, sum(e.num_ranks for e in engines) / num_cores - 1)
        found = zip(host_ends(num_cores, engines), true_ends(num_cores, engines), engines, strict=True)
        for end_ns, true_ns, engine in found:
            lost = over + max(engine.lost.values())  # at most, as a share
            longest = max(ns for ns, _ in engine.steps)
            # Nobody pays for its own last step, nor for that of whoever was beside it.
            assert abs(end_ns - true_ns) <= 2 * lost * longest + len(engine.steps)


def test_two_engines_are_worked_out_by_hand() -> None:
    """A's prefill steps take 1.5 times as long beside decode steps, B's decode steps twice as long beside
    prefill steps; what else they have must not count."""
    host = SimHost(2)
    junk = dict.fromkeys(StepLosses.__slots__, 7.0)
    a = HostShare(host, "a", 1, StepLosses(**junk | {"prefill_beside_decode": 0.5}))
    b = HostShare(host, "b", 1, StepLosses(**junk | {"decode_beside_prefill": 1.0}))
    assert a.step(0, 120, is_decode=False) == 120, "nobody is there yet"
    assert b.step(0, 120, is_decode=True) == 240, "all of it beside A, which goes on"
    # A did 80 of its 120 beside B: 40 are due, and 60.
    assert a.step(120, 60, is_decode=False) == 150
    assert b.step(240, 60, is_decode=True) == 120, "it lost what it was told"
    assert a.step(1000, 100, is_decode=False) == 100, "it did, too"
    # Of 120, it was beside A for 30 alone, and did 15 and 90: 45 more than it had to.
    assert b.step(2000, 100, is_decode=True) == 55


@pytest.mark.parametrize(("own", "other"), list(product((False, True), repeat=2)))
def test_each_class_loses_to_each_class_what_was_told(own: bool, other: bool) -> None:
    """One constant is planted: a step loses by it if it is of the first class, and beside one of the
    second."""
    for is_decode, beside in product((False, True), repeat=2):
        host = SimHost(2)
        host.step("b", 1, 0, 10_000, is_decode=beside, losses=NO_LOSSES)
        losses = losing(NAMES[own], NAMES[other], 0.25)
        took_ns = host.step("a", 1, 0, 1000, is_decode=is_decode, losses=losses)
        assert took_ns == (1250 if (is_decode, beside) == (own, other) else 1000)


def test_who_is_alone_is_not_slowed_down() -> None:
    host = SimHost(2)
    a, b = (HostShare(host, name, 1, ALL_ALIKE) for name in "ab")
    assert a.step(0, 100, is_decode=True) == 100
    assert b.step(100, 100, is_decode=True) == 100, "the other one is over"
    lost_ns = round(50 * (1 - 1 / (1 + SLOW)))
    assert a.step(150, 100, is_decode=True) == 140, "the other may go on"
    assert b.step(400, 100, is_decode=True) == 100 + lost_ns, "it owes what it lost"
    assert b.step(900, 100, is_decode=True) == 100
    assert a.step(1000, 100, is_decode=True) == 100 - 26, (
        "of 140 the other was there for 50: 36 + 90 were done"
    )
    host.died("a", 1000)
    assert b.step(1000, 100, is_decode=True) == 100, "the dead take no core"


def test_a_step_gives_back_at_most_half_of_itself() -> None:
    """A was told 400 beside B, which was over at once: it did all but 300 too much."""
    host = SimHost(2)
    a, b = (HostShare(host, name, 1, losing("prefill", "decode", 3.0)) for name in "ab")
    assert b.step(0, 0, is_decode=True) == 0
    assert b.step(0, 1, is_decode=True) == 1
    assert a.step(0, 100, is_decode=False) == 400
    assert [a.step(1000 * n, 200, is_decode=True) for n in (1, 2, 3, 4)] == [100, 100, 101, 200]


def test_what_a_step_lost_is_paid_by_a_step() -> None:
    host = SimHost(2)
    a, b = (HostShare(host, name, 1, ALL_ALIKE) for name in "ab")
    a.step(0, 100, is_decode=True)
    b.step(0, 50, is_decode=True)
    assert a.work(500, 10) == 10
    assert a.step(600, 100, is_decode=True) > 100


def test_work_beside_steps_waits_for_a_core_and_counts_as_the_step_before_it() -> None:
    """Hand-overs were measured beside others: only cores that lack are on top."""
    losses = losing("decode", "prefill", SLOW)
    for num_cores, took_ns in ((2, 100), (1, 200)):
        host = SimHost(num_cores)
        host.step("a", 1, 0, 10_000, is_decode=True, losses=ALL_ALIKE)
        assert host.work("b", 1, 0, 100) == took_ns
    for is_decode in (False, True):
        host = SimHost(2)
        host.step("a", 1, 0, 10, is_decode=is_decode, losses=NO_LOSSES)
        host.work("a", 1, 100, 10_000)
        assert host.step("b", 1, 100, 100, is_decode=True, losses=losses) == (100 if is_decode else 140)


def with_losses(book: CostBook, losses: StepLosses, num_cores: int = 2) -> CostBook:
    assert book.any_engine is not None
    return replace(
        book, any_engine=replace(book.any_engine, losses=losses), host=HostTable(num_cores=num_cores)
    )


def simulated(losses: StepLosses, num_cores: int = 2, **changes: Any) -> SimOutcome:
    cell = sim_cell(prefill={"num_engines": 2}, sampling={"max_tokens": 30}, **changes)
    prompts = [tuple(range(i, i + 5)) for i in range(4)]
    return simulate_cell(cell, MODEL, cell_arrivals(cell, prompts), with_losses(BOOK, losses, num_cores))


def test_engines_of_one_machine_share_its_cores() -> None:
    alone, beside, many = simulated(NO_LOSSES), simulated(ALL_ALIKE), simulated(ALL_ALIKE, 5)
    ratios = []
    for other in (beside, many):
        first, last = (max(row.token_times_ns[-1] for row in o.requests) for o in (alone, other))
        ratios.append(last / first)
    assert ratios[0] == pytest.approx(1 + SLOW, rel=0.04)
    assert ratios[1] == pytest.approx(1 + SLOW / 4, rel=0.02)
    assert simulated(ALL_ALIKE).requests == beside.requests


@pytest.mark.parametrize(("own", "other"), list(product(("prefill", "decode"), repeat=2)))
def test_a_pairs_steps_lose_by_what_both_do(own: str, other: str) -> None:
    """A prefill engine and a decode engine: of the four constants each meets one."""
    cell = pair_cell(sampling={"max_tokens": 20})
    prompts, due_ns = [tuple(range(i, i + 40)) for i in range(12)], [1_200_000 * i for i in range(12)]
    spent = []
    for losses in (NO_LOSSES, losing(own, other, 0.5)):
        arrivals = cell_arrivals(cell, prompts, due_ns=due_ns)
        outcome = simulate_cell(cell, MODEL, arrivals, with_losses(pair_book(cell), losses))
        alike = [row for row in outcome.steps if row.num_requests == 1]
        spent.append(
            {
                role: max(row.model_ns for row in alike if row.engine.startswith(role))
                for role in ("prefill", "decode")
            }
        )
    slower = {role for role in spent[0] if spent[1][role] > 1.1 * spent[0][role]}
    assert slower == ({own} if own != other else set())
