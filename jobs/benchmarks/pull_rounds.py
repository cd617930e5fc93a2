"""Pulls in turns with bare NIXL: by the wall's clock, by this process's CPU time, and stage by stage.

Posting a read copies its bytes on one CPU host, and what waits there spins: CPU time is the time of the wall
without what other processes take, which is why ratios are taken from it. In front of each turn as many bytes
are copied, so that both sides find the processor's caches alike: cold, as behind a step of a model.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from jobs.benchmarks.raw_reads import Clock, RawReads, same_descriptors, take_turns
from rayk.bench.statistics import quantile
from rayk.transfer import consumer
from rayk.transfer.agent import TransferAgent
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.link import PreparedReads
from rayk.transfer.nixl_agent import NixlAgent
from rayk.transfer.plan import BlockReads
from rayk.transfer.rank import TransferRank
from rayk.transfer.reads import DataReads
from rayk.transfer.ticket import TransferTicket

DEADLINE_S = 60.0
PASSES = 3
"""How often each round runs: by the wall's clock, by CPU time, and stage by stage."""
WATCHED: tuple[tuple[str, Any, str], ...] = (
    ("plan", consumer.Consumption, "_lower"),
    ("choice", DataReads, "__post_init__"),
    ("indices", BlockReads, "indices"),
    ("lists", PreparedReads, "take"),
    ("nixl", NixlAgent, "_post"),
    ("digests", consumer, "compute_digests"),
)
"""(stage, owner, function): what is timed where stages are told apart."""


@dataclass
class Pulls:
    """One request, pulled over and over by all ranks of a consumer, one rank after the other."""

    ranks: Sequence[TransferRank]
    ticket: TransferTicket
    tables: Sequence[Sequence[int]]
    clock: Clock
    num_done: int = 0

    def pull(self) -> dict[str, float]:
        """Seconds by the clock, summed over the ranks: `ticket` (until the read began), `read` (planned,
        posted and arrived), `post` (of it), `fence`, `verify`, and `all`. Raises what the pull ends with."""
        self.num_done += 1
        ticket = replace(self.ticket, request_id=f"{self.ticket.request_id}-{self.num_done}")
        took: Counter[str] = Counter()
        for rank in self.ranks:
            began = self.clock.now_ns()
            rank.start(ticket, self.tables, time.monotonic_ns() + int(DEADLINE_S * 1e9))
            outcomes = rank.poll(time.monotonic_ns())
            while not outcomes:
                outcomes = rank.poll(time.monotonic_ns())
            ended = self.clock.now_ns()
            (outcome,) = outcomes
            if outcome.error is not None:
                raise outcome.error
            assert outcome.began_ns is not None
            took.update(outcome.stage_ns)
            took["all"] += ended - began
            took["ticket"] += outcome.began_ns - began
            took["post"] += sum(row.post_ns for row in outcome.rows)
        return {name: ns / 1e9 for name, ns in took.items()}


def measure_pulls(
    sides: Sequence[tuple[TransferAgent, TransferRank]],
    producers: Sequence[CacheDescription],
    ticket: TransferTicket,
    tables: Sequence[Sequence[int]],
    clock: Clock,
    rounds: int,
) -> dict[str, Any]:
    """Columns of the ceiling's tables for one request, which was pulled once before: all lists are there."""
    pulls = Pulls([rank for _, rank in sides], ticket, tables, clock)
    raw = same_descriptors(sides, producers, ticket, tables)
    source = torch.empty(raw.num_bytes, dtype=torch.int8).fill_(1)
    target = torch.empty_like(source).fill_(2)
    try:
        clock.is_wall = True
        wall = _turns(pulls, raw, lambda: target.copy_(source), rounds)
        clock.is_wall = False
        cpu = _turns(pulls, raw, lambda: target.copy_(source), rounds)
        stages = _stages(pulls, raw, lambda: target.copy_(source), rounds)
    finally:
        clock.is_wall = True
    ratios = [b / r for b, r in zip(cpu["bare"], cpu["read"], strict=True)]
    estimate = quantile(ratios, 0.5)
    wall_ratios = [b / r for b, r in zip(wall["bare"], wall["read"], strict=True)]
    return {
        "wall_s": statistics.median(wall["read"]),
        "post_s": statistics.median(wall["post"]),
        "raw_s": statistics.median(wall["bare"]),
        "memcpy_s": statistics.median(wall["copy"]),
        "of_raw_wall": statistics.median(wall_ratios),
        "of_raw": statistics.median(ratios),
        "of_raw_low": None if estimate is None else estimate.low,
        "of_raw_high": None if estimate is None else estimate.high,
        "run_bytes": raw.run_bytes,
        "cpu": {name: statistics.median(seconds) for name, seconds in cpu.items()},
        "stages": stages,
    }


def _turns(pulls: Pulls, raw: RawReads, copy: Callable[[], object], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round: of a pull's stages, of `bare` NIXL, and of a `copy` before each."""
    took: dict[str, list[float]] = {}
    copies: list[float] = []

    def pull() -> None:
        for name, seconds in pulls.pull().items():
            took.setdefault(name, []).append(seconds)

    def bare() -> None:
        took.setdefault("bare", []).append(raw.time_s(pulls.clock.now_ns))

    def before() -> None:
        began = pulls.clock.now_ns()
        copy()
        copies.append((pulls.clock.now_ns() - began) / 1e9)

    take_turns(pull, bare, before, rounds)
    return {**took, "copy": copies}


def _stages(pulls: Pulls, raw: RawReads, copy: Callable[[], object], rounds: int) -> dict[str, float]:
    """Medians in microseconds of CPU time: those of WATCHED, and what is left of each part of a pull.

    Watching adds about a microsecond to each call.
    """
    found: dict[str, list[float]] = {}
    with watching(pulls.clock) as seen:

        def bare() -> None:
            seen.clear()
            whole = raw.time_s(pulls.clock.now_ns)
            _append(found, {"bare_nixl": sum(seen["nixl"]), "bare_rest": whole * 1e9 - sum(seen["nixl"])})

        def pull() -> None:
            seen.clear()
            took = {name: seconds * 1e9 for name, seconds in pulls.pull().items()}
            posts = took["post"] - sum(seen["lists"])
            before = {name: sum(seen[name]) for name in ("plan", "choice", "indices", "lists")}
            row = {"ticket": took["ticket"], **before, "nixl": posts}
            row["rest"] = took["read"] - sum(before.values()) - posts
            row["fence"] = took["fence"]
            row["digests"] = sum(seen["digests"])
            row["compare"] = took["verify"] - row["digests"]
            row["report"] = took["all"] - took["ticket"] - took["read"] - took["fence"] - took["verify"]
            _append(found, row)

        take_turns(pull, bare, copy, rounds)
    return {name: statistics.median(values) / 1e3 for name, values in found.items()}


def _append(found: dict[str, list[float]], row: dict[str, float]) -> None:
    for name, value in row.items():
        found.setdefault(name, []).append(value)


class _Seen(dict[str, list[int]]):
    """Nanoseconds of each call, by stage."""

    def __missing__(self, name: str) -> list[int]:
        return self.setdefault(name, [])


@contextmanager
def watching(clock: Clock) -> Iterator[_Seen]:
    """Within the block the calls of WATCHED are timed."""
    seen = _Seen()

    def watched(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = clock.now_ns()
            result = function(*args, **kwargs)
            seen[stage].append(clock.now_ns() - began)
            return result

        return timed

    with ExitStack() as stack:
        for stage, owner, name in WATCHED:
            stack.enter_context(mock.patch.object(owner, name, watched(stage, getattr(owner, name))))
        yield seen
