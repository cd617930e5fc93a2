"""One small read from each rank of a producer: so that the network between two engines is set up.

Nobody waits inside: a consumer that decodes meanwhile asks again between its steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from rayk.kv.block_pool import NULL_BLOCK
from rayk.transfer.agent import Handle, Transfer, TransferAgent, TransferState
from rayk.transfer.link import Landing
from rayk.types.errors import TransferError


class _Wiring:
    """Reads one generation from every rank, by `until` (time.monotonic)."""

    def __init__(
        self, agent: TransferAgent, landing: Landing, handles: Mapping[int, Handle], until: float
    ) -> None:
        """`handles` has one entry per producer rank."""
        self.problem: tuple[int, str] | None = None
        """The rank that cannot be read from, and why."""
        self._agent = agent
        self._landing = landing
        self._until = until
        self._reads: dict[int, tuple[Transfer, range]] = {}
        for rank, handle in handles.items():
            self._post(rank, handle)

    def is_over(self) -> bool:
        """Tell whether every rank has answered, or one has not in time."""
        for rank, (transfer, slots) in list(self._reads.items()):
            state = self._agent.poll(transfer)
            if state is TransferState.PENDING:
                continue
            del self._reads[rank]
            self._agent.release(transfer)
            self._landing.give_back(slots)
            if state is not TransferState.DONE:
                self._fail(rank, "the read failed")
        if self._reads and time.monotonic() > self._until:
            self._fail(min(self._reads), "it does not answer")
            return True
        return not self._reads

    def left(self) -> list[tuple[Transfer, range]]:
        """List reads that have not ended, and their slots: the bytes may still come."""
        return list(self._reads.values())

    def _post(self, rank: int, handle: Handle) -> None:
        slots = self._landing.take(1)
        if slots is None:
            self._fail(rank, "no room for what it would answer")
            return
        null_block = np.array([NULL_BLOCK], dtype=np.int32)
        try:
            transfer = self._agent.read(handle, np.array(slots, dtype=np.int32), null_block)
        except TransferError as error:
            self._landing.give_back(slots)
            self._fail(rank, error.reason)
        else:
            self._reads[rank] = (transfer, slots)

    def _fail(self, rank: int, why: str) -> None:
        self.problem = self.problem or (rank, why)


class Wirings:
    """First reads of one consumer rank, by producer engine."""

    def __init__(self, agent: TransferAgent, landing: Landing, name: str) -> None:
        """`name`: of this rank."""
        self._agent = agent
        self._landing = landing
        self._name = name
        self._open: dict[str, _Wiring] = {}
        self._late: list[tuple[Transfer, range]] = []
        """Reads that nobody waits for any more, and their slots."""

    def step(self, engine: str, handles: Mapping[int, Handle], timeout_s: float) -> bool:
        """Begin, or look how far it is; whether all ranks have answered. Raises TransferError naming one that
        does not, or has not `timeout_s` after the beginning."""
        self.take_back()
        if engine not in self._open:
            until = time.monotonic() + timeout_s
            self._open[engine] = _Wiring(self._agent, self._landing, handles, until)
        wiring = self._open[engine]
        if not wiring.is_over():
            return False
        self.forget(engine)
        if wiring.problem is not None:
            rank, why = wiring.problem
            reason = f"rank {rank} cannot be read from: {why}"
            raise TransferError("", reason, producer=engine, consumer=self._name)
        return True

    def forget(self, engine: str) -> None:
        """It is gone, or all is known of it."""
        wiring = self._open.pop(engine, None)
        self._late += wiring.left() if wiring is not None else []

    def take_back(self) -> None:
        """Slots of late reads that have ended; costs nothing where there are none."""
        late, self._late = self._late, []
        for transfer, slots in late:
            if self._agent.poll(transfer) is TransferState.PENDING:
                self._late.append((transfer, slots))
            else:
                self._agent.release(transfer)
                self._landing.give_back(slots)
