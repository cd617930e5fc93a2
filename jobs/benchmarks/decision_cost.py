"""Time what the coordinator does for one request: place it, hear of its first token, end it.

    python jobs/benchmarks/decision_cost.py [--decisions 400] [--rounds 5] [--out DIR] [--check]
    python jobs/benchmarks/decision_cost.py --placements 10000000

All of it as a server's fleet does it, but without Ray: the policy's decision, the loads' book, the accounts
of fronts, the waiting room's pace, and what comes is unpickled first. So many requests are on engines
meanwhile; for each new one another ends. Half of the engines prefill and half decode, with TP sizes 1, 2 and
4 in turn. Prompts have 1,024 tokens, of which 512 are one of 100 common beginnings. One request in two
belongs to one of 1,000 sessions. The index of prefixes is full.

A row is one policy and number of engines, a column one number of running requests. Microseconds of the
thread's processor time for one request, all three calls together: the median over decisions and, in brackets,
the 99th percentile, each the least of several rounds, in which the columns take turns: what else the machine
does only adds. `growth` is the cost at the largest number of running requests over that at the smallest. More
tables: prompts of other lengths, what a front spends on a prompt before (its keys are made there, once, where
the tokens are), and what a place in the waiting room costs.

Target: every median at the coordinator under 200 us, and flat: growth below 1.5 (what there is of it are
cache misses), and with 1,000 engines not 1.5 times that of 64.

With --placements, in place of all that: so many placements by each policy, the book of loads and the policy
alone, on 1,000 engines with 5,000 requests on them; the mean in microseconds, with the first token and the
end of a request, and the process's peak memory after a tenth of them and after all. Target: under 40 us.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import pickle
import random
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rayk.sched.admission import AdmissionController, News
from rayk.sched.dispatcher import Dispatcher, DispatchRules
from rayk.sched.loads import LoadBook
from rayk.sched.policies import POLICIES, get_policy
from rayk.sched.policy import PlacementRequest, PolicySettings
from rayk.sched.request_describer import RequestDescriber, new_secret
from rayk.sched.waiting_room import WaitingRoom

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run

TARGET_US = 200.0
MAX_GROWTH = 1.5
RUNNING = (10, 1_000, 10_000)
ENGINES = (4, 64, 1_000)
PLACEMENT_TARGET_US = 40.0
PLACED = 5_000
"""Requests on engines where placements alone are timed."""
PROMPT_TOKENS = 1_024
OTHER_PROMPTS = (64, 8_192, 16_384)
NUM_BEGINNINGS = 100
NUM_SESSIONS = 1_000
FRONT = "front"
VOCABULARY = list(range(128_000))
SETTINGS = PolicySettings(index_blocks=16_384)
"""So small that an index this long is full before the first decision that is timed."""


@dataclass(frozen=True)
class Case:
    policy: str
    num_engines: int
    num_running: int
    num_prompt_tokens: int = PROMPT_TOKENS


class Requests:
    """An endless row of them, each unlike the others."""

    def __init__(self, policy: str, num_prompt_tokens: int, seed: int = 0) -> None:
        self._describer = RequestDescriber(policy, SETTINGS, new_secret())
        self._draw = random.Random(seed)
        half = num_prompt_tokens // 2
        self._beginnings = [self._tokens(half) for _ in range(NUM_BEGINNINGS)]
        self._num_rest = num_prompt_tokens - half
        self._count = 0

    def next(self) -> PlacementRequest:
        return self.ask(self.prompt())

    def prompt(self) -> tuple[int, ...]:
        return self._draw.choice(self._beginnings) + self._tokens(self._num_rest)

    def ask(self, prompt: tuple[int, ...]) -> PlacementRequest:
        self._count += 1
        draw = self._draw
        session = f"session {draw.randrange(NUM_SESSIONS)}" if self._count % 2 else None
        return self._describer.describe(
            f"request {self._count}", prompt, max_tokens=draw.randint(1, 512), session=session
        )

    def _tokens(self, num: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(VOCABULARY, k=num))


def _num_ranks(engine: int) -> int:
    return (1, 2, 4)[engine // 2 % 3]


class Bench:
    def __init__(self, case: Case) -> None:
        self._requests = Requests(case.policy, case.num_prompt_tokens)
        dispatcher = Dispatcher(
            get_policy(case.policy, SETTINGS), DispatchRules(hands_over=True, max_waiting=512)
        )
        self._admission = AdmissionController(dispatcher, lambda _: None)
        for i in range(case.num_engines):
            self._admission.open(f"engine{i}", "decode" if i % 2 else "prefill", _num_ranks(i))
        self._running: deque[str] = deque()
        self._num_running = case.num_running

    async def fill(self) -> None:
        """Bring the requests on that run meanwhile."""
        while len(self._running) < self._num_running:
            asked = self._requests.next()
            await self._place(asked)
            self._running.append(asked.request_id)

    async def fill_index(self, num: int) -> None:
        """So many requests come and go."""
        for _ in range(num):
            asked = self._requests.next()
            await self._place(asked)
            self._running.append(asked.request_id)
            self._admission.tell(FRONT, News(ended=(self._running.popleft(),)))

    async def decide(self, num: int) -> list[float]:
        """Microseconds of `num` requests."""
        found = []
        for pickled in [pickle.dumps(self._requests.next()) for _ in range(num)]:
            oldest = self._running.popleft()
            started = time.thread_time_ns()
            asked = pickle.loads(pickled)  # noqa: S301 - our own
            await self._place(asked)
            self._admission.tell(FRONT, News(prefilled=(asked.request_id,)))
            self._admission.tell(FRONT, News(ended=(oldest,)))
            found.append((time.thread_time_ns() - started) / 1e3)
            self._running.append(asked.request_id)
        return found

    async def _place(self, asked: PlacementRequest) -> None:
        await self._admission.place(FRONT, asked, priority=0, deadline_s=600.0, again=False)


@dataclass(frozen=True)
class Cost:
    median_us: float
    p99_us: float


async def time_cases(cases: Sequence[Case], num_decisions: int, num_rounds: int) -> dict[Case, Cost]:
    benches = {case: Bench(case) for case in cases}
    for case, bench in benches.items():
        await bench.fill()
        await bench.fill_index(1_200 if case.num_prompt_tokens <= PROMPT_TOKENS else 150)
    medians: dict[Case, list[float]] = {case: [] for case in cases}
    p99s: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(num_rounds):
        for case, bench in benches.items():
            found = await bench.decide(num_decisions)
            medians[case].append(statistics.median(found))
            p99s[case].append(statistics.quantiles(found, n=100)[98])
    return {case: Cost(min(medians[case]), min(p99s[case])) for case in cases}


def time_front(num_prompt_tokens: int, num_rounds: int) -> tuple[float, int]:
    """Microseconds to describe a prompt to `prefix_aware`, and bytes of the description."""
    requests, found = Requests("prefix_aware", num_prompt_tokens), []
    for _ in range(40 * num_rounds):
        prompt = requests.prompt()
        started = time.thread_time_ns()
        asked = requests.ask(prompt)
        found.append((time.thread_time_ns() - started) / 1e3)
    return statistics.median(found), len(pickle.dumps(asked))


def time_waiting_room(num_waiting: int, num_rounds: int) -> tuple[float, float]:
    """Microseconds to (enter and leave, enter and be let out) where so many wait."""
    draw, room = random.Random(0), WaitingRoom[None](num_waiting + 1)
    names = [str(i) for i in range(num_waiting)]
    for i, name in enumerate(names):
        room.enter(
            name, None, priority=draw.randrange(3), deadline_ns=draw.randrange(10**9, 10**10), now_ns=i
        )
    left, popped = [], []
    for i in range(2_000 * num_rounds):
        deadline_ns, name = draw.randrange(10**9, 10**10), draw.choice(names)
        started = time.thread_time_ns()
        room.leave(name)
        room.enter(name, None, priority=i % 3, deadline_ns=deadline_ns, now_ns=0)
        between = time.thread_time_ns()
        room.enter("new", None, priority=-1, deadline_ns=deadline_ns, now_ns=0)
        room.pop(0)
        popped.append((time.thread_time_ns() - between) / 1e3)
        left.append((between - started) / 1e3)
    return statistics.median(left), statistics.median(popped)


def growth(costs: dict[Case, Cost], case: Case) -> float:
    """Of the median, from the smallest number of running requests to the largest."""
    return costs[replace(case, num_running=RUNNING[-1])].median_us / costs[case].median_us


def time_placements(policy: str, num: int) -> tuple[float, float, float]:
    """(microseconds of one, MiB after a tenth of them, MiB after all)."""
    chooser, book = get_policy(policy, SETTINGS), LoadBook()
    for i in range(ENGINES[-1]):
        book.add(f"engine{i}", _num_ranks(i))
    sides = [book.of(f"engine{i}" for i in range(side, ENGINES[-1], 2)) for side in (0, 1)]
    source = Requests(policy, PROMPT_TOKENS)
    requests = [source.next() for _ in range(2 * PLACED)]
    memory: list[float] = []
    started = time.thread_time_ns()
    for i in range(num):
        if i >= PLACED:
            over = book.ended(requests[(i - PLACED) % len(requests)].request_id)
            assert over is not None
            chooser.ended(*over)
        asked = requests[i % len(requests)]
        book.placed(asked, chooser.place(asked, *sides))
        book.prefilled(asked.request_id)
        if i + 1 in (num // 10, num):
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return (time.thread_time_ns() - started) / 1e3 / num, memory[0], memory[-1]


def fill_placements(num: int, page: Page) -> list[str]:
    """Time each policy alone; returns those that miss the target."""
    found = []
    page.head("policy", "placements", "us", "MiB after a tenth", "MiB after all")
    for policy in POLICIES:
        took, before, after = time_placements(policy, num)
        page.row(policy, f"{num:,}", f"{took:.1f}", f"{before:.0f}", f"{after:.0f}")
        if took >= PLACEMENT_TARGET_US:
            found.append(
                f"{policy}: {took:.1f} us a placement, the target is under {PLACEMENT_TARGET_US:g} us"
            )
    page.say("")
    return found


def add_table(page: Page, costs: dict[Case, Cost]) -> None:
    """Microseconds: median (p99)."""
    page.head("policy", "engines", "prompt", *(f"{num:,} running" for num in RUNNING), "growth", "")
    for case in (c for c in costs if c.num_running == RUNNING[0]):
        row = [costs[replace(case, num_running=num)] for num in RUNNING]
        cells = [f"{cost.median_us:.0f} ({cost.p99_us:.0f})" for cost in row]
        is_met = not _missed(costs, case)
        name = (case.policy, case.num_engines, f"{case.num_prompt_tokens:,}")
        page.row(*name, *cells, f"{growth(costs, case):.2f}", "met" if is_met else "MISSED")
    page.say("")


def missed(costs: dict[Case, Cost]) -> list[str]:
    found = [line for case in costs if case.num_running == RUNNING[0] for line in _missed(costs, case)]
    for case in (c for c in costs if c.num_engines == ENGINES[-1]):
        by = costs[case].median_us / costs[replace(case, num_engines=ENGINES[-2])].median_us
        if by >= MAX_GROWTH:
            found.append(
                f"{case.policy}, {case.num_running:,} running: {by:.2f} times as much with {ENGINES[-1]:,} "
                f"engines as with {ENGINES[-2]}, the limit is {MAX_GROWTH:g}"
            )
    return found


def _missed(costs: dict[Case, Cost], case: Case) -> list[str]:
    row = f"{case.policy}, {case.num_engines} engines, prompt {case.num_prompt_tokens:,}"
    medians = [(num, costs[replace(case, num_running=num)].median_us) for num in RUNNING]
    found = [
        f"{row}, {num:,} running: {us:.0f} us, the target is under {TARGET_US:.0f} us"
        for num, us in medians
        if us >= TARGET_US
    ]
    by = growth(costs, case)
    if by >= MAX_GROWTH:
        found.append(f"{row}: growth {by:.2f}, the limit is {MAX_GROWTH:g}")
    return found


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Run every case and add the tables, in microseconds; returns the rows that miss a target."""
    if options.placements:
        return fill_placements(options.placements, page)
    sizes = options.decisions, options.rounds
    costs: dict[Case, Cost] = {}
    for policy, num in itertools.product(POLICIES, ENGINES):
        costs |= asyncio.run(time_cases([Case(policy, num, n) for n in RUNNING], *sizes))
        print(f"{policy}, {num} engines: done", file=sys.stderr)
    others: dict[Case, Cost] = {}
    for num in OTHER_PROMPTS:
        others |= asyncio.run(time_cases([Case("prefix_aware", 64, n, num) for n in RUNNING], *sizes))
    add_table(page, costs)
    add_table(page, others)
    page.head("prompt", "keys", "bytes to the coordinator")
    for num in sorted((PROMPT_TOKENS, *OTHER_PROMPTS)):
        took, num_bytes = time_front(num, options.rounds)
        page.row(f"{num:,}", f"{took:.0f}", f"{num_bytes:,}")
    page.say("")
    page.head("waiting", "leave + enter", "enter + pop")
    for num in RUNNING:
        left, popped = time_waiting_room(num, options.rounds)
        page.row(f"{num:,}", f"{left:.1f}", f"{popped:.1f}")
    titles = ("policy", "engines", "prompt_tokens", "running", "median_us", "p99_us")
    measured = (costs | others).items()
    names = [(c.policy, c.num_engines, c.num_prompt_tokens, c.num_running) for c, _ in measured]
    times = [(f"{cost.median_us:.2f}", f"{cost.p99_us:.2f}") for _, cost in measured]
    page.data(titles, [(*name, *took) for name, took in zip(names, times, strict=True)])
    return missed(costs) + missed(others)


def main() -> int:
    title = "What a coordinator does for one request"
    return run(fill, __file__, title=title, decisions=400, rounds=5, placements=0)


if __name__ == "__main__":
    sys.exit(main())
