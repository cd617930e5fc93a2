"""Leases on the producer's side: blocks stay until every consumer rank that must tell has told. Pure.

A release names how many consumer ranks tell this producer rank, so that a lease can be opened before
anybody knows who will read. A lease may have to be renewed: it then ends when nobody has renewed it for its
length, and at its deadline in any case. Messages may come late, twice, in another order, or before the lease
is opened here; what is over stays over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rayk.transfer.checked_message import is_count, pack, unpack


@dataclass(frozen=True, slots=True)
class ReleaseMessage:
    """One consumer rank needs a lease no longer."""

    lease_id: str
    consumer: str
    """Agent name of the consumer rank."""
    num_expected: int
    """Consumer ranks that tell this producer rank."""

    def encode(self) -> bytes:
        return pack(["release", self.lease_id, self.consumer, self.num_expected])

    @staticmethod
    def decode(message: bytes) -> ReleaseMessage | None:
        """Return None for a message that is no release."""
        match unpack(message):
            case ["release", str(lease_id), str(consumer), num] if is_count(num) and num > 0:
                return ReleaseMessage(lease_id, consumer, num)
        return None


@dataclass(frozen=True, slots=True)
class RenewMessage:
    """One consumer rank still needs a lease."""

    lease_id: str
    consumer: str
    """Agent name of the consumer rank."""
    number: int
    """Counts this rank's renewals of the lease."""

    def encode(self) -> bytes:
        return pack(["renew", self.lease_id, self.consumer, self.number])

    @staticmethod
    def decode(message: bytes) -> RenewMessage | None:
        """Return None for a message that is no renewal."""
        match unpack(message):
            case ["renew", str(lease_id), str(consumer), number] if is_count(number):
                return RenewMessage(lease_id, consumer, number)
        return None


RENEWALS_PER_LEASE = 3
"""Consumers renew so often within a lease's length: all but one may get lost."""


class Renewals:
    """When a consumer rank renews one lease: from the ticket's arrival on, until it releases it."""

    def __init__(self, lease_ns: int | None) -> None:
        """`lease_ns`: how long the lease lasts after a renewal; None: it needs none."""
        self._every_ns = lease_ns // RENEWALS_PER_LEASE if lease_ns is not None else None
        self._next_ns: int | None = None
        self.num_sent = 0

    def is_due(self, now_ns: int) -> bool:
        """Whether to renew now; asking counts as doing so. The first time is at once."""
        if self._every_ns is None or (self._next_ns is not None and now_ns < self._next_ns):
            return False
        self._next_ns = now_ns + self._every_ns
        self.num_sent += 1
        return True


@dataclass(slots=True)
class _Lease:
    deadline_ns: int | None = None
    """None until the lease is opened."""
    lease_ns: int | None = None
    """How long it lasts after a renewal; None: until the deadline."""
    ends_ns: int | None = None
    """Renewals move it, never past the deadline."""
    told_by: set[str] = field(default_factory=set)
    num_expected: int | None = None
    renewed: dict[str, int] = field(default_factory=dict)
    """Consumer -> number of its last renewal."""

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

    def open(self, lease_id: str, deadline_ns: int, *, now_ns: int = 0, lease_ns: int | None = None) -> None:
        """From now on the lease holds, until it is released everywhere or its deadline passes, or (where
        `lease_ns` is given) nobody has renewed it for so long."""
        assert lease_id not in self._leases, f"lease {lease_id} exists"
        lease = self._early.pop(lease_id, _Lease())
        lease.deadline_ns = deadline_ns
        lease.lease_ns = lease_ns
        lease.ends_ns = deadline_ns if lease_ns is None else min(deadline_ns, now_ns + lease_ns)
        self._leases[lease_id] = lease
        self._settle(lease_id)

    def on_release(self, message: ReleaseMessage) -> None:
        """Count a release; repeated ones, those of leases that are over, and those that expect another number
        of consumer ranks than the first change nothing."""
        lease = self._leases.get(message.lease_id)
        if lease is None:
            lease = self._early.setdefault(message.lease_id, _Lease())
            while len(self._early) > self.MAX_EARLY:
                self._early.pop(next(iter(self._early)))
        if lease.num_expected not in (None, message.num_expected):
            return  # who came first and this one do not read the same lease: it ends by its deadline
        lease.told_by.add(message.consumer)
        lease.num_expected = message.num_expected
        self._settle(message.lease_id)

    def on_renew(self, message: RenewMessage, now_ns: int) -> None:
        """Let a lease last on. Nothing changes for one that is over or that this consumer has released, nor
        by a renewal older than one that came before it."""
        lease = self._leases.get(message.lease_id)
        if lease is None or lease.lease_ns is None or message.consumer in lease.told_by:
            return
        assert lease.deadline_ns is not None
        assert lease.ends_ns is not None
        is_late = now_ns >= lease.ends_ns
        if is_late or message.number <= lease.renewed.get(message.consumer, -1):
            return
        lease.renewed[message.consumer] = message.number
        lease.ends_ns = min(lease.deadline_ns, now_ns + lease.lease_ns)

    def end(self, lease_id: str) -> None:
        """Nobody was told of a lease: it holds no longer. Nothing for those that are over."""
        self._leases.pop(lease_id, None)

    def expire(self, now_ns: int) -> list[str]:
        """End the leases that nobody has released or renewed in time; their ids, each once."""
        late = [
            lease_id
            for lease_id, lease in self._leases.items()
            if lease.ends_ns is not None and lease.ends_ns <= now_ns
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

    @property
    def next_end_ns(self) -> int | None:
        """When the first of them ends unless somebody releases or renews it; None: none is open."""
        ends = (lease.ends_ns for lease in self._leases.values() if lease.ends_ns is not None)
        return min(ends, default=None)

    def _settle(self, lease_id: str) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None and lease.is_over:
            del self._leases[lease_id]
            self._over.append(lease_id)
