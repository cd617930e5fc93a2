"""Time what a decode step costs beside the model's forward pass.

    python jobs/benchmarks/control_plane.py [--steps 100] [--repeats 5] [--out DIR] [--check]

TP 1 runs in this process; TP 2 runs as two processes, over shared memory and over gloo. All requests
decode; each row is the median over repeats of the median over steps, in microseconds on rank 0:

    turn      from the moment rank 0 decides a step until its tokens are with their streams
    forward   of this, the decoder's forward pass up to the logits, its collectives included
    control   turn - forward: scheduling, block tables, header, broadcast, input tensors, attention metadata,
              sampling, delivery
    skew      what rank 0 waits in the first collective of the forward pass beyond a usual one (the median
              all-reduce of the same step): there the peer catches up, which begins a step only when it has
              the header. It is inside `forward`, but the control plane's doing
    total     control + skew, taken step by step: compared with the target
    peer idle between rank 1's turns (waiting for the next header); not on the critical path

Targets on a CPU: 1 ms at TP 1, 3 ms at TP 2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from rayk.engine.build import make_leader
from rayk.engine.leader import RequestEvent
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.engine.rank import EngineRank
from rayk.oracle.checkpoint import write_checkpoint
from rayk.parallel.comm import Comm
from rayk.parallel.factory import make_comm
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run

TARGET_US = {1: 1000.0, 2: 3000.0}
PROMPT_TOKENS = 16
WARM_UP_STEPS = 20
Given, Made = TypeVar("Given"), TypeVar("Made")
COLUMNS = ("turn", "forward", "control", "skew", "total", "peer idle")


@dataclass(frozen=True)
class Case:
    tp: int
    comm: str
    batch: int

    @property
    def name(self) -> str:
        return f"TP {self.tp} {self.comm} batch {self.batch}"


CASES = (
    *(Case(1, "local", batch) for batch in (1, 16)),
    *(Case(2, comm, batch) for comm in ("shm", "gloo") for batch in (1, 16)),
)


class TimedComm:
    """A comm that notes how long each collective on tensors, and each wait for a header, took."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.collective_ns: list[int] = []
        self.header_ns: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return _noted(self.collective_ns, self._inner.all_reduce, tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return _noted(self.collective_ns, self._inner.all_gather, tensor)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        return _noted(self.header_ns, self._inner.broadcast_bytes, payload)


def _noted(times_ns: list[int], call: Callable[[Given], Made], given: Given) -> Made:
    started = time.monotonic_ns()
    made = call(given)
    times_ns.append(time.monotonic_ns() - started)
    return made


def config_of(case: Case, model: str, num_steps: int) -> EngineConfig:
    num_tokens = PROMPT_TOKENS + num_steps
    return EngineConfig(
        model=model,
        tp=case.tp,
        num_blocks=2 + case.batch * (num_tokens // 16 + 2),
        max_batch_tokens=max(512, case.batch * PROMPT_TOKENS),
        max_seqs=case.batch,
    )


def run_rank(
    case: Case, model: str, rank: int, address: str, num_steps: int, num_repeats: int
) -> list[dict[str, float]]:
    """Rank 0: one row of medians per repeat. A peer: what it waited for headers, in the same rows."""
    torch.set_num_threads(1)
    kind = case.comm if case.tp > 1 else "auto"
    comm = TimedComm(make_comm(kind, rank, case.tp, address, "cpu", timeout_s=60).comm)
    config = config_of(case, model, WARM_UP_STEPS + num_steps)
    engine_rank = EngineRank(config, comm)
    try:
        if rank == 0:
            return [time_decode(engine_rank, comm, case, num_steps) for _ in range(num_repeats)]
        return [serve_peer(engine_rank, comm, num_steps) for _ in range(num_repeats)]
    finally:
        comm.close()


def serve_peer(rank: EngineRank, comm: TimedComm, num_steps: int) -> dict[str, float]:
    """A peer's loop until rank 0's leader stops; its idle time per step."""
    EngineLoop(rank, NoExtension(), None).run()
    waits = comm.header_ns[-num_steps - 1 : -1]
    comm.header_ns.clear()
    return {"peer idle": statistics.median(waits) / 1e3}


def time_decode(rank: EngineRank, comm: TimedComm, case: Case, num_steps: int) -> dict[str, float]:
    """Prefill a batch, warm up, then time `num_steps` decode steps of all its requests."""
    leader = make_leader(rank)
    loop = EngineLoop(rank, NoExtension(), leader)
    events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    max_tokens = WARM_UP_STEPS + num_steps + 1
    for i in range(case.batch):
        prompt = tuple(range(5 + i, 5 + i + PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        leader.submit(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling), events.put)
    for _ in range(1 + WARM_UP_STEPS):
        loop.turn()
    rows = [time_step(loop, comm) for _ in range(num_steps)]
    leader.stop()
    loop.turn()
    found = [events.get_nowait() for _ in range(events.qsize())]
    assert sum(len(e.token_ids) for e in found) == case.batch * max_tokens, "every step decoded everybody"
    assert all(e.error is None for e in found)
    return {column: statistics.median(row[column] for row in rows) for column in rows[0]}


def time_step(loop: EngineLoop, comm: TimedComm) -> dict[str, float]:
    """One decode step's times in microseconds."""
    turn_ns, model_ns = loop.times.turn_ns, loop.times.model_ns
    comm.collective_ns.clear()
    loop.turn()
    turn = (loop.times.turn_ns - turn_ns) / 1e3
    forward = (loop.times.model_ns - model_ns) / 1e3
    waits = [ns / 1e3 for ns in comm.collective_ns]
    skew = max(0.0, waits[0] - statistics.median(waits)) if comm.size > 1 else 0.0
    control = turn - forward
    return {"turn": turn, "forward": forward, "control": control, "skew": skew, "total": control + skew}


def free_address() -> str:
    """A loopback host:port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _child(pipe: Connection, *args: object) -> None:
    pipe.send(run_rank(*args))  # type: ignore[arg-type]


def run_case(case: Case, model: str, num_steps: int, num_repeats: int) -> dict[str, float]:
    address = free_address()
    context = multiprocessing.get_context("spawn")
    children = []
    for rank in range(case.tp):
        ours, theirs = context.Pipe()
        if case.tp == 1:
            rows = run_rank(case, model, rank, address, num_steps, num_repeats)
            return _median_row(rows)
        arguments = (theirs, case, model, rank, address, num_steps, num_repeats)
        child = context.Process(target=_child, args=arguments, daemon=True)
        child.start()
        theirs.close()
        children.append((ours, child))
    per_rank = []
    for ours, child in children:
        if not ours.poll(300):
            raise TimeoutError(f"{case.name}: no answer")
        per_rank.append(ours.recv())
        child.join(30)
    return _median_row(per_rank[0]) | _median_row(per_rank[1])


def _median_row(rows: list[dict[str, float]]) -> dict[str, float]:
    return {column: statistics.median(row[column] for row in rows) for column in rows[0]}


def add_table(page: Page, results: dict[Case, dict[str, float]]) -> None:
    page.head("case", *COLUMNS, "target", "")
    for case, row in results.items():
        cells = [f"{row[column]:.0f}" if column in row else "-" for column in COLUMNS]
        target = TARGET_US[case.tp]
        page.row(case.name, *cells, f"{target:.0f}", "met" if row["total"] < target else "MISSED")
    titles = ("tp", "comm", "batch", *(f"{c.replace(' ', '_')}_us" for c in COLUMNS))
    rows = results.items()
    page.data(titles, ((c.tp, c.comm, c.batch, *(row.get(name, "") for name in COLUMNS)) for c, row in rows))


def missed(results: dict[Case, dict[str, float]]) -> list[str]:
    """Cases that are over their targets; gloo is there to compare with."""
    return [
        f"{case.name}: {row['total']:.0f} us per step, the target is under {TARGET_US[case.tp]:.0f} us"
        for case, row in results.items()
        if case.comm != "gloo" and row["total"] >= TARGET_US[case.tp]
    ]


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Run every case; returns those that miss their target."""
    model = options.model or write_checkpoint("qwen3", "checkpoints/bench-qwen3")
    results = {}
    for case in CASES:
        results[case] = run_case(case, str(model), options.steps, options.repeats)
        print(f"{case.name}: {results[case]['total']:.0f} us", file=sys.stderr)
    add_table(page, results)
    return missed(results)


def main() -> int:
    model = {"type": Path, "help": "a checkpoint folder (default: a tiny qwen3)"}
    return run(fill, __file__, title="What a step costs beside the model", steps=100, repeats=5, model=model)


if __name__ == "__main__":
    sys.exit(main())
