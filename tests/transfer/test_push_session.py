"""A producer's machine of one push, event by event, against what its module promises."""

from __future__ import annotations

from rayk.transfer.push_session import (
    Action,
    CancelWrites,
    Drained,
    Event,
    Failed,
    Finish,
    LayersComputed,
    NotifyArrived,
    Phase,
    PostWrite,
    Preempted,
    PushSession,
    Tick,
    WriteDone,
    WriteEnded,
)
from rayk.types.errors import TransferError

DEADLINE = 1000


class Driver:
    """A session, and everything that it has said so far."""

    def __init__(self, num_layers: int = 1, layers_per_write: int = 1, late: tuple[int, ...] = ()) -> None:
        self.session = PushSession(
            "r",
            num_layers=num_layers,
            late_layers=late,
            layers_per_write=layers_per_write,
            deadline_ns=DEADLINE,
        )
        self.said: list[Action] = []

    def on(self, *events: Event, now: int = 0) -> list[Action]:
        """What the last of the events led to."""
        actions: list[Action] = []
        for event in events:
            actions = self.session.handle(event, now)
            self.said += actions
        return actions

    def count(self, kind: type[Action]) -> int:
        """How often it said so."""
        return sum(isinstance(action, kind) for action in self.said)


def chunk(start: int, stop: int, *, is_last: bool = False, layers: tuple[int, ...] = (0,)) -> LayersComputed:
    return LayersComputed(layers, start, stop, is_last)


def finished(reason: str, *, is_draining: bool) -> list[Finish]:
    return [Finish(TransferError("r", reason), is_draining)]


def told(actions: list[Action]) -> list[tuple[str, object]]:
    """Comparable: errors by their text."""
    return [
        ("finish", (str(action.error), action.is_draining)) if isinstance(action, Finish) else ("", action)
        for action in actions
    ]


def test_an_attempt_waits_for_the_writes_of_the_one_before():
    push = Driver()
    assert push.on(chunk(0, 4)) == [PostWrite(0, 0, (0,), 0, 4)]
    assert push.on(Preempted()) == [CancelWrites((0,))]
    assert push.on(chunk(0, 4)) == []
    assert push.on(chunk(4, 8, is_last=True)) == []
    assert push.on(WriteDone(0)) == [PostWrite(1, 1, (0,), 0, 4), PostWrite(2, 1, (0,), 4, 8)]
    assert push.on(WriteDone(2)) == []
    assert push.on(WriteDone(1)) == [NotifyArrived(1, 2), Finish(None, is_draining=False)]


def test_writes_that_were_held_when_blocks_are_taken_again_are_never_posted():
    push = Driver()
    assert push.on(chunk(0, 4), Preempted(), chunk(0, 4)) == []
    assert push.on(Preempted()) == [CancelWrites((0,))]
    assert push.on(chunk(0, 8, is_last=True)) == []
    # Write 1, of the second attempt, would go from blocks that are somebody else's by now.
    assert push.on(WriteDone(0)) == [PostWrite(2, 2, (0,), 0, 8)]
    assert push.on(WriteDone(2)) == [NotifyArrived(2, 1), Finish(None, is_draining=False)]


def test_layers_gathered_for_a_write_go_with_their_attempt():
    push = Driver(num_layers=2, layers_per_write=2)
    assert push.on(chunk(0, 4)) == []
    assert push.on(Preempted()) == []
    assert push.on(chunk(0, 4, is_last=True)) == []
    assert push.on(chunk(0, 4, is_last=True, layers=(1,))) == [PostWrite(0, 1, (0, 1), 0, 4)]


def test_an_arrival_counts_the_writes_of_one_attempt():
    push = Driver()
    push.on(chunk(0, 2), WriteDone(0), chunk(2, 4), WriteDone(1))
    assert push.on(Preempted()) == []
    push.on(chunk(0, 3), WriteDone(2), Preempted())
    assert push.on(chunk(0, 5, is_last=True)) == [PostWrite(3, 2, (0,), 0, 5)]
    assert push.on(WriteDone(3)) == [NotifyArrived(2, 1), Finish(None, is_draining=False)]


def test_blocks_taken_after_the_last_chunk_make_all_of_it_void():
    push = Driver()
    push.on(chunk(0, 4), WriteDone(0), chunk(4, 8, is_last=True))
    assert push.on(Preempted()) == [CancelWrites((1,))]
    # What was computed is gone: the end of its last write is no arrival.
    assert push.on(WriteDone(1)) == []
    assert push.session.phase is Phase.PUSHING
    assert push.on(chunk(0, 8, is_last=True)) == [PostWrite(2, 1, (0,), 0, 8)]
    assert push.on(WriteDone(2)) == [NotifyArrived(1, 1), Finish(None, is_draining=False)]


def test_a_write_of_a_void_attempt_may_fail_and_one_of_this_may_not():
    push = Driver()
    push.on(chunk(0, 4), Preempted())
    assert push.on(WriteEnded(0, "cancelled")) == []
    push.on(chunk(0, 4), chunk(4, 8))
    assert told(push.on(WriteEnded(1, "no route"))) == told(
        [CancelWrites((2,)), *finished("no route", is_draining=True)]
    )
    assert push.on(WriteDone(2)) == [Drained()]


def test_the_end_of_a_write_counts_once():
    push = Driver()
    push.on(chunk(0, 4), WriteDone(0))
    assert push.on(WriteDone(0)) == []
    assert push.on(WriteEnded(0, "late")) == []
    assert push.on(WriteDone(7)) == []
    push.on(chunk(4, 6), chunk(6, 8, is_last=True))
    assert push.on(WriteDone(0)) == []
    assert push.on(WriteDone(1)) == []
    assert push.on(WriteDone(2)) == [NotifyArrived(0, 3), Finish(None, is_draining=False)]


def test_late_layers_go_whole_with_the_last_chunk():
    push = Driver(num_layers=2, layers_per_write=2, late=(1,))
    assert push.on(chunk(0, 4, layers=(0, 1))) == [PostWrite(0, 0, (0,), 0, 4)]
    assert push.on(chunk(4, 7, layers=(0, 1), is_last=True)) == [
        PostWrite(1, 0, (0,), 4, 7),
        PostWrite(2, 0, (1,), 0, 7),
    ]


def test_a_push_that_fails_with_nothing_in_flight_is_drained_at_once():
    push = Driver()
    push.on(chunk(0, 4), WriteDone(0))
    found = push.on(Failed("aborted"))
    assert told(found) == told([*finished("aborted", is_draining=False), Drained()])


def test_a_push_that_fails_drains_and_says_so_once():
    push = Driver()
    push.on(chunk(0, 2), chunk(2, 4))
    found = push.on(Failed("aborted"))
    assert told(found) == told([CancelWrites((0, 1)), *finished("aborted", is_draining=True)])
    assert push.on(Failed("again"), Preempted(), chunk(4, 8, is_last=True), Tick()) == []
    assert push.on(WriteEnded(1, "cancelled")) == []
    assert not push.session.is_drained
    assert push.on(WriteDone(0)) == [Drained()]
    assert push.on(WriteDone(0), WriteEnded(1, "x"), Failed("late"), Tick(), now=2 * DEADLINE) == []
    assert [push.count(kind) for kind in (Finish, Drained, NotifyArrived)] == [1, 1, 0]


def test_writes_that_were_held_when_it_fails_are_never_posted():
    push = Driver()
    push.on(chunk(0, 4), Preempted(), chunk(0, 4))
    found = push.on(Failed("aborted"))
    assert told(found) == told([CancelWrites((0,)), *finished("aborted", is_draining=True)])
    assert push.on(WriteDone(0)) == [Drained()]


def test_nothing_follows_an_arrival():
    push = Driver()
    push.on(chunk(0, 4, is_last=True), WriteDone(0))
    said = list(push.said)
    push.on(Preempted(), chunk(0, 4, is_last=True), Failed("late"), WriteDone(0), Tick(), now=2 * DEADLINE)
    assert push.said == said
    assert said[-2:] == [NotifyArrived(0, 1), Finish(None, is_draining=False)]


def test_a_push_ends_at_its_deadline_whatever_comes():
    reason = "deadline passed while pushing"
    idle = Driver()
    assert idle.on(Tick(), now=DEADLINE - 1) == []
    assert told(idle.on(Tick(), now=DEADLINE)) == told([*finished(reason, is_draining=False), Drained()])
    busy = Driver()
    busy.on(chunk(0, 4))
    found = busy.on(chunk(4, 8, is_last=True), now=DEADLINE)
    assert told(found) == told([CancelWrites((0,)), *finished(reason, is_draining=True)])
    assert busy.on(WriteDone(0), now=DEADLINE) == [Drained()]
    # The event that comes too late may be the end of its last write.
    late = Driver()
    late.on(chunk(0, 4, is_last=True))
    found = late.on(WriteDone(0), now=DEADLINE)
    assert told(found) == told([*finished(reason, is_draining=False), Drained()])
