"""Leases on the producer's side: blocks stay until every consumer rank that must tell has told. Pure.

A release names how many consumer ranks tell this producer rank, so that a lease can be opened before
anybody knows who will read. Releases may come twice, or before the lease is opened here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReleaseMessage:
    """One consumer rank needs a lease no longer."""

    lease_id: str
    consumer: str
    """Agent name of the consumer rank."""
    num_expected: int
    """Consumer ranks that tell this producer rank."""

    def encode(self) -> bytes:
        """As a notification."""
        return json.dumps(["release", self.lease_id, self.consumer, self.num_expected]).encode()

    @staticmethod
    def decode(message: bytes) -> ReleaseMessage | None:
        """None for a message that is no release."""
        try:
            kind, lease_id, consumer, num_expected = json.loads(message)
        except (ValueError, TypeError):
            return None
        if kind != "release":
            return None
        return ReleaseMessage(str(lease_id), str(consumer), int(num_expected))


@dataclass(slots=True)
class _Lease:
    deadline_ns: int | None = None
    """None until the lease is opened."""
    told_by: set[str] = field(default_factory=set)
    num_expected: int | None = None

    @property
    def is_over(self) -> bool:
        return (
            self.deadline_ns is not None
            and self.num_expected is not None
            and len(self.told_by) >= self.num_expected
        )


class LeaseTable:
    """The leases of one producer rank."""

    MAX_EARLY = 1024
    """Releases of leases that were never opened here are dropped beyond this many, oldest first."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}
        self._early: dict[str, _Lease] = {}
        self._over: list[str] = []

    def open(self, lease_id: str, deadline_ns: int) -> None:
        """From now on the lease holds, until it is released everywhere or its deadline passes."""
        assert lease_id not in self._leases, f"lease {lease_id} exists"
        lease = self._early.pop(lease_id, _Lease())
        lease.deadline_ns = deadline_ns
        self._leases[lease_id] = lease
        self._settle(lease_id)

    def on_release(self, message: ReleaseMessage) -> None:
        """Count a release; repeated ones and those of leases that are over change nothing."""
        lease = self._leases.get(message.lease_id)
        if lease is None:
            lease = self._early.setdefault(message.lease_id, _Lease())
            while len(self._early) > self.MAX_EARLY:
                self._early.pop(next(iter(self._early)))
        lease.told_by.add(message.consumer)
        lease.num_expected = message.num_expected
        self._settle(message.lease_id)

    def expire(self, now_ns: int) -> list[str]:
        """End the leases whose deadline has passed; their ids, each once."""
        late = [
            lease_id
            for lease_id, lease in self._leases.items()
            if lease.deadline_ns is not None and lease.deadline_ns <= now_ns
        ]
        for lease_id in late:
            del self._leases[lease_id]
        return late

    def take_released(self) -> list[str]:
        """Leases released everywhere since the last call, each once."""
        over, self._over = self._over, []
        return over

    @property
    def open_leases(self) -> tuple[str, ...]:
        """Leases that hold now."""
        return tuple(self._leases)

    def _settle(self, lease_id: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.is_over:
            del self._leases[lease_id]
            self._over.append(lease_id)
