"""What a session that reads and one that pushes have in common: their end, in time, and how they drain. Pure.

A session that failed may have transfers in flight, which go on moving bytes in or out of its blocks. It then
drains: only after `Drained` may the blocks be used for anything else. Events that come late, twice or for
something unknown change nothing.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from rayk.types.errors import RaykError, TransferError


@dataclass(frozen=True, slots=True)
class Failed:
    """Something outside ends the session: an abort, a peer that is lost or wants no more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The verdict, exactly once. `is_draining`: transfers are still in flight, `Drained` will follow."""

    error: RaykError | None
    is_draining: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing moves bytes in or out of this side's blocks any more."""


@enum.unique
class Phase(enum.Enum):
    """Says where a session stands: one that reads goes from READING to VERIFYING, the other one pushes."""

    READING = enum.auto()
    FENCING = enum.auto()
    VERIFYING = enum.auto()
    PUSHING = enum.auto()
    OVER = enum.auto()


Event = TypeVar("Event")
Action = TypeVar("Action")


class DrainingSession(ABC, Generic[Event, Action]):
    """Actions are carried out in order; events they cause at once are handled after them."""

    def __init__(self, request_id: str, phase: Phase, deadline_ns: int) -> None:
        self.request_id = request_id
        self.phase = phase
        self._deadline_ns = deadline_ns

    @property
    def is_drained(self) -> bool:
        """Whether it is over, with nothing in flight."""
        return self.phase is Phase.OVER and not self._num_in_flight

    @property
    @abstractmethod
    def _num_in_flight(self) -> int:
        """Transfers whose ends are not known."""

    @abstractmethod
    def _forget(self, event: Event) -> None:
        """Take note that something in flight has ended, whatever it brought."""

    @abstractmethod
    def _fail(self, reason: str) -> list[Action | Finish | Drained]:
        """End the session with an error."""

    def _at_end(self, event: Event, now_ns: int) -> list[Action | Finish | Drained] | None:
        """Return what an event leads to after the end, or at the deadline; None before."""
        if self.phase is Phase.OVER:
            before = self.is_drained
            self._forget(event)
            return [Drained()] if self.is_drained and not before else []
        if now_ns >= self._deadline_ns:
            self._forget(event)
            return self._fail(f"deadline passed while {self.phase.name.lower()}")
        return None

    def _error(self, reason: str) -> TransferError:
        """End the session; nothing but its draining follows."""
        self.phase = Phase.OVER
        return TransferError(self.request_id, reason)
