"""What is decided about requests and engines, under a clock that only the tests move."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rayk.sched.dispatcher import Abort, Action, Dispatcher, DispatchRules, Drop, FormAgain, Place, Refuse
from rayk.sched.policies import get_policy
from rayk.sched.policy import Placement, PlacementRequest
from rayk.sched.recovery import MAX_ATTEMPTS, Cause
from rayk.types.errors import DeadlineExceeded, EngineDied, InternalError, Overloaded
from rayk.types.fault_table import FailurePolicy
from tests.each import each

SECOND = 10**9
SERVER = DispatchRules(hands_over=True, max_waiting=2, pauses_s=(0.0, 0.5, 2.0))
CELL = DispatchRules(hands_over=True, places_at_once=True, restarts=frozenset({"p0"}))
KILLED = EngineDied("p0", "killed")
BUG = InternalError("p0", "KeyError: 'a layer'")


def ask(name: str) -> PlacementRequest:
    return PlacementRequest(request_id=name, num_prompt_tokens=10, max_tokens=5)


def place(name: str, prefill: str = "p0", decode: str = "d0") -> Place:
    return Place(name, Placement(prefill=prefill, decode=decode))


class Clocked:
    """A dispatcher whose events carry the second at which they happen."""

    def __init__(self, rules: DispatchRules, max_running: int = 2) -> None:
        self.dispatcher = Dispatcher(get_policy("round_robin"), rules, max_running=max_running)

    def at(self, second: float, event: str, *args: Any, **how: Any) -> Any:
        now_ns = int(second * SECOND)
        match event:
            case "arrive":
                front, name = args
                return self.dispatcher.arrive(front, ask(name), now_ns, **how)
            case "open":
                return self.dispatcher.open(*args, 1, now_ns)
            case "ended":
                return self.dispatcher.ended(args, now_ns)
            case "lost" | "not_formed" | "prefilled":
                return getattr(self.dispatcher, event)(*args)
            case _:
                return getattr(self.dispatcher, event)(*args, now_ns)


def cell_of(policy: FailurePolicy) -> Clocked:
    """Two engines of each side, of which p0 is formed again once."""
    clocked = Clocked(replace(CELL, failure_policy=policy))
    for engine, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
        clocked.at(0, "open", engine, role)
    return clocked


def refused(actions: Sequence[Action]) -> list[tuple[str, type[Exception]]]:
    """The requests that were turned away, and how; there is nothing else among the actions."""
    assert all(isinstance(a, Refuse) for a in actions), actions
    return [(a.name, type(a.error)) for a in actions if isinstance(a, Refuse)]


def test_a_servers_requests_are_admitted_placed_and_turned_away() -> None:
    """By hand: two places, two seats to wait on."""
    clocked = Clocked(SERVER)
    at = clocked.at
    assert at(0, "arrive", "f", "a", deadline_s=9) == [], "no engine yet"
    assert at(0, "open", "d0", "decode") == []
    assert at(1, "open", "p0", "prefill") == [place("a")]
    assert at(2, "arrive", "f", "b", deadline_s=9) == [place("b")]
    assert at(2, "arrive", "f", "b", deadline_s=9) == [place("b")], "its first answer was lost"
    assert at(3, "arrive", "f", "c", deadline_s=4) == []
    assert at(3, "arrive", "f", "d", deadline_s=9, priority=-1) == []
    assert refused(at(3, "arrive", "f", "e", deadline_s=9)) == [("e", Overloaded)]
    assert at(4, "arrive", "f", "b~1", deadline_s=9, again=True) == [], (
        "but one that was admitted before waits"
    )
    assert clocked.dispatcher.next_deadline_ns == 7 * SECOND
    assert at(5, "ended", "a") == [place("b~1")]
    assert at(6, "expire") == []
    assert refused(at(7, "expire")) == [("c", DeadlineExceeded)]
    assert at(8, "ended", "b") == [place("d")], "the lower priority"
    assert at(8, "arrive", "f", "g", deadline_s=9) == []
    assert at(9, "ended", "g", "never came") == [Drop("g")]
    assert refused(at(9, "arrive", "f", "never came", deadline_s=9)) == [("never came", DeadlineExceeded)]
    clocked.dispatcher.is_draining = True
    assert refused(at(9, "arrive", "f", "h", deadline_s=9)) == [("h", Overloaded)]
    assert at(9, "ended", "d", "b~1") == []
    assert (clocked.dispatcher.num_running, clocked.dispatcher.num_waiting) == (0, 0)


def test_more_places_are_given_from_the_next_event_on() -> None:
    clocked = Clocked(SERVER, max_running=1)
    at = clocked.at
    at(0, "open", "p0", "prefill")
    at(0, "open", "d0", "decode")
    assert [at(1, "arrive", "f", name, deadline_s=9) for name in "abc"] == [[place("a")], [], []]
    clocked.dispatcher.allow(2)
    assert at(2, "ended", "a") == [place("b"), place("c")]


def test_a_front_that_is_silent_has_its_requests_aborted() -> None:
    at = Clocked(SERVER).at
    at(0, "open", "p0", "prefill")
    at(0, "open", "d0", "decode")
    assert at(0, "arrive", "f", "a", deadline_s=99) == [place("a")]
    assert at(5, "arrive", "g", "b", deadline_s=99) == [place("b")]
    assert at(5, "arrive", "g", "c", deadline_s=99) == []
    assert at(6, "arrive", "f", "d", deadline_s=99) == []
    at(15, "heard", "g")
    assert at(16, "silent", 10.0) == [], "of f 10 s ago, and no longer"
    aborted, turned_away, let_in = at(17, "silent", 10.0)
    assert (aborted, let_in) == (Abort("a", place("a").placement), place("c"))
    assert refused([turned_away]) == [("d", EngineDied)]


def test_a_servers_engine_is_formed_again_until_a_bug_is_met() -> None:
    at = Clocked(SERVER).at
    at(0, "open", "p0", "prefill")
    at(0, "open", "p1", "prefill")
    at(0, "open", "d0", "decode")
    assert at(1, "lost", "p0") == FormAgain("p0", 0.0)
    assert at(2, "arrive", "f", "a", deadline_s=9) == [place("a", "p1")], "the other one"
    found = [at(second, "not_formed", "p0", KILLED) for second in (3, 4, 5)]
    assert found == [FormAgain("p0", 0.5), FormAgain("p0", 2.0), FormAgain("p0", 2.0)]
    at(6, "open", "p0", "prefill")
    assert at(7, "lost", "p0") == FormAgain("p0", 0.0), "the pauses begin anew"
    assert at(8, "not_formed", "p0", BUG) is None


def test_a_cells_requests_wait_on_the_engine_that_is_formed_again() -> None:
    at = Clocked(CELL, max_running=0).at
    for engine, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
        at(0, "open", engine, role)
    assert at(1, "lost", "p1") is None
    assert at(2, "lost", "p0") == FormAgain("p0", 0.0)
    assert [at(3, "arrive", "run", name) for name in "ab"] == [[place("a")], [place("b")]]
    at(4, "open", "p0", "prefill")
    assert at(5, "lost", "p0") is None, "once"
    found = {at(6, "arrive", "run", name)[0].placement.prefill for name in "cdef"}
    assert found == {"p0", "p1"}, "none lives: each tells what it died of"


@each(
    "policy, causes, goes",
    [
        ("fail", [Cause.TRANSFER], [None]),
        ("migrate", [Cause.TRANSFER] * 3, [("a~1", "p1", "d0"), ("a~2", "p0", "d0"), None]),
        ("migrate", [Cause.DEADLINE], [None]),
        ("recompute", [Cause.MISMATCH, Cause.CONSUMER_LOST], [("a~1", None, "d0"), ("a~2", None, "d0")]),
        ("recompute", [Cause.REFUSED], [None]),
    ],
)
def test_a_cells_failed_request_goes_on_as_the_policy_says(
    policy: FailurePolicy, causes: list[Cause], goes: list[tuple[str, str | None, str] | None]
) -> None:
    at = cell_of(policy).at
    assert at(1, "arrive", "run", "a") == [place("a")]
    name = "a"
    for cause, expected in zip(causes, goes, strict=True):
        again = at(2, "failed", name, cause)
        assert again == (expected and Place(expected[0], Placement(prefill=expected[1], decode=expected[2])))
        name = again.name if again else name


def test_a_failed_request_goes_to_engines_that_live_while_there_are_any() -> None:
    at = cell_of("migrate").at
    for name in "ab":
        at(1, "arrive", "run", name)
    at(2, "lost", "d0")
    assert at(3, "failed", "a", Cause.CONSUMER_LOST) == place("a~1", "p1", "d1")
    at(4, "lost", "p1")
    assert at(5, "failed", "b", Cause.PRODUCER_LOST) == place("b~1", "p0", "d1"), "p0 is to be formed again"
    at(6, "lost", "d1")
    assert at(7, "failed", "a~1", Cause.CONSUMER_LOST) is None


@each("seed", range(40))
def test_a_cells_requests_end_once_after_so_many_attempts_at_most(seed: int) -> None:
    """A random walk of a cell: attempts fail and engines are lost, in any order."""
    draw = random.Random(seed)
    clocked = cell_of(draw.choice(["migrate", "recompute"]))
    dispatcher, lost = clocked.dispatcher, set[str]()
    running: dict[str, Placement] = {}
    num_attempts, num_over = Counter[str](), 0

    def take(placed: Place, *, is_first: bool) -> None:
        running[placed.name] = placed.placement
        num_attempts[placed.name.partition("~")[0]] += 1
        engines = {placed.placement.prefill, placed.placement.decode} - {None}
        if not is_first or len(lost & {"p0", "p1"}) < 2 > len(lost & {"d0", "d1"}):
            assert not engines & lost, placed

    for step in range(100):
        event = draw.choice(["arrive", "arrive", "failed", "failed", "ended", "ended", "lost"])
        if event == "arrive":
            (placed,) = clocked.at(step, "arrive", "run", f"r{step}")
            take(placed, is_first=True)
        elif event == "lost" and draw.random() < 0.2:
            engine = draw.choice(["p0", "p1", "d0", "d1"])
            if engine not in lost and clocked.at(step, "lost", engine) is None:
                lost.add(engine)
        elif event in ("failed", "ended") and running:
            name = draw.choice(sorted(running))
            del running[name]
            again = clocked.at(step, "failed", name, draw.choice(list(Cause))) if event == "failed" else None
            if again is None:
                clocked.at(step, "ended", name)
                num_over += 1
            else:
                take(again, is_first=False)
        assert dispatcher.num_running == len(running)
    assert max(num_attempts.values()) <= MAX_ATTEMPTS
    assert len(num_attempts) == num_over + len(running)
    clocked.at(100, "ended", *running)
    loads = [dispatcher.load(name) for name in ("p0", "p1", "d0", "d1")]
    assert [(e.num_requests, e.num_prompt_tokens, e.num_output_tokens) for e in loads] == [(0, 0, 0)] * 4


@each("seed", range(40))
def test_every_request_ends_once_and_none_goes_to_a_lost_engine(seed: int) -> None:
    """A random walk of a server: what comes out is held against lists of all that went in."""
    draw = random.Random(seed)
    max_running = draw.randint(1, 6)
    rules = DispatchRules(hands_over=True, max_waiting=draw.randint(0, 4), pauses_s=(0.0, 1.0, 3.0))
    clocked = Clocked(rules, max_running)
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    live: set[str] = set()
    tries: Counter[str] = Counter()
    state: dict[str, str] = {}
    """Of each request: waiting, placed or over."""
    fronts: dict[str, str] = {}
    ends: Counter[str] = Counter()
    now = 0.0

    def take(actions: Sequence[Action]) -> None:
        for action in actions:
            before = state[action.name]
            if isinstance(action, Place):
                assert before == "waiting", action
                assert {action.placement.prefill, action.placement.decode} <= live, action
                state[action.name] = "placed"
            else:
                assert before == ("placed" if isinstance(action, Abort) else "waiting"), action
                state[action.name] = "over"
                ends[action.name] += 1
        assert sum(s == "placed" for s in state.values()) <= max_running

    def next_life(engine: str) -> FormAgain:
        tries[engine] += 1
        return FormAgain(engine, rules.pauses_s[min(tries[engine], 3) - 1])

    for step in range(400):
        now += draw.random()
        events = (
            ["arrive"] * 5 + ["ended"] * 3 + ["lost", "formed", "formed", "expire", "heard", "silent", "gone"]
        )
        event = draw.choice(events)
        front = draw.choice("xyz")
        if event == "arrive":
            name = f"r{step}"
            state[name], fronts[name] = "waiting", front
            how = {"priority": draw.randrange(3), "deadline_s": draw.uniform(0.5, 20)}
            take(clocked.at(now, event, front, name, again=draw.random() < 0.2, **how))
        elif event == "ended" and (known := sorted(n for n, s in state.items() if s != "over")):
            name = draw.choice(known)
            if state[name] == "placed":
                state[name] = "over"
                ends[name] += 1
            take(clocked.at(now, "ended", name))
        elif event == "lost" and live:
            engine = draw.choice(sorted(live))
            live.discard(engine)
            assert clocked.at(now, event, engine) == next_life(engine)
        elif event == "formed" and (engine := draw.choice(sorted(roles))) not in live:
            if draw.random() < 0.3:
                assert clocked.at(now, "not_formed", engine, KILLED) == next_life(engine)
            else:
                live.add(engine)
                tries[engine] = 0
                take(clocked.at(now, "open", engine, roles[engine]))
        elif event == "heard":
            clocked.at(now, event, front)
        elif event == "silent":
            take(clocked.at(now, event, 30.0))
        elif event == "gone":
            take(clocked.at(now, event, front))
            assert all(s == "over" for n, s in state.items() if fronts[n] == front)
        else:
            take(clocked.at(now, "expire"))
        counts = Counter(state.values())
        assert clocked.dispatcher.num_running == counts["placed"]
        assert clocked.dispatcher.num_waiting == counts["waiting"]
    for front in "xyz":
        take(clocked.at(now, "gone", front))
    assert ends == Counter(list(state)), "each once"
    loads = [clocked.dispatcher.load(name) for name in roles]
    assert [(e.num_requests, e.num_prompt_tokens, e.num_output_tokens) for e in loads] == [(0, 0, 0)] * 4
