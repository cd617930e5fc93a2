"""Virtual time: order of events, cancelled ones, and an engine's clock that runs ahead of the world's."""

from __future__ import annotations

import random
from functools import partial

import pytest

from rayk.simulate.clock import MIN_CANCELLED, EventQueue, LocalClock


def test_events_happen_in_order_of_their_times_and_then_of_planning() -> None:
    draw = random.Random(1)
    world, found = EventQueue(), []
    planned = [(draw.randrange(20), number) for number in range(200)]
    for at_ns, number in planned:
        world.at(at_ns, lambda at_ns=at_ns, number=number: found.append((world.now_ns, at_ns, number)))
    world.run(until_ns=9)
    assert found == [(at_ns, at_ns, number) for at_ns, number in sorted(planned) if at_ns <= 9]
    world.run()
    assert [number for _, _, number in found] == [number for _, number in sorted(planned)]
    assert world.num_events == 200


def test_what_is_planned_for_the_past_happens_now() -> None:
    world, found = EventQueue(), []
    world.at(5, lambda: world.at(3, lambda: found.append(world())))
    world.run()
    assert found == [5]


def test_no_time_passes_for_what_is_cancelled() -> None:
    world = EventQueue()
    world.at(5, int)
    world.cancel(world.at(90, lambda: pytest.fail("it was cancelled")))
    world.run()
    assert (world.now_ns, world.num_events) == (5, 1)


def test_cancelled_events_do_not_pile_up() -> None:
    """As deadlines of requests that end long before."""
    world, found = EventQueue(), []
    for number in range(20_000):
        world.cancel(world.at(10**9 + number, lambda: pytest.fail("it was cancelled")))
        world.at(number, partial(found.append, number))
        world.run(until_ns=number // 2)
        assert len(world._heap) <= 2 * (number + 1 - len(found)) + 2 * MIN_CANCELLED
    world.run()
    assert found == list(range(20_000))
    assert (world.now_ns, world.num_events) == (19_999, 20_000)


def test_an_engine_is_ahead_of_the_world_only_in_its_turn() -> None:
    world = EventQueue()
    clock = LocalClock(world)
    found = []

    def turn() -> None:
        clock.begin_turn()
        clock.advance(70)
        clock.wait_until(60)
        found.append(clock())
        clock.end_turn()

    world.at(10, turn)
    world.at(30, lambda: found.append(clock()))
    world.at(50, turn)
    world.run()
    assert found == [80, 30, 150]
    with pytest.raises(AssertionError, match="between turns"):
        clock.advance(1)
