"""Ranks as threads of one process: for tests and for runs without Ray.

Every collective is one numbered operation. A rank posts its payload under the number and waits for the
others' payloads, so ranks may be one operation ahead of each other without mixing two up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.parallel.parts import Parts, index_in
from rayk.parallel.reduce import sum_in_rank_order
from rayk.types.errors import CommError


class _Board:
    """The shared state of one group: posted payloads and each rank's progress."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.posted: list[dict[int, tuple[str, Any]]] = [{} for _ in range(size)]
        self.num_posted = [0] * size
        self.closed = [False] * size
        self.parts: dict[tuple[int, tuple[int, ...]], _Board] = {}
        """Boards of parts by the number of the operation that made them, and their ranks."""


class ThreadComm:
    """Comm among threads of one process; `make_group` makes the whole group."""

    def __init__(self, board: _Board, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.name = "threads"
        self._board = board
        self._timeout_s = timeout_s
        self._parts = Parts()

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._parts.wait_for(timeout_s)

    @classmethod
    def make_group(cls, num_ranks: int, timeout_s: float = 30.0) -> list[ThreadComm]:
        """Make one comm per rank, each for its own thread."""
        board = _Board(num_ranks)
        return [cls(board, rank, num_ranks, timeout_s) for rank in range(num_ranks)]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        # The posted copy is what peers read while this rank overwrites its tensor.
        number = self._post("all_reduce", tensor.clone())
        return sum_in_rank_order(self._collect("all_reduce", number, range(self.size)), tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        number = self._post("all_gather", tensor.clone())
        return [t.clone() for t in self._collect("all_gather", number, range(self.size))]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0 does not wait for its peers."""
        number = self._post("broadcast", tensor.clone() if self.rank == 0 else None)
        if self.rank != 0:
            tensor.copy_(self._collect("broadcast", number, (0,))[0])
        return tensor

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0 does not wait for its peers."""
        assert (payload is not None) == (self.rank == 0), "rank 0, and only rank 0, passes a payload"
        number = self._post("broadcast_bytes", payload)
        received: bytes = self._collect("broadcast_bytes", number, (0,))[0]
        return received

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        number = self._post("gather_bytes", payload)
        if self.rank != 0:
            return None
        return self._collect("gather_bytes", number, range(self.size))

    def subgroup(self, ranks: Sequence[int]) -> Comm:
        part = tuple(ranks)
        index = index_in(part, self.rank, self.size)
        number = self._post("subgroup", part)
        theirs = self._collect("subgroup", number, part)
        assert set(theirs) == {part}, f"rank {self.rank} is in part {part}, its peers are in {theirs}"
        if len(part) == 1:
            return self._parts.add(LocalComm())
        board = self._board
        with board.changed:
            shared = board.parts.setdefault((number, part), _Board(len(part)))
        return self._parts.add(ThreadComm(shared, index, len(part), self.timeout_s))

    def close(self) -> None:
        """Leave the group: peers that wait for this rank get CommError."""
        self._parts.close()
        with self._board.changed:
            self._board.closed[self.rank] = True
            self._board.changed.notify_all()

    def _post(self, operation: str, payload: Any) -> int:
        """Publish this rank's payload of the next operation and return the operation's number."""
        board = self._board
        with board.changed:
            if board.closed[self.rank]:
                raise CommError(operation, f"rank {self.rank} has closed its group")
            number = board.num_posted[self.rank]
            board.posted[self.rank][number] = (operation, payload)
            board.num_posted[self.rank] = number + 1
            # A peer that has posted number - 1 is done with number - 2.
            done = min(board.num_posted) - 2
            for old in [n for n in board.posted[self.rank] if n < done]:
                del board.posted[self.rank][old]
            board.changed.notify_all()
        return number

    def _collect(self, operation: str, number: int, ranks: range | tuple[int, ...]) -> list[Any]:
        """Wait for the payloads of `ranks` for operation `number`."""
        board = self._board
        deadline = time.monotonic() + self.timeout_s
        payloads = []
        with board.changed:
            for rank in ranks:
                while board.num_posted[rank] <= number:
                    left = deadline - time.monotonic()
                    if board.closed[rank]:
                        raise CommError(operation, f"rank {rank} has left the group")
                    if left <= 0 or not board.changed.wait(left):
                        raise CommError(
                            operation,
                            f"rank {self.rank} waited {self._timeout_s:g} s for rank {rank}",
                        )
                theirs, payload = board.posted[rank][number]
                if theirs != operation:
                    raise CommError(operation, f"rank {rank} called {theirs}")
                payloads.append(payload)
        return payloads
