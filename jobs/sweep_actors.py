"""The Ray actors of jobs/transfer_sweep.py and its ceiling: a producer's and a consumer's host."""

from __future__ import annotations

import itertools
import time
from typing import Any

import ray

from jobs.sweep_cells import SweepCell
from jobs.sweep_host import Host, Setup
from rayk.transfer.handshake import CacheDescription
from rayk.types.errors import RaykError

UCX = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "/tmp/rayk-ucx-%p.log"}
"""What makes UCX say which transport it chooses."""
CALL_S = 120.0
ROUND_S = 8.0
"""For a round of a measurement, on a machine that has other work; those of an ordinary one fit CALL_S."""
TAKE_IN_S = 2.0
"""How often a producer looks at what it is told while its consumer is measured."""


class Hosts:
    """Both sides; every call has a deadline."""

    def __init__(self) -> None:
        actor = ray.remote(num_cpus=0.5)(Host)
        options: dict[str, Any] = {"runtime_env": {"env_vars": UCX}, "max_restarts": 0}
        self._producer = actor.options(name="sweep/producer", **options).remote("p")
        self._consumer = actor.options(name="sweep/consumer", **options).remote("d")
        self._numbers = itertools.count()

    def move(self, cell: SweepCell) -> dict[str, Any]:
        """One request from pages to pages. Raises the RaykError that it ends with."""
        lease = f"lease-{next(self._numbers)}"
        p, d = self._producer, self._consumer
        consumers = self._connect(cell)
        ticket = self._get(p.fill.remote(lease))
        found: dict[str, Any] = {"num_wrong_words": 0, "released": True}
        if cell.mode == "pull":
            found |= self._get(d.receive.remote(ticket))
            found["wrong"], found["released"] = self._get([d.check.remote(), p.released.remote(lease)])
        else:
            tables = self._get(d.tables.remote())
            found |= self._get(p.push.remote(ticket, tables, consumers))
            found["num_wrong_words"], found["wrong"] = self._get([d.verify.remote(ticket), d.check.remote()])
        del found["memcpy_s"]
        return found

    def measure(self, cell: SweepCell, rounds: int) -> dict[str, Any]:
        """Times of one request, moved over and over; every byte checked after the last."""
        p, d = self._producer, self._consumer
        consumers = self._connect(cell)
        ticket = self._get(p.fill.remote("lease"))
        if cell.mode == "pull":
            found = self._measured(d.measure.remote(ticket, rounds), max(CALL_S, rounds * ROUND_S))
            found["offer_cpu_s"] = self._get(p.offer_cpu_s.remote(rounds))
        else:
            tables = self._get(d.tables.remote())
            found = self._get(p.measure_push.remote(ticket, tables, consumers, rounds))
        wrong = sum(n for n, _ in self._get(d.check.remote()))
        if wrong:
            raise RuntimeError(f"{cell.cell_id}: {wrong} bytes are wrong")
        return found

    def _measured(self, measuring: Any, timeout_s: float) -> dict[str, Any]:
        """What a consumer found. Meanwhile the producer takes in what it is told of its pulls: after some
        hundreds of messages that nobody looked at UCX sends no more, and no read of that process ends."""
        until = time.monotonic() + timeout_s
        while not ray.wait([measuring], timeout=TAKE_IN_S)[0] and time.monotonic() < until:
            self._get(self._producer.take_in.remote())
        found: dict[str, Any] = self._get(measuring, 0.0)
        return found

    def _connect(self, cell: SweepCell) -> list[CacheDescription]:
        """Build both sides and have them meet; the consumer's ranks."""
        sides = self._producer, self._consumer
        descriptions = self._get([side.build.remote(_setup(cell, i)) for i, side in enumerate(sides)])
        self._get([side.connect.remote(*descriptions) for side in sides])
        consumers: list[CacheDescription] = descriptions[1]
        return consumers

    def ucx_logs(self) -> dict[str, str]:
        """Mode -> what UCX of the side that posts said of its choices."""
        pull, push = self._get([self._consumer.ucx_log.remote(), self._producer.ucx_log.remote()])
        return {"pull": pull, "push": push}

    def close(self) -> None:
        for actor in (self._producer, self._consumer):
            ray.kill(actor)

    def _get(self, refs: Any, timeout_s: float = CALL_S) -> Any:
        try:
            return ray.get(refs, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RaykError):
                raise error.cause from None
            raise


def _setup(cell: SweepCell, side: int) -> Setup:
    return Setup(
        shape=cell.shape,
        tp=cell.tp[side],
        layout=cell.layouts[side],
        block_size=cell.block_sizes[side],
        num_tokens=cell.num_tokens,
        scattered=cell.tables == "scattered",
        staging=cell.staging,
    )
