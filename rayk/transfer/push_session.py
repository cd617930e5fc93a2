"""One request's push from one producer rank to one consumer rank, as a pure state machine.

    PUSHING --last chunk computed, all its writes done--> OVER (ok, NotifyArrived)
       |--Preempted: next attempt; its writes wait until those of the attempt before have ended
       `--Failed, a write failed, deadline--> OVER (failed), Drained when nothing is in flight

Layers of a chunk are written k at a time while later ones compute. What only the end of the prompt decides
(windows, the current chunk of chunked attention, recurrent states) goes with the last chunk. Writes are not
ordered, so the consumer is told that all is there only after every one of them is done; and nothing is
written after `NotifyArrived` or `Drained`: the consumer hands its blocks out again on the strength of these.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rayk.transfer.draining import Drained, DrainingSession, Failed, Finish, Phase, Tick

# Events


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """The kernels that wrote rows [start, stop) of these layers are done.

    Layers of a chunk come in ascending order, each once, over one or more events. The first chunk of an
    attempt begins at 0 (rows that were cached go with it), each other where the one before ended.
    """

    layers: tuple[int, ...]
    start: int
    stop: int
    is_last_chunk: bool


@dataclass(frozen=True, slots=True)
class WriteDone:
    """All bytes of a write are visible at the consumer rank."""

    write: int


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """A write failed or was cancelled: it writes nothing any more."""

    write: int
    reason: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """The scheduler took the request's blocks: all that was written is void, and it will be computed anew."""


Event = LayersComputed | WriteDone | WriteEnded | Preempted | Failed | Tick


# Actions


@dataclass(frozen=True, slots=True)
class PostWrite:
    """Write rows [start, stop) of these layers, of what is live of them there when the prompt is computed up
    to `stop`."""

    write: int
    """Numbered on over all attempts."""
    attempt: int
    layers: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class NotifyArrived:
    """Tell the consumer rank (ArrivedMessage)."""

    attempt: int
    num_writes: int
    """Writes of this attempt."""


@dataclass(frozen=True, slots=True)
class CancelWrites:
    """Try to cancel these writes; report WriteEnded for those that could be."""

    writes: tuple[int, ...]


Action = PostWrite | NotifyArrived | CancelWrites | Finish | Drained


class PushSession(DrainingSession[Event, Action]):
    """After a failure, `Drained` has the consumer rank told (StoppedMessage)."""

    def __init__(
        self,
        request_id: str,
        *,
        num_layers: int,
        late_layers: Collection[int] = (),
        layers_per_write: int = 1,
        deadline_ns: int,
    ) -> None:
        """`num_layers`: layers that are reported for each chunk, 0 and on; `late_layers`: those of which the
        consumer keeps only what is live at the end, written with the last chunk."""
        assert num_layers > 0
        assert layers_per_write > 0
        super().__init__(request_id, Phase.PUSHING, deadline_ns)
        self.attempt = 0
        self._last_layer = num_layers - 1
        self._late = frozenset(late_layers)
        self._layers_per_write = layers_per_write
        self._next_write = 0
        self._attempt_began_at = 0
        """First write of this attempt."""
        self._in_flight: set[int] = set()
        self._waiting_writes: list[PostWrite] = []
        """Writes of this attempt that wait while writes of the one before are in flight."""
        self._gathered: dict[tuple[int, int], list[int]] = {}
        """Row range -> layers computed but not yet written."""
        self._is_computed = False

    @property
    def _num_in_flight(self) -> int:
        return len(self._in_flight)

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """What to do about an event at this time."""
        at_end = self._at_end(event, now_ns)
        if at_end is not None:
            return at_end
        match event:
            case LayersComputed():
                return self._on_layers(event)
            case WriteDone(write) if write in self._in_flight:
                self._in_flight.discard(write)
                return self._go_on()
            case WriteEnded(write, reason) if write in self._in_flight:
                self._in_flight.discard(write)
                # What an attempt before had in flight is void anyway.
                return self._go_on() if write < self._attempt_began_at else self._fail(reason)
            case Preempted():
                return self._on_preempted()
            case Failed(reason):
                return self._fail(reason)
        return []

    def _on_layers(self, event: LayersComputed) -> list[Action]:
        actions: list[Action] = []
        for layer in event.layers:
            if layer in self._late and not event.is_last_chunk:
                continue
            rows = (0 if layer in self._late else event.start, event.stop)
            gathered = self._gathered.setdefault(rows, [])
            gathered.append(layer)
            if len(gathered) == self._layers_per_write:
                actions += self._write(rows)
        if self._last_layer in event.layers:
            for rows in tuple(self._gathered):
                actions += self._write(rows)
            self._is_computed = event.is_last_chunk
        return [*actions, *self._go_on()]

    def _write(self, rows: tuple[int, int]) -> list[Action]:
        post = PostWrite(self._next_write, self.attempt, tuple(self._gathered.pop(rows)), *rows)
        self._next_write += 1
        if self._waits_for_old_writes:
            self._waiting_writes.append(post)
            return []
        self._in_flight.add(post.write)
        return [post]

    @property
    def _waits_for_old_writes(self) -> bool:
        return any(write < self._attempt_began_at for write in self._in_flight)

    def _go_on(self) -> list[Action]:
        """Go on after something in flight has ended, or when there is more to write."""
        if self._waits_for_old_writes:
            return []
        ready, self._waiting_writes = self._waiting_writes, []
        self._in_flight |= {post.write for post in ready}
        if not self._is_computed or self._in_flight:
            return list(ready)
        self.phase = Phase.OVER
        arrived = NotifyArrived(self.attempt, self._next_write - self._attempt_began_at)
        return [arrived, Finish(None, is_draining=False)]

    def _on_preempted(self) -> list[Action]:
        self.attempt += 1
        self._attempt_began_at = self._next_write
        self._waiting_writes.clear()
        self._gathered.clear()
        self._is_computed = False
        return [CancelWrites(tuple(sorted(self._in_flight)))] if self._in_flight else []

    def _fail(self, reason: str) -> list[Action]:
        self._waiting_writes.clear()
        self._gathered.clear()
        error = self._error(reason)
        if not self._in_flight:
            return [Finish(error, is_draining=False), Drained()]
        return [CancelWrites(tuple(sorted(self._in_flight))), Finish(error, is_draining=True)]

    def _forget(self, event: Event) -> None:
        match event:
            case WriteDone(write) | WriteEnded(write, _):
                self._in_flight.discard(write)
