"""Time what the scheduler of one engine costs: decode steps, one by one and at once, and an admission.

    python jobs/benchmarks/sched_cost.py [--steps 300] [--rounds 5] [--check]

The scheduler and the block manager alone, without an engine: `schedule` and `update` of steps whose tokens
are given. So many requests decode at once; blocks have 16 tokens. Caches: of full attention; the same with
prefix caching; full attention and a window.

    decode us    of a step in which every request decodes, per request
    quiet us     the same, of 16 such steps that are taken at once, as a simulation does
    admit us     of a step that ends one request and admits another of 1,000 prompt tokens, beyond one in
                 which all decode

Microseconds of the thread's processor time: medians of steps, the least of several rounds, in which the cases
take turns.

Target: decode under 5 us per request.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from rayk.kv.specs import FullAttentionSpec, SlidingWindowSpec
from rayk.sched.batching import Scheduler
from rayk.sched.quiet import advance, num_quiet_steps
from rayk.types.request import Request, SamplingParams

TARGET_US = 5.0
BLOCK = 16
PROMPT_TOKENS = 1_000
MAX_POSITIONS = 1 << 20
SPAN = 16
"""Steps that are taken at once."""
BATCHES = (8, 32, 128)
CACHES = ("full", "full, prefix caching", "full and window")
_HEADS = (BLOCK, 8, 64, 64, "bfloat16", 8)


@dataclass(frozen=True)
class Case:
    caches: str
    num_requests: int


@dataclass(frozen=True)
class Cost:
    decode_us: float
    quiet_us: float
    admit_us: float


def make_scheduler(case: Case) -> Scheduler:
    specs = [FullAttentionSpec(*_HEADS)]
    if "window" in case.caches:
        specs.append(SlidingWindowSpec(*_HEADS, 512))
    groups = tuple(KVCacheGroup(i, spec, (i,), 1) for i, spec in enumerate(specs))
    num_blocks = 2 * len(groups) * case.num_requests * 4 * PROMPT_TOKENS // BLOCK
    caching = "prefix" in case.caches
    manager = KVCacheManager(groups, num_blocks, prefix_caching=caching, secret=b"of a benchmark")
    return Scheduler(
        manager,
        max_batch_tokens=1 << 16,
        max_seqs=case.num_requests,
        max_positions=MAX_POSITIONS,
    )


class Bench:
    def __init__(self, case: Case) -> None:
        self._scheduler = make_scheduler(case)
        self._case = case
        self._draw = random.Random(0)
        self._count = 0
        for _ in range(case.num_requests):
            self._add()
        self._step()

    def _add(self) -> None:
        self._count += 1
        request = Request(
            request_id=f"request {self._count}",
            prompt_token_ids=tuple(self._draw.choices(range(1_000), k=PROMPT_TOKENS)),
            sampling=SamplingParams(max_tokens=MAX_POSITIONS, ignore_eos=True),
        )
        self._scheduler.add(request)

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        assert batch is not None
        self._scheduler.take_admitted()
        self._scheduler.update(batch, {r.request_id: 7 for r in batch.requests if r.needs_logits})

    def decode(self, num: int) -> float:
        """Microseconds of a step, the median of `num`."""
        return statistics.median(_timed(self._step) for _ in range(num))

    def quiet(self, num: int) -> float:
        """Microseconds of a step among those taken at once."""
        return statistics.median(_timed(self._span) for _ in range(num)) / SPAN

    def _span(self) -> None:
        num_steps = num_quiet_steps(self._scheduler, SPAN)
        assert num_steps == SPAN
        tokens = [[7] * num_steps for _ in self._scheduler.running]
        advance(self._scheduler, num_steps, tokens)

    def admit(self, num: int) -> float:
        """Microseconds of a step that admits, with the end of the request that came first."""
        found = []
        for _ in range(num):
            oldest = f"request {self._count - self._case.num_requests + 1}"
            self._add()
            found.append(_timed(partial(self._replace, oldest)))
        return statistics.median(found)

    def _replace(self, request_id: str) -> None:
        self._scheduler.remove(request_id)
        self._step()


def _timed(call: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - started) / 1e3


def measure(num_steps: int, num_rounds: int) -> dict[Case, Cost]:
    cases = [Case(caches, num) for caches in CACHES for num in BATCHES]
    benches = {case: Bench(case) for case in cases}
    found: dict[Case, list[tuple[float, float, float]]] = {case: [] for case in cases}
    fewer = max(1, num_steps // 10)
    for _ in range(num_rounds):
        for case, bench in benches.items():
            found[case].append((bench.decode(num_steps), bench.quiet(fewer), bench.admit(fewer)))
    costs = {}
    for case in cases:
        decode, quiet, admit = map(min, zip(*found[case], strict=True))
        costs[case] = Cost(decode / case.num_requests, quiet / case.num_requests, max(0.0, admit - decode))
    return costs


def missed(costs: dict[Case, Cost]) -> list[str]:
    return [
        f"{case.caches}, {case.num_requests} requests: {cost.decode_us:.1f} us per request and step, "
        f"the target is under {TARGET_US:g} us"
        for case, cost in costs.items()
        if cost.decode_us >= TARGET_US
    ]


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Run every case and add the table; returns the rows that miss the target."""
    costs = measure(options.steps, options.rounds)
    page.head("caches", "requests", "decode us", "quiet us", "admit us", "")
    for case, cost in costs.items():
        told = "met" if cost.decode_us < TARGET_US else "MISSED"
        times = f"{cost.decode_us:.2f}", f"{cost.quiet_us:.2f}", f"{cost.admit_us:.0f}"
        page.row(case.caches, case.num_requests, *times, told)
    page.say("")
    titles = ("caches", "requests", "decode_us", "quiet_us", "admit_us")
    measured = costs.items()
    page.data(titles, [(c.caches, c.num_requests, k.decode_us, k.quiet_us, k.admit_us) for c, k in measured])
    return missed(costs)


def main() -> int:
    return run(fill, __file__, title="What the scheduler of an engine costs", steps=300, rounds=5)


if __name__ == "__main__":
    sys.exit(main())
