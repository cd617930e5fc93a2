"""What metrics cost: calls per step x measured cost per call, against the step's time.

    python jobs/benchmarks/metrics_cost.py [--check] [--record]

Engines of a tiny model in this process (CPU, a thread per rank) decode batches of requests: alone (TP 1
and 2), and as the consumer of a hand-over (TP 1 to 1), whose steps receive KV, too. Each rank's meter
notes each step, counts its operations and passes values on. All times are processor time of the rank's
own thread, without its waits for the other one, so that a busy machine changes little; Ray's calls are
counted, and priced apart:

    step us  of a turn with a step, without its meter
    calls    Ray calls per step, counted by a sink that does nothing else
    own us   the meter's own work per step: sums, the count of operations, the numbers of blocks; at TP 2 also
             the clock around each collective (counted, and priced apart)
    share    (calls x us/call + own us) / step us; --check: below 2 %

Recording steps (engine.record_steps) is priced apart: no row has it.

Whoever gathers the tokens (a cell's coordinator, a server's front: another process) tells of each request
when it is over. Its row has that work per step of the batch: requests' calls and a flush every half second,
folded gaps.

Steps of real models take 5 to 50 ms: a tiny model's are the worst case there is.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import tempfile
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from rayk.actors.deployment_metrics import begin_outcomes, report_request
from rayk.actors.environment import own_cluster
from rayk.actors.ray_metrics import RaySink
from rayk.actors.ray_private import ray_environment
from rayk.engine.build import ThreadEngine
from rayk.engine.leader import Leader, RequestEvent
from rayk.engine.rank import EngineRank
from rayk.engine.record import StepRecorder
from rayk.engine.stats import StepStats, rank_stats
from rayk.handover.commands import Connect, Describe
from rayk.handover.extension import TransferExtension
from rayk.handover.handover import TransferHandover
from rayk.handover.transfer_metrics import watch_handover
from rayk.metrics import Meter
from rayk.metrics.meter import FLUSH_S
from rayk.oracle.checkpoint import write_checkpoint
from rayk.parallel.shard import EngineShape
from rayk.parallel.timed import TimedComm
from rayk.reports.fields import STAGES
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.ticket import TransferTicket
from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams
from rayk.types.rows import RequestRow

LIMIT_PERCENT = 2.0
BATCHES = (1, 8, 32)
TP_SIZES = (1, 2)
NUM_TOKENS = 256
NUM_CALLS = 20_000
KNOWN = {"model": "m", "engine": "e", "role": "decode", "rank": "0"}


class CountingSink:
    """Counts what would be Ray calls, by kind. Implements metrics.MetricsSink."""

    def __init__(self) -> None:
        self.calls: Counts[str] = Counts()

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        self.calls["inc"] += 1

    def set(self, name: str, value: float, **labels: str) -> None:
        self.calls["set"] += 1

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.calls["observe"] += 1

    def observe_folded(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """As many calls as RaySink makes: of each bucket from the first that grew, count and sum."""
        num_empty = next((i for i, number in enumerate(counts) if number), 0)
        self.calls["record"] += len(counts) - num_empty + 2

    def relabel(self, **labels: str) -> None:
        pass


class NoComm:
    """A comm whose collectives do nothing: what is left is the clock around them."""

    rank, size, name = 0, 2, "none"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class NoStats:
    """Counts nothing. Implements engine.loop.TurnStats."""

    def stepped(self, *args: object) -> None:
        pass

    def turned(self) -> None:
        pass


class CountedComm(TimedComm):
    num_calls = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.num_calls += 1
        return super().all_gather(tensor)


class TimedStats(StepStats):
    """Counts that know what they cost, and what turns with a step do, in their thread's processor time."""

    cost_ns = 0
    step_ns = 0
    _since_ns = 0

    def stepped(self, *args: object) -> None:
        began = time.thread_time_ns()
        self.step_ns += began - self._since_ns
        super().stepped(*args)  # type: ignore[arg-type]
        self.cost_ns += time.thread_time_ns() - began

    def turned(self) -> None:
        began = time.thread_time_ns()
        super().turned()
        self._since_ns = time.thread_time_ns()
        self.cost_ns += self._since_ns - began


@dataclass(frozen=True)
class Prices:
    """Microseconds of a Ray call by kind, and of timing a collective."""

    calls: dict[str, float]
    clock_us: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rank, or whoever gathers the tokens, at one batch size."""

    what: str
    rank: int | None
    """None: of no engine."""
    batch: int
    num_steps: int
    step_us: float
    calls: dict[str, float]
    """Per step, by kind."""
    own_us: float
    us_per_call: dict[str, float]

    @property
    def ray_us(self) -> float:
        return sum(self.calls[kind] * self.us_per_call[kind] for kind in self.calls)

    @property
    def percent(self) -> float:
        return 100 * (self.ray_us + self.own_us) / self.step_us


def price_calls() -> dict[str, float]:
    """Microseconds of one Ray call, by kind: the median of ten runs."""
    import ray
    from ray.util.metrics import Counter

    with ray_environment(own_cluster()), ExitStack() as stack:
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20)
        stack.callback(ray.shutdown)
        sink = RaySink(**KNOWN)
        bucket = Counter("rayk_priced_bucket_total", "-", tag_keys=(*KNOWN, "phase", "le"))
        actions: dict[str, Callable[[], None]] = {
            "inc": lambda: sink.add("rayk_steps_total", 1.0, phase="decode"),
            "set": lambda: sink.set("rayk_num_requests_running", 3.0),
            "observe": lambda: sink.observe("rayk_nixl_xfer_time_seconds", 0.003),
            "record": lambda: bucket._record(3.0, KNOWN | {"phase": "decode", "le": "0.003"}),
        }
        return {kind: statistics.median(_time(action) for _ in range(10)) for kind, action in actions.items()}


def price_clock() -> float:
    """Microseconds that timing a collective adds to it: the median of ten runs."""
    plain, tensor = NoComm(), torch.zeros(1)
    timed = TimedComm(plain)  # type: ignore[arg-type]
    with_clock = statistics.median(_time(lambda: timed.all_reduce(tensor)) for _ in range(10))
    return with_clock - statistics.median(_time(lambda: plain.all_reduce(tensor)) for _ in range(10))


def price_records() -> dict[int, float]:
    """Microseconds that recording a decode step takes, by its number of requests: the median of ten runs."""
    pool = SimpleNamespace(num_free_blocks=9, num_cached_blocks=3)
    scheduler = SimpleNamespace(num_running=1, num_waiting=0)
    leader: Any = SimpleNamespace(scheduler=scheduler, manager=SimpleNamespace(pool=pool))
    found = {}
    for batch in BATCHES:
        recorder = StepRecorder(leader, NoStats())
        requests = tuple(
            ScheduledRequest(
                request_id=f"r{i}",
                row=i,
                num_computed_tokens=100,
                token_ids=(1,),
                new_block_ids=(),
                needs_logits=True,
            )
            for i in range(batch)
        )
        stepped = partial(recorder.stepped, ScheduledBatch(step=1, requests=requests), 1_000_000, 900_000)
        found[batch] = statistics.median(_time(stepped) for _ in range(10))
    return found


def _time(action: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    for _ in range(NUM_CALLS // 10):
        action()
    return (time.thread_time_ns() - began) / (NUM_CALLS // 10) / 1e3


@dataclass
class Watched:
    sink: CountingSink
    stats: TimedStats
    comm: CountedComm | None

    def now(self) -> tuple[int, int, int, Counts[str]]:
        num_collectives = self.comm.num_calls if self.comm is not None else 0
        return self.stats.cost_ns, self.stats.step_ns, num_collectives, Counts(self.sink.calls)


def watching(watched: dict[int, Watched], rank: EngineRank, made: StepStats, sink: CountingSink) -> StepStats:
    """The counts of steps, timed, and their rank's collectives counted."""
    made.__class__ = TimedStats
    assert isinstance(made, TimedStats)
    comm = rank.comm if isinstance(rank.comm, TimedComm) else None
    if comm is not None:
        comm.__class__ = CountedComm
        assert isinstance(comm, CountedComm)
    watched[rank.comm.rank] = Watched(sink, made, comm)
    return made


def requests_of(batch: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    return [
        Request(request_id=f"r{i}", prompt_token_ids=tuple(range(1, 33)), sampling=sampling)
        for i in range(batch)
    ]


@contextmanager
def counted(
    what: str, engine: ThreadEngine, watched: dict[int, Watched], batch: int, prices: Prices
) -> Iterator[list[Row]]:
    """What an engine's ranks do within the block; its rows are there behind it. The engine's idle turns cost
    nobody anything."""
    before = {rank: w.now() for rank, w in watched.items()}
    num_before = engine.loops[0].times.num_steps
    rows: list[Row] = []
    yield rows
    num_steps = engine.loops[0].times.num_steps - num_before
    for rank, found in sorted(watched.items()):
        cost_ns, step_ns, num_collectives, calls = found.now()
        cost_0, step_0, collectives_0, calls_0 = before[rank]
        per_step = (num_collectives - collectives_0) / num_steps
        rows.append(
            Row(
                what=what,
                rank=rank,
                batch=batch,
                num_steps=num_steps,
                step_us=(step_ns - step_0) / num_steps / 1e3,
                calls={k: (calls[k] - calls_0[k]) / num_steps for k in prices.calls},
                own_us=(cost_ns - cost_0) / num_steps / 1e3 + per_step * prices.clock_us,
                us_per_call=prices.calls,
            )
        )


def config_of(model: Path, tp: int, batch: int) -> EngineConfig:
    return EngineConfig(
        model=str(model), tp=tp, num_blocks=64 + batch * 24, max_seqs=batch, prefix_caching=True
    )


def measure_alone(model: Path, tp: int, batch: int, prices: Prices) -> list[Row]:
    """Decode `batch` requests together; a row per rank."""
    watched: dict[int, Watched] = {}

    def stats(rank: EngineRank, leader: Leader | None) -> StepStats:
        sink = CountingSink()
        return watching(watched, rank, rank_stats(Meter(sink), rank, leader), sink)

    with ThreadEngine(config_of(model, tp, batch), make_stats=stats) as engine:
        with counted(f"alone, TP {tp}", engine, watched, batch, prices) as rows:
            engine.generate(requests_of(batch))
        return rows


class Side:
    """An engine of a hand-over, over agents that copy memory."""

    def __init__(self, name: str, config: EngineConfig, network: LocalNetwork) -> None:
        self.handover = TransferHandover(engine=name, epoch=1, shape=EngineShape())
        self.watched: dict[int, Watched] = {}
        sink = CountingSink()
        meter = Meter(sink)
        watch_handover(meter, self.handover)

        def stats(rank: EngineRank, leader: Leader | None) -> StepStats:
            return watching(self.watched, rank, rank_stats(meter, rank, leader), sink)

        def extension(rank: EngineRank) -> TransferExtension:
            agent = LocalAgent(f"{name}.0", network)
            return TransferExtension(rank, agent, engine=name, epoch=1, lease_s=600.0, meter=meter)

        self.engine = ThreadEngine(
            config, name=name, make_extension=extension, handover=self.handover, make_stats=stats
        )


def measure_consumer(model: Path, batch: int, prices: Prices) -> list[Row]:
    """Receive `batch` requests from another engine and decode them together; the consumer's row."""
    network, config = LocalNetwork(), config_of(model, 1, batch)
    p, d = Side("p", config, network), Side("d", config, network)
    events: dict[str, queue.SimpleQueue[RequestEvent]] = {}
    with p.engine, d.engine:
        sides: Any = tuple(tuple(s.engine.leader.call(Describe()).result(60)) for s in (p, d))
        for side in (d, p):
            side.engine.leader.call(Connect(*sides)).result(60)
        requests = requests_of(batch)
        for r in requests:
            events[r.request_id] = queue.SimpleQueue()
            p.handover.submit(r, events[r.request_id].put, hand_over=True)
        prefilled = {r.request_id: p.engine.collect(events[r.request_id]) for r in requests}
        with counted("consumer, TP 1 to 1", d.engine, d.watched, batch, prices) as rows:
            for r in requests:
                done = prefilled[r.request_id]
                assert isinstance(done.payload, TransferTicket), done
                tokens = tuple(done.token_ids)
                d.handover.submit_decode(r, done.payload, tokens, 60.0, events[r.request_id].put)
            for r in requests:
                ended = d.engine.collect(events[r.request_id], into=prefilled[r.request_id])
                assert ended.error is None, ended
        return rows


def measure_gatherer(batch: int, step_us: float, us_per_call: dict[str, float]) -> Row:
    """A coordinator or a front tells of `batch` requests that took `NUM_TOKENS` steps of so long together."""
    counting = CountingSink()
    meter = Meter(counting)
    begin_outcomes(meter)
    meter.flush()
    counting.calls.clear()
    step_ns = round(step_us * 1e3)
    times = [(i + 1) * step_ns for i in range(NUM_TOKENS)]
    stages = dict.fromkeys(STAGES, step_ns)
    num_flushes = 1 + round(NUM_TOKENS * step_us / 1e6 / FLUSH_S)
    began = time.thread_time_ns()
    for i in range(batch):
        row = RequestRow(
            cell_id="",
            repeat=0,
            request_id=f"r{i}",
            prompt_index=0,
            prompt_token_ids=[1],
            num_prompt_tokens=1,
            arrival_ns=0,
            finish_reason="length",
            token_times_ns=times,
            stage_ns=stages,
        )
        report_request(meter, row)
    for _ in range(num_flushes):
        meter.flush()
    return Row(
        what="coordinator or front",
        rank=None,
        batch=batch,
        num_steps=NUM_TOKENS,
        step_us=step_us,
        calls={k: counting.calls[k] / NUM_TOKENS for k in us_per_call},
        own_us=(time.thread_time_ns() - began) / NUM_TOKENS / 1e3,
        us_per_call=us_per_call,
    )


def measure(model: Path, prices: Prices) -> list[Row]:
    rows = [row for tp in TP_SIZES for batch in BATCHES for row in measure_alone(model, tp, batch, prices)]
    for batch in BATCHES:
        (consumer,) = measure_consumer(model, batch, prices)
        rows += [consumer, measure_gatherer(batch, consumer.step_us, prices.calls)]
    return rows


TITLES = ("what", "rank", "batch", "steps", "step us", "calls/step", "Ray us/step", "own us/step", "share")


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per rank, and per batch that a coordinator or a front tells of; returns those above the
    limit."""
    torch.set_num_threads(1)
    prices = Prices(price_calls(), price_clock())
    told = ", ".join(f"{us:.2f} us ({kind})" for kind, us in prices.calls.items())
    page.say("The tiny qwen3 model, CPU; microseconds of processor time.", "")
    page.say(f"A Ray call costs {told}; timing a collective {prices.clock_us:.2f} us.", "")
    records = ", ".join(f"{us:.1f} us (of {num})" for num, us in price_records().items())
    page.say(f"Recording a step (engine.record_steps), by its requests: {records}.", "")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(write_checkpoint("qwen3", Path(folder) / "qwen3"), prices)
    page.head(*TITLES)
    for r in rows:
        times = (f"{r.step_us:.0f}", f"{sum(r.calls.values()):.2f}", f"{r.ray_us:.1f}", f"{r.own_us:.1f}")
        page.row(
            r.what, "-" if r.rank is None else r.rank, r.batch, r.num_steps, *times, f"{r.percent:.2f} %"
        )
    return missed(rows)


def main() -> int:
    return run(fill, __file__, title="What metrics cost a step")


def missed(rows: Sequence[Row]) -> list[str]:
    return [
        f"{row.what}, batch {row.batch}: {row.percent:.2f} %, the limit is below {LIMIT_PERCENT:g} %"
        for row in rows
        if row.percent >= LIMIT_PERCENT
    ]


if __name__ == "__main__":
    sys.exit(main())
