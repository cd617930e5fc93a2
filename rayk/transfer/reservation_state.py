"""Who may still write into a consumer rank's blocks: reservations for pushes, and when they are clear. Pure.

A producer rank that was given a reservation writes without asking. Blocks of it stay taboo until every
producer rank has said that nothing is in flight and nothing will come (an attempt that arrived whole, and is
the ticket's, or `StoppedMessage`), or the life of the engine that it belongs to is gone. A rank that must
stop is asked again and again: messages get lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rayk.transfer.push_messages import ArrivedMessage, StoppedMessage, WroteMessage


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Send StopMessage of this reservation to these producer ranks."""

    reservation_id: str
    producer_ranks: tuple[int, ...]


@dataclass(slots=True)
class PushAttempt:
    """What one producer rank told of its last attempt to push one request."""

    number: int
    writes: set[int] = field(default_factory=set)
    end: ArrivedMessage | None = None

    @property
    def is_whole(self) -> bool:
        """Every write was told of, and that there are no more."""
        if self.end is None or len(self.writes) < self.end.num_writes:
            return False
        return all(write in self.writes for write in range(self.end.num_writes))


@dataclass(slots=True)
class _ReservationState:
    engine: str
    epoch: int
    writers: set[int]
    """Producer ranks that may write."""
    attempts: dict[int, PushAttempt] = field(default_factory=dict)
    """Producer rank -> its last attempt."""
    stopped: dict[int, str] = field(default_factory=dict)
    """Producer rank -> why it stopped."""
    ask_at_ns: int | None = None
    """None: nobody is to stop."""

    def has_arrived(self, producer_rank: int, attempt: int) -> bool:
        """Tell whether all of this attempt is here."""
        last = self.attempts.get(producer_rank)
        return last is not None and last.number == attempt and last.is_whole


class ReservationTable:
    """The reservations of one consumer rank, with all producer engines."""

    def __init__(self, ask_every_ns: int) -> None:
        """`ask_every_ns`: how often ranks that must stop are asked again."""
        self._ask_every_ns = ask_every_ns
        self._reservations: dict[str, _ReservationState] = {}
        self._clear: list[str] = []

    def open(self, reservation_id: str, engine: str, epoch: int, num_producers: int) -> None:
        """Let every rank of this life of the engine write from now on."""
        assert reservation_id not in self._reservations, f"reservation {reservation_id} exists"
        self._reservations[reservation_id] = _ReservationState(engine, epoch, set(range(num_producers)))

    def on_progress(self, message: WroteMessage | ArrivedMessage) -> None:
        """Note what arrived; what is repeated, of an earlier attempt or of what is clear, changes nothing."""
        found, rank = self._reservations.get(message.reservation_id), message.producer_rank
        if found is None or rank not in found.writers:
            return
        last = found.attempts.get(rank)
        if last is None or last.number < message.attempt:
            last = found.attempts[rank] = PushAttempt(message.attempt)
        if last.number != message.attempt:
            return
        if isinstance(message, ArrivedMessage):
            last.end = message
        else:
            last.writes.add(message.write)

    def on_stopped(self, message: StoppedMessage) -> None:
        """Note that a rank writes no more."""
        found = self._reservations.get(message.reservation_id)
        if found is not None and message.producer_rank in found.writers:
            found.writers.discard(message.producer_rank)
            found.stopped[message.producer_rank] = message.reason
            self._settle(message.reservation_id)

    def on_engine_gone(self, engine: str, epoch: int) -> None:
        """A life of a producer engine is over, certainly: its ranks write no more."""
        for reservation_id, found in tuple(self._reservations.items()):
            if (found.engine, found.epoch) == (engine, epoch):
                found.stopped |= dict.fromkeys(found.writers, f"producer engine {engine} is gone")
                found.writers.clear()
                self._settle(reservation_id)

    def has_arrived(self, reservation_id: str, producer_rank: int, attempt: int) -> bool:
        """Tell whether all of this attempt of a producer rank is here."""
        found = self._reservations.get(reservation_id)
        return found is not None and found.has_arrived(producer_rank, attempt)

    def arrival(self, reservation_id: str, producer_rank: int) -> ArrivedMessage | None:
        """Return what a producer rank said of its last attempt, if that is here."""
        found = self._reservations.get(reservation_id)
        last = found.attempts.get(producer_rank) if found is not None else None
        return last.end if last is not None else None

    def stopped(self, reservation_id: str) -> dict[int, str]:
        """Tell which producer ranks stopped, and why."""
        found = self._reservations.get(reservation_id)
        return dict(found.stopped) if found is not None else {}

    def stop(self, reservation_id: str, now_ns: int, attempt: int | None = None) -> None:
        """The blocks are wanted back. `attempt`: the ticket's, where there is one: it is the request's last,
        and a rank of which it arrived writes no more."""
        found = self._reservations.get(reservation_id)
        if found is None:
            return
        if attempt is not None:
            found.writers -= {rank for rank in found.writers if found.has_arrived(rank, attempt)}
        if found.ask_at_ns is None:
            found.ask_at_ns = now_ns
        self._settle(reservation_id)

    def tick(self, now_ns: int) -> list[StopRequest]:
        """Whom to ask to stop, now."""
        stop_requests = []
        for reservation_id, found in self._reservations.items():
            if found.ask_at_ns is not None and found.ask_at_ns <= now_ns:
                found.ask_at_ns = now_ns + self._ask_every_ns
                stop_requests.append(StopRequest(reservation_id, tuple(sorted(found.writers))))
        return stop_requests

    def take_clear(self) -> list[str]:
        """Stopped reservations into whose blocks nobody writes any more, each once, then forgotten."""
        clear, self._clear = self._clear, []
        return clear

    @property
    def open_reservations(self) -> tuple[str, ...]:
        """Those into which somebody may write."""
        return tuple(self._reservations)

    def _settle(self, reservation_id: str) -> None:
        found = self._reservations[reservation_id]
        if found.ask_at_ns is not None and not found.writers:
            del self._reservations[reservation_id]
            self._clear.append(reservation_id)


class StoppedTable:
    """Reservations that a producer rank must not write into (any more).

    A stop may overtake the request it is about, so that what was never begun here is remembered too.
    """

    MAX_REMEMBERED = 1 << 16
    """Ids beyond this are forgotten, oldest first: requests are not that late."""

    def __init__(self) -> None:
        self._stopped: dict[str, None] = {}

    def stop(self, reservation_id: str) -> None:
        """No push of this reservation may begin here."""
        self._stopped[reservation_id] = None
        while len(self._stopped) > self.MAX_REMEMBERED:
            self._stopped.pop(next(iter(self._stopped)))

    def __contains__(self, reservation_id: object) -> bool:
        return reservation_id in self._stopped
