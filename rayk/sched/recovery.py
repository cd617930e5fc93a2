"""What becomes of a request whose attempt failed. Pure.

The policy decides alone from what failed and who lives: `fail` ends the request; `recompute` has the consumer
compute what it cannot prove to have; `migrate` prefills again, at another producer where there is one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from rayk.types.errors import (
    DeadlineExceeded,
    EngineDied,
    HandshakeMismatch,
    KVMismatch,
    RaykError,
    TransferError,
)
from rayk.types.fault_table import FAILURE_POLICIES, FailurePolicy

MAX_ATTEMPTS = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pauses before a server's request asks again, doubled each time: its fleet may learn what the front saw."""


@enum.unique
class Cause(enum.Enum):
    """Why an attempt ended."""

    TRANSFER = enum.auto()
    """It did not arrive: a link, a reused block, a deadline of the transfer."""
    MISMATCH = enum.auto()
    """It arrived and is wrong."""
    PRODUCER_LOST = enum.auto()
    """The engine that computed the prompt is gone, and the request still needed it."""
    CONSUMER_LOST = enum.auto()
    """The engine that was to decode is gone."""
    DEADLINE = enum.auto()
    """The request's own time is over: nothing is left to try with."""
    REFUSED = enum.auto()
    """Asking again would be refused again, or nobody wants the answer any more."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How an attempt ended."""

    cause: Cause
    producer: int
    """Index of the prefill engine it was placed on."""
    num_valid_tokens: int = 0
    """Prompt tokens whose KV the consumer holds and has proven."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The request ends with its error."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """The consumer goes on by itself after so many tokens of KV."""

    num_valid_tokens: int


@dataclass(frozen=True, slots=True)
class Migrate:
    """Prefill again at this producer (an index); the consumer starts anew."""

    producer: int


Decision = GiveUp | Recompute | Migrate


class Recovery:
    """Decides for one request."""

    def __init__(self, policy: FailurePolicy, num_producers: int, max_attempts: int = MAX_ATTEMPTS) -> None:
        """`max_attempts`: times the request may be placed or taken up again, the first included."""
        assert policy in FAILURE_POLICIES, policy
        self.policy = policy
        self.num_attempts = 1
        self._num_producers = num_producers
        self._max_attempts = max_attempts

    def decide(
        self, failure: Failure, *, producers_live: Sequence[bool], consumer_lives: bool = True
    ) -> Decision:
        """What to do now. `producers_live`: by index, whether an engine takes requests; an engine that was
        formed again in place of a lost one does. `consumer_lives`: the same of the decode engine."""
        assert len(producers_live) == self._num_producers
        may_go_on = may_ask_again(self.policy, failure.cause, self.num_attempts, self._max_attempts)
        if not may_go_on or not consumer_lives:
            return GiveUp()
        if self.policy == "recompute":
            self.num_attempts += 1
            lost = failure.cause is Cause.CONSUMER_LOST
            return Recompute(0 if lost else failure.num_valid_tokens)
        # The others first, in turn; the same one last.
        turns = ((failure.producer + i) % self._num_producers for i in range(1, self._num_producers + 1))
        producer = next((p for p in turns if producers_live[p]), None)
        if producer is None:
            return GiveUp()
        self.num_attempts += 1
        return Migrate(producer)


def may_ask_again(policy: FailurePolicy, cause: Cause, num_attempts: int, max_attempts: int) -> bool:
    """Tell whether a request may have another attempt after so many, wherever that may be."""
    is_final = cause in (Cause.DEADLINE, Cause.REFUSED)
    return policy != "fail" and not is_final and num_attempts < max_attempts


def may_place_again(policy: FailurePolicy, error: RaykError, num_attempts: int, max_attempts: int) -> bool:
    """Tell whether a server's request that met this error is to ask for another place; where that is, its
    fleet decides."""
    # An engine is lost whoever it was, also one that the request never met, or the fleet.
    lost = error.engine if isinstance(error, EngineDied) else ""
    cause = cause_of(error, producer=lost, consumer="")
    return may_ask_again(policy, cause, num_attempts, max_attempts)


def pause_s(number: int) -> float:
    """Tell how long a server's request waits after attempt `number`, from 0, before it asks again."""
    return float(min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S))


def cause_of(error: RaykError, *, producer: str, consumer: str) -> Cause:
    """Return the cause behind an error; `producer`, `consumer`: names of the engines of the attempt."""
    match error:
        case KVMismatch():
            return Cause.MISMATCH
        case TransferError():
            return Cause.TRANSFER
        case HandshakeMismatch(fields) if [name for name, _, _ in fields] == ["engine"]:
            return Cause.TRANSFER  # another life of the producer than the ticket is of
        case EngineDied(engine) if engine == producer:
            return Cause.PRODUCER_LOST
        case EngineDied(engine) if engine == consumer:
            return Cause.CONSUMER_LOST
        case DeadlineExceeded():
            return Cause.DEADLINE
        case _:
            return Cause.REFUSED


def attempt_id(request_id: str, attempt: int) -> str:
    """Return the name of an attempt inside engines: late news of an earlier one must not be taken for it."""
    return request_id if attempt == 0 else f"{request_id}~{attempt}"
