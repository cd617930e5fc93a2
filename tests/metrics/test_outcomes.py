"""How requests of a front end for whoever asked: scripted engines, no Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayk.actors.deployment_metrics import OUTCOMES
from rayk.metrics import Meter
from rayk.types.errors import EngineDied, Overloaded, RaykError, UserError
from tests.actors.test_router import NUM_TOKENS, Engine, Fleet, Life, ask_for, router_to
from tests.metrics.recording import Recorder

DEATH = EngineDied("p", "killed")


def outcomes_of(fleet: Fleet, *, stop_after: int | None = None, ends: bool = False, **how: Any) -> set[str]:
    """Of one request. `stop_after`: its client goes when it has so many tokens; `ends`: the server does."""
    recorder = Recorder(model="m")

    async def run() -> None:
        deadline_s = how.pop("deadline_s", None)
        router = router_to(fleet, **how)
        router._meter = Meter(recorder)
        deltas = router.generate(ask_for(deadline_s))
        num_tokens = 0
        try:
            async for delta in deltas:
                num_tokens += len(delta.token_ids)
                if num_tokens == stop_after:
                    if ends:
                        router.end_all()
                    else:
                        break
        except RaykError:
            pass
        await deltas.aclose()  # type: ignore[attr-defined]
        router._meter.flush()

    asyncio.run(run())
    counted = {r: recorder.sum("rayk_request_outcomes_total", finish_reason=r) for r in OUTCOMES}
    assert sum(counted.values()) == 1, "each request is counted once"
    return {reason for reason, number in counted.items() if number}


@pytest.mark.parametrize(
    ("lives", "how", "outcome"),
    [
        ([Life()], {}, "length"),
        ([Life(3, DEATH), Life()], {}, "length"),
        ([Life(3, DEATH)], {"failure_policy": "fail"}, "error"),
        ([Life(0, DEATH), Life(1, DEATH)], {"max_attempts": 2}, "error"),
        ([Life(2, hangs=True)], {"deadline_s": 0.2}, "error"),
        ([Life(0, UserError("no"))], {}, "refused"),
        ([Life(2, hangs=True)], {"stop_after": 2}, "abort"),
        ([Life(2, hangs=True)], {"stop_after": 2, "ends": True}, "error"),
    ],
    ids=["well", "saved", "died", "died again", "late", "bad input", "client gone", "server ends"],
)
def test_a_request_is_counted_by_how_it_ended_for_its_client(
    lives: list[Life], how: dict[str, Any], outcome: str
) -> None:
    assert outcomes_of(Fleet(Engine("p", lives)), **how) == {outcome}


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_a_server_alone_tells_of_each_gap_between_its_tokens(at_once: bool) -> None:
    """Four streams, of which one is handed to another engine after a death."""
    num_requests, recorder = 4, Recorder(model="m")
    lives = [Life(at_once=at_once), Life(3, DEATH), *(Life(at_once=at_once) for _ in range(3))]

    async def run() -> int:
        router = router_to(Fleet(Engine("p", lives)))
        router._meter = Meter(recorder)
        num_tokens = 0
        for _ in range(num_requests):
            async for delta in router.generate(ask_for(None)):
                num_tokens += len(delta.token_ids)
        router._meter.flush()
        return num_tokens

    num_tokens = asyncio.run(run())
    assert num_tokens == num_requests * NUM_TOKENS
    assert recorder.count("rayk_itl_seconds", model="m") == num_tokens - num_requests
    assert sum(recorder.observed["rayk_tpot_seconds"]) * (NUM_TOKENS - 1) == pytest.approx(
        recorder.folded_sums["rayk_itl_seconds"]
    )


def test_a_full_waiting_room_refuses() -> None:
    assert outcomes_of(Fleet(Engine("p", []), refusal=Overloaded("full", 2.0))) == {"refused"}


def test_every_outcome_is_told_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(model="m")
    monkeypatch.setattr("rayk.actors.router.make_meter", lambda _: Meter(recorder))
    router_to(Fleet(Engine("p", [])))
    told = {
        dict(labels)["finish_reason"]: n
        for labels, n in recorder.counters["rayk_request_outcomes_total"].items()
    }
    assert told == dict.fromkeys(OUTCOMES, 0.0)
