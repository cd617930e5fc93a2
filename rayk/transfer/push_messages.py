"""What producer and consumer ranks tell each other of a push, as notifications. Pure.

All of them may come late, twice, in another order or not at all.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import ClassVar, NamedTuple

from rayk.transfer.checked_message import is_count, pack, unpack

PUSH_AGENT = "-push"
"""The agent of a rank's pusher is named after the rank's own, with this behind it."""


def speaks_for(peer: str, agent_name: str) -> bool:
    """Tell whether an agent tells of the pushes of a producer rank, whose own agent is `agent_name`."""
    return peer in (agent_name, agent_name + PUSH_AGENT)


class Tally(NamedTuple):
    """What an attempt wrote into one of the consumer's groups."""

    group: int
    num_bytes: int
    num_descriptors: int
    num_merged: int
    """Left when consecutive blocks of dense runs go as one."""
    num_writes: int
    num_early_writes: int
    """Those posted before the last layer of the prompt's last chunk was computed."""
    layers_per_write: int
    """What was asked for: the last write of a chunk may have fewer."""
    post_ns: int
    transfer_ns: int
    """While at least one write was in flight."""


@dataclass(frozen=True, slots=True)
class ArrivedMessage:
    """Producer rank to consumer rank: everything of this attempt lies in your blocks, and nothing of this
    reservation is in flight from here."""

    kind: ClassVar[str] = "arrived"
    reservation_id: str
    attempt: int
    producer_rank: int
    num_writes: int
    tally: tuple[Tally, ...] = ()
    """What reports show."""
    costs: str = ""
    """Where the layers per write come from: `CostTable.told`; empty where they were set."""

    def encode(self) -> bytes:
        return pack([self.kind, *astuple(self)])


@dataclass(frozen=True, slots=True)
class WroteMessage:
    """Producer rank to consumer rank, with a write: its bytes lie in your blocks."""

    kind: ClassVar[str] = "wrote"
    reservation_id: str
    attempt: int
    producer_rank: int
    write: int
    """0 and on, in each attempt."""

    def encode(self) -> bytes:
        return pack([self.kind, *astuple(self)])


@dataclass(frozen=True, slots=True)
class StoppedMessage:
    """Producer rank to consumer rank: nothing of this reservation is in flight here, nor ever will be."""

    kind: ClassVar[str] = "stopped"
    reservation_id: str
    producer_rank: int
    reason: str = ""

    def encode(self) -> bytes:
        return pack([self.kind, *astuple(self)])


@dataclass(frozen=True, slots=True)
class StopMessage:
    """Consumer rank to producer rank: write no more, and answer with StoppedMessage when nothing is in
    flight. Answered however often it comes, also where the reservation was never heard of."""

    kind: ClassVar[str] = "stop"
    reservation_id: str
    consumer_rank: int
    consumer: str
    """Agent name of the consumer rank."""

    def encode(self) -> bytes:
        return pack([self.kind, *astuple(self)])


@dataclass(frozen=True, slots=True)
class HelloMessage:
    """Producer rank to consumer rank, when they are connected: nothing but a first message, so that the
    network between them is set up before a request waits for it."""

    kind: ClassVar[str] = "hello"
    producer_rank: int

    def encode(self) -> bytes:
        return pack([self.kind, *astuple(self)])


PushMessage = ArrivedMessage | WroteMessage | StoppedMessage | StopMessage | HelloMessage


def decode_push(message: bytes) -> PushMessage | None:
    """Return None for a message that is none of these."""
    match unpack(message):
        case ["arrived", str(reservation), attempt, rank, num_writes, list(tally), str(costs)]:
            if all(map(_is_tally, tally)) and all(map(is_count, (attempt, rank, num_writes))):
                tallies = tuple(Tally(*t) for t in tally)
                return ArrivedMessage(reservation, attempt, rank, num_writes, tallies, costs)
        case ["wrote", str(reservation), *numbers] if len(numbers) == 3 and all(map(is_count, numbers)):
            return WroteMessage(reservation, *numbers)
        case ["stopped", str(reservation), rank, str(reason)] if is_count(rank):
            return StoppedMessage(reservation, rank, reason)
        case ["stop", str(reservation), rank, str(consumer)] if is_count(rank):
            return StopMessage(reservation, rank, consumer)
        case ["hello", rank] if is_count(rank):
            return HelloMessage(rank)
    return None


def _is_tally(part: object) -> bool:
    return isinstance(part, list) and len(part) == len(Tally._fields) and all(map(is_count, part))
