"""A pair of engines around a connector, which a check drives.

All calls go to the ranks' processes, each with a deadline. The rig follows the engines' side of the protocol:
block ids are scattered, blocks are overwritten as soon as a rank has reported their request, both ends are
polled.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rayk.conformance.engines import EnginePair
from rayk.conformance.host import Raised, RankName, Report
from rayk.conformance.pool import Died, HostPool, HostProcess, Hung
from rayk.kv.block_pool import NULL_BLOCK
from rayk.transfer.connector import KVRequest
from rayk.transfer.plan import consecutive_tables

SIDES = ("producer", "consumer")
PRODUCER, CONSUMER = 0, 1
REST_S = 0.0005
"""Pause between polls: others need this core, too."""
LATE_POLLS = 5
"""Polls at the end of a check, for late reports."""


class CheckFailed(Exception):
    """The connector violates the check; the text says how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One rank's report of one request, for display."""

    request_id: str
    side: str
    rank: int
    outcome: str
    """done, failed or wrong."""
    reason: str
    reported_ms: float | None
    """Time since the call of `send` or `receive`."""


class Refused(CheckFailed):
    """The connector raised."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request, as both sides see it."""

    sides: tuple[KVRequest, KVRequest]
    seed: int

    @property
    def request_id(self) -> str:
        return self.sides[0].request_id

    def due_in(self, deadline_s: float) -> Job:
        producer, consumer = (replace(request, deadline_s=deadline_s) for request in self.sides)
        return replace(self, sides=(producer, consumer))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time limits of a check, in seconds."""

    check_s: float = 60.0
    """Limit of a whole check."""
    call_s: float = 30.0
    """Limit of one call of the connector."""
    request_s: float = 20.0
    """Deadline of requests that should succeed."""
    fault_s: float = 1.5
    """Deadline of requests that cannot succeed."""
    grace_s: float = 5.0
    """How late after its deadline a request may be reported."""


@dataclass(eq=False)
class Rig:
    pool: HostPool
    pair: EnginePair
    name: str
    settings: Settings
    _hosts: dict[RankName, HostProcess] = field(default_factory=dict)
    _dead: set[RankName] = field(default_factory=set)
    _closed: set[RankName] = field(default_factory=set)
    _free: tuple[list[int], list[int]] = ([], [])
    _lent: dict[str, Job] = field(default_factory=dict)
    reports: dict[tuple[RankName, str], Report] = field(default_factory=dict)
    """What each rank reported of every request."""
    history: list[Outcome] = field(default_factory=list)
    """All reports in order."""
    _began: dict[tuple[RankName, str], float] = field(default_factory=dict)
    _ids: Any = field(default_factory=itertools.count)
    _until: float = math.inf
    """End of the whole check, monotonic seconds."""

    def __post_init__(self) -> None:
        random = np.random.default_rng(0)
        self._free = tuple(
            (random.permutation(self.pair.num_blocks[side] - 1) + 1).tolist() for side in (0, 1)
        )

    @property
    def ranks(self) -> list[RankName]:
        """Living ranks, producers first."""
        return [rank for rank in self._hosts if rank not in self._dead]

    def side(self, side: int) -> list[RankName]:
        return [rank for rank in self.ranks if rank[0] == side]

    @property
    def is_pull(self) -> bool:
        """Whether `send` comes first."""
        return bool(self.pool.facts.mode == "pull")

    @property
    def first_side(self) -> int:
        """The side whose half of a request comes first."""
        return PRODUCER if self.is_pull else CONSUMER

    # Life

    def open(self) -> None:
        """Make all ranks, in separate processes if the connector can, and connect them."""
        names = [
            (side, rank) for side in (PRODUCER, CONSUMER) for rank in range(self.pair.shape(side).num_ranks)
        ]
        self.pool.take(1)
        if self.pool.facts.is_cross_process:
            hosts = self.pool.take(len(names))
        else:
            hosts = self.pool.take(1) * len(names)
        self._hosts = dict(zip(names, hosts, strict=True))
        # Starting processes does not count against the connector.
        self._until = min(self._until, time.monotonic() + self.settings.check_s)
        self._each("open", names, lambda r: (r, self.pair, f"{self.name}-{SIDES[r[0]]}-{r[1]}"))
        blobs = self._each("describe", names, lambda r: (r,))
        sides = [[blobs[r] for r in names if r[0] == side] for side in (PRODUCER, CONSUMER)]
        self._each("connect", names, lambda r: (r, *sides))

    def end(self) -> None:
        """End a check that succeeded so far: nothing may come late or be still held."""
        for _ in range(LATE_POLLS):
            self.poll()
        self._check_memory()
        if not self._lent:
            self.check_held({"requests"}, "although every request is over")
        ranks = self.ranks
        self._each("close", ranks, lambda r: (r,))
        self._each("close", ranks, lambda r: (r,))
        self.check_held(None, "after close()")
        self._check_memory()

    def abandon(self) -> None:
        """Clean up after a check, whatever happened."""
        for host in dict.fromkeys(self._hosts.values()):
            if not host.is_alive:
                continue
            try:
                for rank in [r for r, h in self._hosts.items() if h is host]:
                    host.call("close", rank, timeout_s=self.settings.call_s)
                host.call("forget", timeout_s=self.settings.call_s)
            except (Raised, Hung, Died, AssertionError):
                host.kill()

    # Requests

    def job(
        self,
        num_tokens: int,
        *,
        deadline_s: float | None = None,
        request_id: str = "",
        like: Job | None = None,
        alike: Sequence[int] = (PRODUCER, CONSUMER),
    ) -> Job:
        """Make a request in scattered blocks, or in those of `like`, which is over on the sides `alike`."""
        number = next(self._ids)
        if self.pool.facts.moves_whole_blocks_only:
            size = math.lcm(*map(self.pair.block_tokens, (PRODUCER, CONSUMER)))
            num_tokens = -(-num_tokens // size) * size
        request_id = request_id or f"request-{number}"
        deadline_s = self.settings.request_s if deadline_s is None else deadline_s
        sides = []
        for side in (PRODUCER, CONSUMER):
            tables = like.sides[side].block_ids if like and side in alike else self._tables(side, num_tokens)
            for block in {b for table in tables for b in table} & set(self._free[side]):
                self._free[side].remove(block)
            sides.append(
                KVRequest(
                    request_id=request_id, num_tokens=num_tokens, block_ids=tables, deadline_s=deadline_s
                )
            )
        return Job(sides=(sides[0], sides[1]), seed=number)

    def begin(self, jobs: Iterable[Job]) -> dict[str, list[bytes]]:
        """Run the first half of each request, on every rank of its side; return the answers by request id."""
        return {job.request_id: self.half(job, self.first_side) for job in jobs}

    def follow(self, jobs: Iterable[Job], answers: dict[str, list[bytes]]) -> None:
        for job in jobs:
            self.half(job, 1 - self.first_side, answers[job.request_id])

    def half(self, job: Job, side: int, answers: Sequence[bytes] = ()) -> list[bytes]:
        """Call `send` or `receive` on every living rank of a side; their answers in rank order."""
        self._lent[job.request_id] = job
        method = "receive" if side else "send"
        ranks = self.side(side)
        for rank in ranks:
            self.reports.pop((rank, job.request_id), None)
            self._began[rank, job.request_id] = time.monotonic()
        found = self._each(
            "call", ranks, lambda _: (_, job.sides[side], tuple(answers), job.seed), told_as=method
        )
        return [found[rank] for rank in ranks]

    def try_half(self, job: Job, side: int, answers: Sequence[bytes] = ()) -> str:
        """Like `half`, but the connector may refuse: returns what it raised, or ""."""
        try:
            self.half(job, side, answers)
        except Refused as error:
            return str(error)
        return ""

    def transfer(self, *jobs: Job) -> None:
        """Whole requests that must succeed, all in flight together."""
        self.follow(jobs, self.begin(jobs))
        self.wait(jobs)
        self.expect_done(jobs)

    def poll(self) -> None:
        """Poll both ends once and keep their reports. Raises CheckFailed for wrong memory."""
        hosts = list(dict.fromkeys(self._hosts[rank] for rank in self.ranks))
        for reports in self._call_hosts(hosts, "poll"):
            for report in reports:
                self._note(report)

    def wait(self, jobs: Sequence[Job], ranks: Sequence[RankName] | None = None) -> None:
        """Poll until these ranks (default: all living) have reported these requests, whose blocks are then
        free. Raises CheckFailed like `await_reports`."""
        self.await_reports(jobs, self.ranks if ranks is None else ranks)
        self._settle(jobs)

    def await_reports(self, jobs: Sequence[Job], ranks: Sequence[RankName]) -> None:
        """Poll until these ranks have reported these requests, which others may still have in flight. Raises
        CheckFailed naming the first that misses its deadline plus grace."""
        deadline_s = max(job.sides[0].deadline_s for job in jobs) + self.settings.grace_s
        until = time.monotonic() + deadline_s
        while missing := [
            (r, j.request_id) for j in jobs for r in ranks if (r, j.request_id) not in self.reports
        ]:
            if time.monotonic() > until:
                rank, request_id = missing[0]
                others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                raise CheckFailed(
                    f"{named(rank)} never reported {request_id}{others}: its deadline was "
                    f"{deadline_s - self.settings.grace_s:g} s"
                )
            self.poll()
            time.sleep(REST_S)

    def expect_done(self, jobs: Iterable[Job]) -> None:
        """Raise CheckFailed if a rank reported one of these requests as failed."""
        for job in jobs:
            for rank in self.ranks:
                report = self.reports[rank, job.request_id]
                if report.error:
                    raise CheckFailed(f"{named(rank)} reported {job.request_id} as failed: {report.error}")

    def release(self, side: int, request_id: str) -> None:
        """Give a request up on all ranks of a side."""
        self._each("release", self.side(side), lambda r: (r, request_id))

    # Faults

    def lose(self, rank: RankName) -> None:
        """Lose the rank: kill its process, or close it silently if ranks share a process."""
        self._dead.add(rank)
        host = self._hosts[rank]
        if self.pool.facts.is_cross_process:
            host.kill()
        else:
            self._call_hosts([host], "close", rank)

    def register_again(self, rank: RankName) -> str:
        """Register a second cache on one rank; returns what it raised, or ""."""
        (raised,) = self._call_hosts([self._hosts[rank]], "register_again", rank, self.pair)
        return str(raised)

    def resources(self) -> dict[str, int]:
        """Count the threads and file descriptors of the first process."""
        (found,) = self._call_hosts([self._hosts[PRODUCER, 0]], "resources")
        return dict(found)

    def check_held(self, names: set[str] | None, when: str) -> None:
        """Raise CheckFailed if a rank says it holds any of these `names` (None: anything)."""
        for rank, held in self._each("held", self.ranks, lambda r: (r,)).items():
            left = {k: v for k, v in (held or {}).items() if v and (names is None or k in names)}
            if left:
                told = ", ".join(f"{count} {name}" for name, count in left.items())
                raise CheckFailed(f"{named(rank)} holds {told} {when}")

    # Inside

    def _tables(self, side: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        plain = consecutive_tables(self.pair.geometry(side, 0), num_tokens)
        free = self._free[side]
        return tuple(tuple(NULL_BLOCK if b == NULL_BLOCK else free.pop(0) for b in t) for t in plain)

    def _settle(self, jobs: Sequence[Job]) -> None:
        """Free the blocks of requests that every rank has reported."""
        for job in jobs:
            if self._lent.pop(job.request_id, None) is not None:
                for free, request in zip(self._free, job.sides, strict=True):
                    # Freed blocks go to the end, but will be reused: pools are small.
                    free += sorted({b for t in request.block_ids for b in t} - {NULL_BLOCK} - set(free))

    def _note(self, report: Report) -> None:
        key = (report.rank, report.request_id)
        began = self._began.pop(key, None)
        self.history.append(
            Outcome(
                request_id=report.request_id,
                side=SIDES[report.rank[0]],
                rank=report.rank[1],
                outcome="wrong" if report.wrong else "failed" if report.error else "done",
                reason=report.wrong or report.error,
                reported_ms=None if began is None else (time.monotonic() - began) * 1e3,
            )
        )
        if report.wrong:
            how = f"with the error {report.error!r}" if report.error else "as done"
            raise CheckFailed(f"{named(report.rank)} reported {report.request_id} {how}: {report.wrong}")
        self.reports[key] = report

    def _check_memory(self) -> None:
        for rank, wrong in self._each("wrong_elsewhere", self.ranks, lambda r: (r,)).items():
            if wrong:
                raise CheckFailed(f"memory of {named(rank)}: {wrong}")

    def _each(
        self, method: str, ranks: Sequence[RankName], arguments: Any, *, told_as: str = ""
    ) -> dict[RankName, Any]:
        """Call every rank, in parallel if they are in several processes."""
        answers: dict[RankName, Any] = {}
        waiting = list(ranks)
        while waiting:
            # One call at a time in each process.
            batch: dict[HostProcess, RankName] = {}
            for rank in waiting:
                batch.setdefault(self._hosts[rank], rank)
            waiting = [rank for rank in waiting if rank not in batch.values()]
            calls = [
                (host, f"{told_as or method}() of {named(rank)}", arguments(rank))
                for host, rank in batch.items()
            ]
            answers.update(zip(batch.values(), self._call(method, calls), strict=True))
        return answers

    def _call_hosts(self, hosts: Sequence[HostProcess], method: str, *arguments: Any) -> list[Any]:
        return self._call(method, [(host, f"{method}()", arguments) for host in hosts])

    def _call(self, method: str, calls: Sequence[tuple[HostProcess, str, tuple[Any, ...]]]) -> list[Any]:
        """Call processes in parallel; all have answered, or are dead, when this returns or raises.

        Raises Refused if the connector raised, CheckFailed if it hung or its process died.
        """
        now = time.monotonic()
        if now >= self._until:
            raise CheckFailed(f"the check was not over after {self.settings.check_s:g} s")
        until = min(now + self.settings.call_s, self._until)
        answers: list[Any] = []
        failures: list[CheckFailed] = []
        begun = []
        for host, what, arguments in calls:
            try:
                host.start(method, *arguments)
                begun.append((host, what))
            except Died as error:
                failures.append(CheckFailed(str(error)))
        for host, what in begun:
            try:
                answers.append(host.finish(what, until))
            except Raised as error:
                failures.append(Refused(f"{what} raised {error}"))
            except (Hung, Died) as error:
                failures.append(CheckFailed(str(error)))
        if failures:
            # Report other failures before refusals.
            raise min(failures, key=lambda f: isinstance(f, Refused))
        return answers


def named(rank: RankName) -> str:
    return f"{SIDES[rank[0]]} rank {rank[1]}"
