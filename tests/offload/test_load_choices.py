"""Whether a prompt is loaded: what is weighed, and when it is not even tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rayk.handover import offloading, receiving
from rayk.offload import backoff
from rayk.offload.costs import LoadChoice
from tests.markers import thorough
from tests.offload.faults import Case, FaultyAgents, PausedTier, kill, reopen
from tests.offload.node import Node, NodeEngine
from tests.offload.test_faults import breaking_agents
from tests.pd import Clock, make_request, wait_until
from tests.transfer_faults import flip_bit, stall_reads

pytestmark = thorough

LENGTHS = (600, 301, 290, 280)
ROOM: dict[str, Any] = {"num_blocks": 400}


@pytest.fixture(scope="module")
def case(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Case:
    path = checkpoint("qwen3")
    return Case.make(path, reference(path), LENGTHS)


def told(engine: NodeEngine) -> dict[str, Any]:
    return engine.offloading.status()


def test_what_is_here_is_weighed_as_what_the_rest_sees(case: Case) -> None:
    """An engine has a prompt's beginning and the tier more of it: what is weighed lies behind that."""
    with Node.open(case.path, [ROOM, {**ROOM, "prefix_caching": True}]) as node:
        first, second = node.engines
        case.complete(first, "a", 0)
        node.settle()
        weighed, costs = [], second.offloading.costs
        real = costs.load

        def load(num_bytes: int, num_tokens: int, *more: Any, **here: int) -> LoadChoice:
            weighed.append((num_tokens, here["num_here"]))
            return real(num_bytes, num_tokens, *more, **here)

        costs.load = load  # type: ignore[method-assign]
        side = second.offloading.side
        tier, side.tier = side.tier, None
        second.complete([make_request("b", case.prompts[0][:280], 1)])
        second.run(lambda: setattr(side, "tier", tier))
        (done,) = case.complete(second, "c", 0)
        # Whole blocks of 16: 272 of 280 are kept here, 592 of 600 there.
        assert weighed == [(592 - 272, 272)]
        assert (done.info["num_cached_tokens"], done.info["num_host_tokens"]) == (592, 320)
        node.settle()


# Loads that fail in a row.

PATIENCE_S = 0.3
"""A load is waited for so long, and then as long until nothing is in flight."""
FIRST_S, LONGEST_S = 1000.0, 4000.0
"""Longer than any machine takes for a few prompts: the clock is set forward."""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "LOAD_S", PATIENCE_S)
    monkeypatch.setattr(offloading, "PATIENCE", 0.0)
    monkeypatch.setattr(receiving, "DRAIN_S", PATIENCE_S)
    monkeypatch.setattr(backoff, "FIRST_S", FIRST_S)
    monkeypatch.setattr(backoff, "LONGEST_S", LONGEST_S)


def eager(engine: NodeEngine) -> None:
    """Its cost model finds every move cheap."""
    costs = engine.offloading.costs
    costs.load = costs.swap = lambda *_, **__: LoadChoice(True, 1.0, 2.0)  # type: ignore[method-assign]


def stored(case: Case, node: Node, *indices: int) -> tuple[NodeEngine, NodeEngine]:
    """The engines: one has stored prompts, the other would load them whatever it costs."""
    first, second = node.engines
    eager(second)
    case.complete(first, "a", *indices)
    node.settle()
    return first, second


def open_stalled(case: Case, agents: FaultyAgents, **settings: Any) -> AbstractContextManager[Node]:
    return Node.open(case.path, [ROOM, ROOM], make_agent=agents, **settings)


@pytest.mark.usefixtures("hasty")
def test_loads_that_stand_still_are_left_alone_until_they_work_again(
    case: Case, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, clock, num = FaultyAgents(), Clock(monkeypatch), 0

    def num_loaded(engine: NodeEngine, times: int) -> int:
        """Of so many prompts in a row."""
        nonlocal num
        num += times
        done = [case.complete(engine, f"b{num - i}-", 1)[0] for i in range(times)]
        return sum(bool(d.info.get("num_host_tokens", 0)) for d in done)

    with open_stalled(case, agents, load="auto") as node:
        first, second = stored(case, node, 1)
        agents.made["e1.0"].plant(stall_reads())
        # Two in a row; then one after each of the pauses, which double.
        for tried, pause_s in enumerate((FIRST_S, 2 * FIRST_S, LONGEST_S, LONGEST_S), 2):
            assert num_loaded(second, 4) == 0
            assert told(second)["loads_failed"] == tried
            assert told(second)["loads_held_back"] == num - tried
            assert told(second)["lookups"] == tried, "nor is it looked up"
            assert "failed in a row" in told(second)["why_paused"]
            clock.go_on(pause_s / 2)
            assert num_loaded(second, 1) == 0
            assert told(second)["lookups"] == tried
            clock.go_on(pause_s / 2)
        warned = [r for r in caplog.records if "asks its host tier for nothing" in r.getMessage()]
        assert len(warned) == tried - 1
        agents.made["e1.0"].heal()
        monkeypatch.setattr(offloading, "LOAD_S", 60.0)
        assert num_loaded(second, 2) == 2
        assert told(second)["why_paused"] == ""
        node.settle()


@pytest.mark.usefixtures("hasty")
def test_whoever_always_wants_loads_tries_always(case: Case) -> None:
    agents = FaultyAgents()
    with open_stalled(case, agents, load="always") as node:
        first, second = node.engines
        case.complete(first, "a", 1)
        node.settle()
        agents.made["e1.0"].plant(stall_reads())
        for i in range(4):
            case.complete(second, f"b{i}-", 1)
        assert told(second)["loads_failed"] == 4
        assert told(second)["why_paused"] == ""
        agents.made["e1.0"].heal()
        node.settle()


def test_a_single_wrong_digest_does_not_end_loading(case: Case) -> None:
    agents = FaultyAgents()
    with open_stalled(case, agents, load="auto") as node:
        first, second = stored(case, node, 1, 2)
        for i in range(4):
            agents.made["e1.0"].plant(flip_bit(byte=7, bit=6))
            (bad,) = case.complete(second, f"b{i}-", 1)
            (good,) = case.complete(second, f"c{i}-", 2)
            assert "offload_failure" in bad.info
            assert good.info["num_host_tokens"] > 0
        assert told(second)["loads_failed"] == told(second)["loads"] == 4
        assert told(second).get("loads_held_back", 0) == 0
        node.settle()


def test_a_tier_that_answers_late_each_time_is_asked_less_and_less(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "ANSWER_S", 0.05)
    monkeypatch.setattr(backoff, "FIRST_S", FIRST_S)
    with Node.open(case.path, [ROOM, ROOM], load="auto") as node:
        first, second = stored(case, node, 1)
        paused = PausedTier.before(second, "load")
        for i in range(8):
            case.complete(second, f"b{i}-", 1)
            second.run(paused.go)
            paused.is_paused = True
        assert told(second)["lookups_late"] == backoff.IN_ROW
        assert told(second)["loads_held_back"] == 8 - backoff.IN_ROW
        node.settle()


def test_another_tier_begins_without_what_the_last_one_did(case: Case) -> None:
    agents = FaultyAgents()
    with open_stalled(case, agents, load="auto") as node:
        first, second = stored(case, node, 1, 2)
        for i in range(backoff.IN_ROW):
            agents.made["e1.0"].plant(flip_bit(byte=7, bit=6))
            case.complete(second, f"b{i}-", 1)
        assert told(second)["why_paused"]
        kill(node)
        assert not told(second)["why_paused"]
        reopen(node, agents)
        case.complete(first, "c", 3)
        node.settle()
        (done,) = case.complete(second, "d", 3)
        assert done.info["num_host_tokens"] > 0
        node.settle()


@pytest.mark.usefixtures("hasty")
def test_swaps_that_do_not_come_back_are_left_alone(
    case: Case, reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (make, agents), clock, names = breaking_agents(), Clock(monkeypatch), itertools.count()
    growing = Case.make(case.path, reference(case.path), [40 + i for i in range(8)], 120)
    small = {"num_blocks": 26, "max_seqs": 8}
    with Node.open(case.path, [small], make_agent=make, store=False, load="never", swap="auto") as node:
        (engine,) = node.engines
        eager(engine)
        agents["e0.0"].reads_left = 0
        growing.complete(engine, "a", *range(8))
        assert told(engine)["swaps_failed"] >= backoff.IN_ROW
        assert told(engine)["swaps_held_back"] > 0
        agents["e0.0"].reads_left = None
        node.settle()

        def is_swapped() -> bool:
            clock.go_on(LONGEST_S)
            growing.complete(engine, f"b{next(names)}-", *range(8))
            return bool(told(engine)["swapped_in_bytes"])

        wait_until(is_swapped, what=lambda: str(told(engine)))
        node.settle()
