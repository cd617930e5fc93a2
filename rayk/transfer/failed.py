"""One consumer rank's transfers that failed: those with reads still in flight, and mismatches that are kept
to be looked into."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayk.transfer.consumer import Consumption
from rayk.types.errors import KVMismatch, TransferError


@dataclass(eq=False)
class FailedTransfers:
    _kept: list[Consumption] = field(default_factory=list)
    _drained: list[str] = field(default_factory=list)

    def add(self, consumption: Consumption) -> None:
        """Its outcome was told."""
        self._kept.append(consumption)

    def find(self, request_id: str) -> Consumption:
        """Raises TransferError when nothing is kept of the request (any more)."""
        kept = next((c for c in self._kept if c.ticket.request_id == request_id), None)
        if kept is None:
            raise TransferError(request_id, "nothing is kept of this transfer to look into")
        return kept

    def release(self, request_id: str) -> None:
        """After a KVMismatch: the producer's bytes are needed no longer."""
        for consumption in self._kept:
            if consumption.ticket.request_id == request_id:
                consumption.release()
                if consumption.is_drained:
                    consumption.close()
        self._kept = [c for c in self._kept if not c.is_closed]

    def step(self, now_ns: int) -> None:
        """Drain what failed; give up mismatches nobody has released by their deadline."""
        kept = []
        for consumption in self._kept:
            was_drained = consumption.is_drained
            consumption.step(now_ns)
            if consumption.is_drained and not was_drained:
                self._drained.append(consumption.ticket.lease_id)
            is_mismatch = consumption.outcome is not None and isinstance(
                consumption.outcome.error, KVMismatch
            )
            if is_mismatch and now_ns >= consumption.deadline_ns:
                consumption.release()
                is_mismatch = False
            if is_mismatch or not consumption.is_drained:
                kept.append(consumption)
            else:
                consumption.close()
        self._kept = kept

    def drained(self) -> list[str]:
        """Lease ids of those whose blocks nothing writes to any more, each once."""
        drained, self._drained = self._drained, []
        return drained
