"""Waiting for a place, against a list that is searched from end to end."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from rayk.sched.keyed_heap import KeyedHeap
from rayk.sched.waiting_room import MAX_RETRY_S, MIN_RETRY_S, NUM_GAPS, WaitingRoom
from rayk.types.errors import Overloaded
from tests.each import each

SECOND = 10**9


@dataclass
class Listed:
    """The same by brute force: who waits, in order of arrival."""

    max_waiting: int
    waiting: list[tuple[str, int, int | None]] = field(default_factory=list)
    """(name, priority, deadline)"""

    def enter(self, name: str, priority: int, deadline_ns: int | None) -> bool:
        if len(self.waiting) >= self.max_waiting:
            return False
        self.waiting.append((name, priority, deadline_ns))
        return True

    def leave(self, name: str) -> str | None:
        found = [w for w in self.waiting if w[0] == name]
        self.waiting = [w for w in self.waiting if w[0] != name]
        return found[0][0] if found else None

    def pop(self, now_ns: int) -> str | None:
        live = [w for w in self.waiting if w[2] is None or now_ns < w[2]]
        return self.leave(sorted(live, key=lambda w: w[1])[0][0]) if live else None  # sorted() is stable

    def expire(self, now_ns: int) -> list[str]:
        late = [w for w in self.waiting if w[2] is not None and w[2] <= now_ns]
        self.waiting = [w for w in self.waiting if w not in late]
        return [w[0] for w in late]

    @property
    def next_deadline_ns(self) -> int | None:
        return min((w[2] for w in self.waiting if w[2] is not None), default=None)


@each("seed", range(20))
def test_a_room_does_what_a_list_does(seed: int) -> None:
    draw = random.Random(seed)
    room = WaitingRoom[str](max_waiting=draw.choice([0, 1, 5, 40]))
    listed = Listed(room.max_waiting)
    now_ns = 0
    for i in range(600):
        now_ns += draw.randint(0, 3)
        event = draw.choice(["enter", "enter", "enter", "leave", "pop", "pop", "expire", "completed"])
        if event == "enter":
            priority = draw.randint(-1, 1)
            deadline_ns = draw.choice([None, now_ns - 1, now_ns + draw.randint(0, 60)])
            if listed.enter(str(i), priority, deadline_ns):
                room.enter(str(i), str(i), priority=priority, deadline_ns=deadline_ns, now_ns=now_ns)
            else:
                with pytest.raises(Overloaded):
                    room.enter(str(i), str(i), priority=priority, deadline_ns=deadline_ns, now_ns=now_ns)
        elif event == "leave":
            known = [w[0] for w in listed.waiting]
            name = draw.choice([*known, "nobody"])
            assert room.leave(name) == listed.leave(name)
        elif event == "pop":
            assert room.pop(now_ns) == listed.pop(now_ns)
        elif event == "expire":
            assert sorted(room.expire(now_ns)) == sorted(listed.expire(now_ns))
        else:
            room.completed(now_ns)
        names = {w[0] for w in listed.waiting}
        assert len(room) == len(names)
        assert all(name in room for name in names)
        assert room.next_deadline_ns == listed.next_deadline_ns
    left = [w for w in listed.waiting if w[2] is None or w[2] > now_ns]
    assert [room.pop(now_ns) for _ in left] == [w[0] for w in sorted(left, key=lambda w: w[1])]
    assert room.pop(now_ns) is None


def test_who_expires_comes_in_order_of_deadlines() -> None:
    room = WaitingRoom[str](max_waiting=9)
    for name, deadline_ns in (("a", 30), ("b", 10), ("c", None), ("d", 20), ("e", 40)):
        room.enter(name, name, deadline_ns=deadline_ns, now_ns=0)
    assert room.expire(30) == ["b", "d", "a"]
    assert room.expire(30) == []
    assert room.pop(30) == "c"


def test_one_passed_over_in_its_turn_still_expires_and_can_leave() -> None:
    room = WaitingRoom[str](max_waiting=3)
    for name in ("late", "gone"):
        room.enter(name, name, priority=-1, deadline_ns=5, now_ns=0)
    room.enter("live", "live", now_ns=0)
    assert room.pop(6) == "live"
    assert len(room) == 2
    assert room.leave("gone") == "gone"
    assert room.expire(6) == ["late"]
    assert len(room) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_heap_keeps_its_order_whoever_leaves(seed: int) -> None:
    draw = random.Random(seed)
    heap: KeyedHeap[int] = KeyedHeap()
    kept: dict[str, int] = {}
    for i in range(500):
        if kept and draw.random() < 0.45:
            name = draw.choice(list(kept))
            assert heap.key_of(name) == kept.pop(name)
            heap.discard(name)
            heap.discard(name)
            assert name not in heap
        else:
            kept[str(i)] = draw.randint(0, 50)
            heap.push(str(i), kept[str(i)])
        assert len(heap) == len(kept)
        first = heap.first
        assert (first is None) == (not kept)
        assert first is None or kept[first] == min(kept.values())


@dataclass
class Counted:
    """A key that counts how often keys are compared."""

    value: float
    seen: list[int]

    def __lt__(self, other: Counted) -> bool:
        self.seen[0] += 1
        return self.value < other.value


def test_to_leave_takes_a_few_comparisons_however_many_there_are() -> None:
    draw, num, seen = random.Random(0), 4096, [0]
    heap: KeyedHeap[Counted] = KeyedHeap()
    names = [str(i) for i in range(num)]
    for name in names:
        before = seen[0]
        heap.push(name, Counted(draw.random(), seen))
        assert seen[0] - before <= 12
    draw.shuffle(names)
    for name in names:
        before = seen[0]
        heap.discard(name)
        assert seen[0] - before <= 12 + 2 * 12 + 1, "up to the root, down to a leaf"


# --- when to come again -----------------------------------------------------------------------------


def full_room(num: int, now_ns: int = 0) -> WaitingRoom[str]:
    room = WaitingRoom[str](max_waiting=num)
    for i in range(num):
        room.enter(str(i), str(i), now_ns=now_ns)
    return room


def test_nothing_is_known_of_a_server_that_completed_nothing_yet() -> None:
    assert full_room(8).retry_after_s(0) == MIN_RETRY_S


@pytest.mark.parametrize("seed", range(5))
def test_retry_after_is_the_time_half_of_those_who_wait_take_at_the_pace_seen(seed: int) -> None:
    draw, room, now_ns = random.Random(seed), full_room(20), 0
    gaps: list[int] = []
    for _ in range(draw.choice([3, 200])):
        gaps.append(draw.randint(0, 2 * SECOND))
        now_ns += gaps[-1]
        room.completed(now_ns)
    seen = gaps[-NUM_GAPS:]
    expected = 10 * sum(seen) / len(seen) / SECOND
    assert math.isclose(room.retry_after_s(now_ns), min(max(expected, MIN_RETRY_S), MAX_RETRY_S))
    with pytest.raises(Overloaded) as caught:
        room.enter("more", "more", now_ns=now_ns)
    assert caught.value.retry_after_s == room.retry_after_s(now_ns)
    assert "20 requests wait" in str(caught.value)


def test_a_server_that_stands_still_says_later_and_later() -> None:
    room = full_room(4)
    for i in range(1, 11):
        room.completed(i * SECOND)
    told = [room.retry_after_s((10 + s) * SECOND) for s in (0, 1, 12, 10_000)]
    assert told[0] == told[1] == 2.0, "a gap like the others"
    assert told[1] < told[2] < told[3] == MAX_RETRY_S


def test_time_in_which_nobody_waited_is_not_held_against_the_server() -> None:
    room = full_room(4)
    for i in range(1, 5):
        room.completed(i * SECOND)
        assert room.pop(i * SECOND) is not None
    room.completed(5 * SECOND)
    day = 86400 * SECOND
    for i in range(4):
        room.enter(f"again{i}", "x", now_ns=day)
    assert room.retry_after_s(day) == 2.0
    room.completed(day + SECOND)
    assert room.retry_after_s(day + SECOND) == 2.0


def test_a_room_for_nobody_learns_from_those_it_turns_away() -> None:
    room = WaitingRoom[str](max_waiting=0)
    for i in range(4):
        with pytest.raises(Overloaded):
            room.enter("a", "a", now_ns=i * 100 * SECOND)
        room.completed(i * 100 * SECOND + 7 * SECOND)
    assert room.retry_after_s(400 * SECOND) == 7.0


def test_a_reason_of_ones_own() -> None:
    error = WaitingRoom[str](max_waiting=1).overloaded(0, "the server is about to end")
    assert str(error) == "the server is about to end; try again in 1 s"
