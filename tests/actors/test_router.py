"""What a front does with its requests' news, and when what they ran on is lost: scripted engines, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest

from rayk.actors.engines import WHY_S
from rayk.actors.router import Router
from rayk.actors.serving import Assignment
from rayk.engine.leader import RequestEvent
from rayk.handover.engine_request import EngineRequest
from rayk.sched import recovery
from rayk.specs.serving import EngineEntry, ServerSettings
from rayk.transfer.ticket import TransferTicket
from rayk.types.config import EngineConfig
from rayk.types.errors import (
    DeadlineExceeded,
    EngineDied,
    InternalError,
    KVMismatch,
    Overloaded,
    RaykError,
    ServerEnded,
    TransferError,
    UserError,
)
from rayk.types.request import FinishReason, Request, SamplingParams, TokenLogprobs
from rayk.types.serving import Delta, ModelCard, ServerRequest

NUM_TOKENS = 8
FULL = [100 + i for i in range(NUM_TOKENS)]
"""What every engine would say, from wherever it begins."""


def logprobs_of(tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token_id=t, logprob=-t / 1000, rank=1, top=()) for t in tokens)


@dataclass
class Life:
    """What becomes of one attempt on an engine: so many tokens, then its end."""

    num_tokens: int = NUM_TOKENS
    error: RaykError | None = None
    finish: FinishReason | None = None
    hangs: bool = False
    at_once: bool = False
    """All news in one batch."""


@dataclass
class Method:
    """An actor's method that is told something and answers nothing."""

    calls: list[Any] = field(default_factory=list)

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *args: Any) -> None:
        self.calls.append(args)


@dataclass
class Leader:
    settle: Method = field(default_factory=Method)
    abort: Method = field(default_factory=Method)


@dataclass
class Engine:
    """Lives by its script, one entry for each attempt."""

    name: str
    lives: list[Life]
    role: str = "aggregated"
    clock_offset_ns: int = 0
    leader: Leader = field(default_factory=Leader)
    asked: list[tuple[Request, dict[str, Any]]] = field(default_factory=list)
    when_hung: Callable[[], None] = lambda: None

    async def stream(self, timeout_s: float, asked: EngineRequest) -> AsyncIterator[list[RequestEvent]]:
        del timeout_s
        request, how = asked.request, {f.name: getattr(asked, f.name) for f in fields(asked)}
        self.asked.append((request, how))
        life = self.lives.pop(0)
        known = len(asked.output_token_ids)
        stop = 1 if asked.mode == "prefill" else life.num_tokens
        events = [self._event(request, i) for i in range(known, stop)]
        if asked.mode == "prefill" and life.error is None:
            events.append(RequestEvent(request_id=request.request_id, payload=ticket(request, self.name)))
        for event in [events] if life.at_once else [[e] for e in events]:
            yield event
            await asyncio.sleep(0)
        if life.hangs:
            self.when_hung()
            await asyncio.Event().wait()
        if life.error is not None:
            raise life.error
        if asked.mode != "prefill":
            yield [
                RequestEvent(request_id=request.request_id, finish_reason=life.finish or FinishReason.LENGTH)
            ]

    def _event(self, request: Request, index: int) -> RequestEvent:
        tokens = FULL[index : index + 1]
        told = request.sampling.logprobs is not None
        prompt = index == 0 and request.sampling.prompt_logprobs is not None
        return RequestEvent(
            request_id=request.request_id,
            token_ids=tuple(tokens),
            logprobs=logprobs_of(tokens) if told else None,
            prompt_logprobs=(None, *logprobs_of(request.prompt_token_ids[1:])) if prompt else None,
        )


def ticket(request: Request, engine: str) -> TransferTicket:
    return TransferTicket(
        request_id=request.request_id,
        lease_id="lease",
        engine=engine,
        epoch=1,
        num_tokens=len(request.prompt_token_ids),
        block_tables=(),
        generations=(),
        digests=np.zeros((1, 0), dtype=np.uint64),
    )


@dataclass
class Fleet:
    """Gives every attempt the same engines. Stands for the router's link."""

    prefill: Engine
    decode: Engine | None = None
    refusal: RaykError | None = None
    placed: list[tuple[str, bool]] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    deaths: dict[str, RaykError] = field(default_factory=dict)
    """What the fleet says that engines died of."""
    asked: list[tuple[str, float]] = field(default_factory=list)
    """For what an engine died of, and how long."""

    async def call(self, method: str, *args: Any, until: float, **how: Any) -> Any:
        del until
        assert method == "place", method
        if self.refusal is not None:
            raise self.refusal
        self.placed.append((args[1].request_id, how["again"]))
        return Assignment(fleet="f", prefill=("p", 1), decode=None if self.decode is None else ("d", 1))

    async def engine(self, life: str, key: tuple[str, int]) -> Engine:
        assert life == "f"
        found = self.prefill if key[0] == "p" else self.decode
        assert found is not None
        return found

    async def carry(self, period_s: float) -> None:
        await asyncio.sleep(period_s)

    async def death(self, life: str, engine: Engine, within_s: float) -> RaykError | None:
        assert life == "f"
        self.asked.append((engine.name, within_s))
        return self.deaths.get(engine.name)

    def prefilled(self, attempt: str) -> None:
        self.begun.append(attempt)

    def ended(self, attempt: str) -> None:
        self.over.append(attempt)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "FIRST_PAUSE_S", 0.0)


def router_to(fleet: Fleet, **changes: Any) -> Router:
    entry = EngineEntry(name="p", role="aggregated", config=EngineConfig(model="m"))
    card = ModelCard(model_id="m", folder="m", vocab_size=500, max_positions=64)
    settings = ServerSettings(model=card, engines=(entry,), request_s=60.0)
    router = Router("fleet", replace(settings, **changes))
    router._link = fleet  # type: ignore[assignment]
    return router


def ask_for(deadline_s: float | None = None, **sampling: Any) -> ServerRequest:
    request = Request(
        request_id="r",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=NUM_TOKENS, **sampling),
    )
    return ServerRequest(request=request, deadline_s=deadline_s)


def run(
    fleet: Fleet, *, deadline_s: float | None = None, changes: dict[str, Any] | None = None, **sampling: Any
) -> tuple[list[Delta], RaykError | None]:
    """The news of one request, and the error that ended it."""
    ask = ask_for(deadline_s, **sampling)

    async def complete() -> tuple[list[Delta], RaykError | None]:
        router = router_to(fleet, **(changes or {}))
        deltas: list[Delta] = []
        try:
            async for delta in router.generate(ask):
                deltas.append(delta)
        except RaykError as error:
            return deltas, error
        return deltas, None

    return asyncio.run(complete())


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [t for d in deltas for t in d.token_ids]


LOST: list[Callable[[], RaykError]] = [
    lambda: EngineDied("p", "killed"),
    lambda: EngineDied("d", "killed"),
    lambda: TransferError("r", "the link went down"),
    lambda: KVMismatch("r", 0, 0, "k", 0, 0, "wrong"),
]


@pytest.mark.parametrize("error", LOST)
@pytest.mark.parametrize("num_before", [0, 1, 3, NUM_TOKENS - 1])
def test_a_lost_request_goes_on_behind_what_was_delivered(error, num_before) -> None:
    fleet = Fleet(Engine("p", [Life(num_before, error()), Life()]))
    deltas, problem = run(fleet)
    assert problem is None
    assert tokens_of(deltas) == FULL
    assert [d.finish_reason for d in deltas][-1] is FinishReason.LENGTH
    names = [name for name, _ in fleet.placed]
    assert [again for _, again in fleet.placed] == [False, True]
    assert names[1] == f"{names[0]}~1"
    assert fleet.over == names, "each attempt's end is told"
    assert fleet.begun == (names if num_before else names[1:]), "and that its prompt was computed, once"
    (_, how) = fleet.prefill.asked[1]
    assert list(how["output_token_ids"]) == FULL[:num_before]


@pytest.mark.parametrize("num_before", [1, 2, 5])
def test_after_a_second_prefill_its_first_token_is_not_told_again(num_before) -> None:
    decode = Engine("d", [Life(num_before, EngineDied("d", "killed")), Life()], role="decode")
    fleet = Fleet(Engine("p", [Life(), Life()], role="prefill"), decode)
    deltas, problem = run(fleet, logprobs=0, prompt_logprobs=0)
    assert problem is None
    assert tokens_of(deltas) == FULL
    told = [t.token_id for d in deltas for t in d.logprobs or ()]
    assert told == FULL
    assert [d.prompt_logprobs is not None for d in deltas].count(True) == 1
    assert [list(how["output_token_ids"]) for _, how in decode.asked] == [FULL[:1], FULL[:num_before]]
    assert fleet.prefill.leader.settle.calls == [(fleet.placed[0][0],)], "its first lease is given back"
    assert fleet.begun == [name for name, _ in fleet.placed], (
        "of both prompts it is told that they are computed"
    )


def test_what_the_fleet_aborts_though_the_client_is_there_is_placed_again() -> None:
    fleet = Fleet(Engine("p", [Life(3, finish=FinishReason.ABORT), Life()]))
    deltas, problem = run(fleet)
    assert problem is None
    assert tokens_of(deltas) == FULL
    assert {d.finish_reason for d in deltas} == {None, FinishReason.LENGTH}


@pytest.mark.parametrize("num_before", [0, 3])
def test_when_the_server_ends_what_is_left_ends_with_an_error(num_before) -> None:
    async def end(fleet: Fleet) -> tuple[list[Delta], BaseException | None]:
        router, ask = router_to(fleet), ask_for()
        deltas: list[Delta] = []

        async def follow() -> None:
            async for delta in router.generate(ask):
                deltas.append(delta)

        task = asyncio.create_task(follow())
        while len(tokens_of(deltas)) < num_before or not fleet.prefill.asked:
            await asyncio.sleep(0)
        router.end_all()
        await asyncio.wait({task})
        return deltas, task.exception()

    fleet = Fleet(Engine("p", [Life(num_before, hangs=True), Life()]))
    deltas, problem = asyncio.run(end(fleet))
    assert isinstance(problem, ServerEnded)
    assert tokens_of(deltas) == FULL[:num_before]
    assert fleet.over == [name for name, _ in fleet.placed], "its end is told, and it is not placed again"
    assert fleet.prefill.leader.abort.calls == [(fleet.over[0],)], "it does not run on"


def test_with_policy_fail_the_error_follows_the_tokens() -> None:
    fleet = Fleet(Engine("p", [Life(3, EngineDied("p", "killed")), Life()]))
    deltas, problem = run(fleet, changes={"failure_policy": "fail"})
    assert tokens_of(deltas) == FULL[:3]
    assert isinstance(problem, EngineDied)
    assert len(fleet.placed) == len(fleet.over) == 1


@pytest.mark.parametrize(
    "error", [UserError("no"), DeadlineExceeded("blocks", 1.0)], ids=lambda e: type(e).__name__
)
def test_what_would_be_refused_again_is_not_tried_again(error) -> None:
    fleet = Fleet(Engine("p", [Life(0, error), Life()]))
    assert run(fleet) == ([], error)
    assert len(fleet.placed) == 1


BUG = InternalError("the loop of p rank 1", "KeyError: 'a layer'")


@pytest.mark.parametrize("policy", ["migrate", "fail"])
@pytest.mark.parametrize(
    ("lost", "waits"),
    [
        (EngineDied("p", "CommError: gather_bytes: rank 1 is gone", 0), True),
        (EngineDied("p", "the worker process cannot be reached", 0), False),
        (EngineDied("d", "CommError: gather_bytes: rank 1 is gone", 0), False),
        (TransferError("r", "the link went down"), False),
    ],
    ids=["by a rank", "unreachable", "another", "transfer"],
)
def test_before_a_request_is_tried_again_it_is_asked_what_its_engine_died_of(
    lost: RaykError, waits: bool, policy: str
) -> None:
    """It waits for that only where another rank knows."""
    fleet = Fleet(Engine("p", [Life(3, lost), Life()]), deaths={"p": BUG})
    deltas, problem = run(fleet, changes={"failure_policy": policy})
    assert (tokens_of(deltas), problem) == (FULL[:3], BUG)
    assert fleet.asked == [("p", WHY_S if waits else 0.0)]
    assert len(fleet.placed) == len(fleet.over) == 1


def test_attempts_are_bounded() -> None:
    fleet = Fleet(Engine("p", [Life(2, EngineDied("p", "killed")) for _ in range(9)]))
    deltas, problem = run(fleet, changes={"max_attempts": 3})
    assert tokens_of(deltas) == FULL[:2]
    assert isinstance(problem, EngineDied)
    assert len(fleet.placed) == 3


def test_a_request_past_its_deadline_is_aborted_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[float | None, asyncio.Timeout] = {}
    of_library = asyncio.timeout

    def timeout(limit_s: float | None) -> asyncio.Timeout:
        return limits.setdefault(limit_s, of_library(limit_s))

    monkeypatch.setattr(asyncio, "timeout", timeout)
    fleet = Fleet(Engine("p", [Life(2, hangs=True)], when_hung=lambda: limits[30.0].reschedule(0.0)))
    deltas, problem = run(fleet, deadline_s=30.0)
    assert tokens_of(deltas) == FULL[:2]
    assert isinstance(problem, DeadlineExceeded)
    assert fleet.prefill.leader.abort.calls == [(fleet.placed[0][0],)]
    assert fleet.over == [fleet.placed[0][0]]


def test_a_server_without_room_says_so() -> None:
    assert run(Fleet(Engine("p", []), refusal=Overloaded("full", 2.0))) == ([], Overloaded("full", 2.0))


def test_news_that_came_together_go_together_in_order() -> None:
    fleet = Fleet(Engine("p", [Life(at_once=True)]))
    deltas, problem = run(fleet, logprobs=0)
    assert problem is None
    assert len(deltas) <= 2
    assert tokens_of(deltas) == FULL
    assert [t.token_id for d in deltas for t in d.logprobs or ()] == FULL
    assert fleet.begun == [fleet.placed[0][0]], "the fleet hears of the first token once"
    assert fleet.prefill.leader.abort.calls == [], "nobody aborts what is over"
