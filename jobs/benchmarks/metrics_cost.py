"""What metrics cost an engine's step: calls per step x measured cost per call, against the step's time.

    python jobs/benchmarks/metrics_cost.py [--check]

Engines of a tiny model in this process (TP 1 and 2, CPU, a thread per rank) decode batches of requests. Each
rank's meter notes each step, counts its operations and passes values on. All times are processor time of the
rank's own thread, without its waits for the other one, so that a busy machine changes little; Ray's calls are
counted, and priced apart:

    step us  of a turn with a step, without its meter
    calls    Ray calls per step, counted by a sink that does nothing else
    own us   the meter's own work per step: sums, the count of operations, the numbers of blocks; at TP 2 also
             the clock around each collective (counted, and priced apart)
    share    (calls x us/call + own us) / step us; --check: below 2 %

Steps of real models take 5 to 50 ms: a tiny model's are the worst case there is.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from rayk.actors.environment import prepare_environment
from rayk.actors.rank_meter import make_meter
from rayk.actors.ray_metrics import RaySink
from rayk.engine.build import ThreadEngine
from rayk.engine.leader import Leader
from rayk.engine.metering import StepMeter
from rayk.engine.rank import EngineRank
from rayk.metrics import BufferedSink
from rayk.oracle.checkpoint import write_checkpoint
from rayk.parallel.timed import TimedComm
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams

RESULTS = Path(__file__).parent / "results" / "metrics_cost.md"
LIMIT_PERCENT = 2.0
BATCHES = (1, 8, 32)
TP_SIZES = (1, 2)
NUM_TOKENS = 256
NUM_CALLS = 20_000
KNOWN = {"model": "m", "engine": "e", "role": "decode", "rank": "0"}


class CountingSink:
    """Counts what would be Ray calls, by kind. Implements metrics.MetricsSink."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """One call."""
        self.calls["inc"] += 1

    def set(self, name: str, value: float, **labels: str) -> None:
        """One call."""
        self.calls["set"] += 1

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One call."""
        self.calls["observe"] += 1

    def relabel(self, **labels: str) -> None:
        """No call."""


class NoComm:
    """A comm whose collectives do nothing: what is left is the clock around them."""

    rank, size, name = 0, 2, "none"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Nothing."""
        return tensor


class CountedComm(TimedComm):
    """Counts the collectives that it times."""

    num_calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See TimedComm."""
        self.num_calls += 1
        return super().all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See TimedComm."""
        self.num_calls += 1
        return super().all_gather(tensor)


class TimedMeter(StepMeter):
    """A meter that knows what it cost, and what turns with a step do, in its thread's processor time."""

    cost_ns = 0
    step_ns = 0
    _since_ns = 0

    def stepped(self, *args: object) -> None:
        """See StepMeter."""
        began = time.thread_time_ns()
        self.step_ns += began - self._since_ns
        super().stepped(*args)  # type: ignore[arg-type]
        self.cost_ns += time.thread_time_ns() - began

    def turned(self) -> None:
        """See StepMeter."""
        began = time.thread_time_ns()
        super().turned()
        self._since_ns = time.thread_time_ns()
        self.cost_ns += self._since_ns - began


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank at one batch size."""

    tp: int
    rank: int
    batch: int
    num_steps: int
    step_us: float
    calls: dict[str, float]
    """Per step, by kind."""
    own_us: float
    us_per_call: dict[str, float]

    @property
    def ray_us(self) -> float:
        """Of Ray's calls, per step."""
        return sum(self.calls[kind] * self.us_per_call[kind] for kind in self.calls)

    @property
    def percent(self) -> float:
        """Of the step's time."""
        return 100 * (self.ray_us + self.own_us) / self.step_us


def price_calls() -> dict[str, float]:
    """Microseconds of one Ray call, by kind: the median of ten runs."""
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
    try:
        sink = RaySink(**KNOWN)
        actions: dict[str, Callable[[], None]] = {
            "inc": lambda: sink.add("rayk_steps_total", 1.0, phase="decode"),
            "set": lambda: sink.set("rayk_num_requests_running", 3.0),
            "observe": lambda: sink.observe("rayk_step_seconds", 0.003, phase="decode"),
        }
        return {kind: statistics.median(_time(action) for _ in range(10)) for kind, action in actions.items()}
    finally:
        ray.shutdown()


def price_clock() -> float:
    """Microseconds that timing a collective adds to it: the median of ten runs."""
    plain, tensor = NoComm(), torch.zeros(1)
    timed = TimedComm(plain)  # type: ignore[arg-type]
    with_clock = statistics.median(_time(lambda: timed.all_reduce(tensor)) for _ in range(10))
    return with_clock - statistics.median(_time(lambda: plain.all_reduce(tensor)) for _ in range(10))


def _time(action: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    for _ in range(NUM_CALLS // 10):
        action()
    return (time.thread_time_ns() - began) / (NUM_CALLS // 10) / 1e3


@dataclass
class Watched:
    """What is counted of one rank."""

    sink: CountingSink
    meter: TimedMeter
    comm: CountedComm | None

    def now(self) -> tuple[int, int, int, Counter[str]]:
        """Cost and time of steps, collectives, calls."""
        num_collectives = self.comm.num_calls if self.comm is not None else 0
        return self.meter.cost_ns, self.meter.step_ns, num_collectives, Counter(self.sink.calls)


def measure(model: Path, tp: int, batch: int, us_per_call: dict[str, float], clock_us: float) -> list[Row]:
    """Decode `batch` requests together; a row per rank."""
    watched: dict[int, Watched] = {}

    def meter(rank: EngineRank, leader: Leader | None) -> StepMeter:
        sink = CountingSink()
        made = make_meter(BufferedSink(sink), rank, leader, None)
        made.__class__ = TimedMeter
        assert isinstance(made, TimedMeter)
        comm = rank.comm if isinstance(rank.comm, TimedComm) else None
        if comm is not None:
            comm.__class__ = CountedComm
            assert isinstance(comm, CountedComm)
        watched[rank.comm.rank] = Watched(sink, made, comm)
        return made

    config = EngineConfig(
        model=str(model), tp=tp, num_blocks=64 + batch * 24, max_seqs=batch, prefix_caching=True
    )
    with ThreadEngine(config, make_meter=meter) as engine:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        requests = [
            Request(request_id=f"r{i}", prompt_token_ids=tuple(range(1, 33)), sampling=sampling)
            for i in range(batch)
        ]
        # The engine's idle turns cost nobody anything: count from here to the last token.
        before = {rank: w.now() for rank, w in watched.items()}
        num_before = engine.loops[0].times.num_steps
        engine.generate(requests)
        num_steps = engine.loops[0].times.num_steps - num_before
        rows = []
        for rank, found in sorted(watched.items()):
            cost_ns, step_ns, num_collectives, calls = found.now()
            cost_0, step_0, collectives_0, calls_0 = before[rank]
            per_step = (num_collectives - collectives_0) / num_steps
            rows.append(
                Row(
                    tp=tp,
                    rank=rank,
                    batch=batch,
                    num_steps=num_steps,
                    step_us=(step_ns - step_0) / num_steps / 1e3,
                    calls={k: (calls[k] - calls_0[k]) / num_steps for k in us_per_call},
                    own_us=(cost_ns - cost_0) / num_steps / 1e3 + per_step * clock_us,
                    us_per_call=us_per_call,
                )
            )
        return rows


def table(rows: list[Row], clock_us: float, load: float) -> str:
    """The results as Markdown. `load`: of the machine, before this ran."""
    prices = rows[0].us_per_call
    machine = f"{platform.machine()}, {platform.python_version()}, ray {version('ray')}"
    lines = [
        "# What metrics cost a step",
        "",
        f"`python jobs/benchmarks/metrics_cost.py` on {machine}; the tiny qwen3 model, CPU; microseconds of",
        f"processor time of a rank. {os.cpu_count()} cores, load {load:.1f} when it began.",
        "",
        "A Ray call costs "
        + ", ".join(f"{us:.2f} us ({kind})" for kind, us in prices.items())
        + f"; timing a collective {clock_us:.2f} us.",
        "",
        "| TP | rank | batch | steps | step us | calls/step | Ray us/step | own us/step | share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.tp} | {r.rank} | {r.batch} | {r.num_steps} | {r.step_us:.0f} | {sum(r.calls.values()):.2f} | "
        f"{r.ray_us:.1f} | {r.own_us:.1f} | {r.percent:.2f} % |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the share is above the limit")
    args = parser.parse_args()
    prepare_environment()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    prices, clock_us = price_calls(), price_clock()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "qwen3"
        write_checkpoint("qwen3", model)
        rows = [
            row for tp in TP_SIZES for batch in BATCHES for row in measure(model, tp, batch, prices, clock_us)
        ]
    text = table(rows, clock_us, load)
    print(text)
    RESULTS.write_text(text, encoding="utf-8")
    worst = max(row.percent for row in rows)
    if args.check and worst >= LIMIT_PERCENT:
        print(f"{worst:.2f} % is above {LIMIT_PERCENT:g} %", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
