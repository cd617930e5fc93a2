"""A comm that measures the time of its tensor collectives."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from rayk.parallel.comm import Comm, queues_on_device


class TimedComm:
    """Implements Comm over another one whose calls return when the work is done.

    A rank waits in a collective until the last one comes: the rank that waits least is the slowest.
    """

    def __init__(self, comm: Comm, whole: TimedComm | None = None) -> None:
        """Wrap a comm, or a part of the comm that `whole` wraps and adds the time of."""
        self._comm = comm
        self._whole = whole
        self.rank = comm.rank
        self.size = comm.size
        self.name = comm.name
        self.collective_ns = 0
        """Total time in all_reduce and all_gather, parts included."""

    @property
    def timeout_s(self) -> float:
        return self._comm.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._comm.timeout_s = timeout_s

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter_ns()
        result = self._comm.all_reduce(tensor)
        self._add_since(began)
        return result

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        began = time.perf_counter_ns()
        result = self._comm.all_gather(tensor)
        self._add_since(began)
        return result

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Not timed: a stage waits here for the one before, which is no skew."""
        return self._comm.broadcast(tensor)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Not timed: peers wait here for rank 0's next turn, which is no skew."""
        return self._comm.broadcast_bytes(payload)

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        return self._comm.gather_bytes(payload)

    def subgroup(self, ranks: Sequence[int]) -> Comm:
        return TimedComm(self._comm.subgroup(ranks), self)

    def close(self) -> None:
        self._comm.close()

    def _add_since(self, began_ns: int) -> None:
        spent_ns = time.perf_counter_ns() - began_ns
        timed: TimedComm | None = self
        while timed is not None:
            timed.collective_ns += spent_ns
            timed = timed._whole


def timed(comm: Comm) -> Comm:
    """Return the comm, watched where that tells anything: a GPU's collectives end on its stream, not on the
    host."""
    return TimedComm(comm) if comm.size > 1 and not queues_on_device(comm) else comm
