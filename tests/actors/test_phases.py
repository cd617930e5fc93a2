"""Spans of `ray timeline`: each phase of a request once, in order, ended; and none unless asked for."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.actors import phases
from rayk.actors.worker import RankSpec, Worker
from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.engine_request import EngineRequest, Mode
from rayk.types.config import EngineConfig
from rayk.types.errors import EngineDied
from rayk.types.request import FinishReason, Request, SamplingParams

REQUEST = Request(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams())
TOKEN = RequestEvent(request_id="r", token_ids=(5,))
LAST = RequestEvent(request_id="r", token_ids=(6,), finish_reason=FinishReason.LENGTH)
HERE = RequestEvent(request_id="r", info=EventInfo(stage_ns={"read": 5}))
LOST = RequestEvent(
    request_id="r", info=EventInfo(stage_ns={"read": 5}), error=EngineDied("decode0", "killed")
)


class Told:
    """What was profiled, as Ray would."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def profile(self, name: str, extra_data: dict[str, str]) -> _Span:
        return _Span(self, f"{name} {extra_data['request']} {extra_data['engine']}")


class _Span:
    def __init__(self, told: Told, words: str) -> None:
        self.told, self.words = told, words

    def __enter__(self) -> None:
        self.told.lines.append(f"+ {self.words}")

    def __exit__(self, *_: object) -> None:
        self.told.lines.append(f"- {self.words}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(phases.profiling, "PROFILING_ENABLED", True)
    monkeypatch.setattr(phases.profiling, "profile", told.profile)
    return told


def formed(engine: str) -> Worker:
    """Rank 0 of an engine, as far as its requests can tell."""
    worker = Worker("w")
    worker._spec = RankSpec(
        engine=engine,
        epoch=1,
        role="prefill",
        rank=0,
        config=EngineConfig(model="m"),
        address="",
        comm_timeout_s=1.0,
        lease_s=1.0,
    )
    return worker


def stream(monkeypatch: pytest.MonkeyPatch, engine: str, mode: Mode, *events: RequestEvent) -> None:
    """A request on a worker whose engine tells these events."""
    worker = formed(engine)

    def submit(_: EngineRequest, put: Any) -> None:
        for event in events:
            put(event)

    monkeypatch.setattr(worker, "_submit", submit)
    told = [event for batch in worker.generate(EngineRequest(request=REQUEST, mode=mode)) for event in batch]
    assert told == list(events)


@pytest.mark.parametrize(
    ("engine", "mode", "events", "expected"),
    [
        ("prefill0", "whole", [TOKEN, TOKEN, LAST], ["prefill", "decode"]),
        ("prefill0", "prefill", [LAST], ["prefill"]),
        ("decode0", "decode", [HERE, TOKEN, LAST], ["transfer", "decode"]),
        ("decode0", "decode", [LOST], ["transfer"]),
        ("decode0", "reserve", [LAST], ["reserve"]),
    ],
)
def test_phases_follow_what_the_engine_tells(
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    mode: Mode,
    events: list[RequestEvent],
    expected: list[str],
) -> None:
    stream(monkeypatch, engine, mode, *events)
    assert told.lines == [f"{sign} {phase} r {engine}" for phase in expected for sign in "+-"]


def test_a_phase_ends_when_nobody_listens_any_more(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise EngineDied("prefill0", "killed")

    monkeypatch.setattr(Worker, "_submit", refuse)
    worker = formed("prefill0")
    with pytest.raises(EngineDied):
        next(worker.generate(EngineRequest(request=REQUEST)))
    assert told.lines == ["+ prefill r prefill0", "- prefill r prefill0"]


def test_nothing_is_told_unless_it_is_asked_for(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    assert phases.stream_options("prefill0", "whole") == {
        "enable_task_events": True,
        "name": "prefill0: whole",
    }
    monkeypatch.setattr(phases.profiling, "PROFILING_ENABLED", False)
    stream(monkeypatch, "prefill0", "whole", TOKEN, LAST)
    assert told.lines == []
    assert phases.phases_of("a", "p", "whole") is phases.phases_of("b", "p", "decode")
    assert phases.stream_options("prefill0", "whole") == {}
