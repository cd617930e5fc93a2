"""How an LLM's engines start, are given up and end, seen from other threads: a fake fleet, and no Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rayk.serve import llm_engines
from rayk.serve.llm_engines import LLMEngines
from rayk.serve.supervisor import GaveUp
from rayk.types.errors import DeadlineExceeded, RaykError, ServerEnded, UserError
from rayk.types.request import SamplingParams
from rayk.types.serving import Delta, Health, ServerRequest
from tests.serve.test_supervisor import FakePart

LIMIT_S = 60.0
ASKED = [((1, 2), SamplingParams())] * 3


class Front:
    """Its requests last until they are ended."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.is_ready = is_ready
        self.begun = threading.Semaphore(0)
        self.asked = threading.Event()
        self.num_running = 0

    async def generate(self, _request: ServerRequest) -> AsyncIterator[Delta]:
        self.num_running += 1
        self.begun.release()
        try:
            await asyncio.Event().wait()
            yield Delta(token_ids=())
        finally:
            self.num_running -= 1

    async def health(self) -> Health:
        self.asked.set()
        return Health(is_ready=self.is_ready, reason="decode0 is forming", engines=())

    async def close(self) -> None:
        assert not self.num_running, "requests end first"


class Engines:
    """As an LLM has them."""

    def __init__(self, front: Front, *errors: RaykError) -> None:
        async def make() -> FakePart:
            return FakePart("fleet", *errors)

        self.fleet = asyncio.run(make())
        self.whole = LLMEngines(self.fleet, front, 2)
        self.threads = ThreadPoolExecutor(4)

    def ask(self, front: Front) -> Future[Any]:
        """On a thread of its own; returns when as many have begun as may."""
        answer = self.threads.submit(self.whole.complete, ASKED)
        assert front.begun.acquire(timeout=LIMIT_S)
        assert front.begun.acquire(timeout=LIMIT_S)
        return answer


@pytest.fixture
def make() -> Iterator[Callable[..., Engines]]:
    made: list[Engines] = []

    def make_one(front: Front, *errors: RaykError) -> Engines:
        made.append(Engines(front, *errors))
        return made[-1]

    yield make_one
    for engines in made:
        engines.whole.close()
        engines.threads.shutdown()
        assert engines.fleet.is_stopped


def test_a_start_has_a_deadline(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_engines, "READY_S", 0.2)
    engines = make(Front(is_ready=False))
    with pytest.raises(DeadlineExceeded, match="the start of the engines.*health=decode0 is forming"):
        engines.threads.submit(engines.whole.start).result(LIMIT_S)


def test_whoever_starts_it_is_told_that_another_thread_closed_it(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(is_ready=False)
    engines = make(front)
    over = LLMEngines._unless_over

    async def slow(*args: Any) -> Any:
        try:
            return await over(*args)
        finally:
            await asyncio.sleep(0.2)  # longer than the engines' end takes

    monkeypatch.setattr(LLMEngines, "_unless_over", slow)
    starting = engines.threads.submit(engines.whole.start)
    assert front.asked.wait(LIMIT_S)
    engines.threads.submit(engines.whole.close).result(LIMIT_S)
    with pytest.raises(ServerEnded):
        starting.result(LIMIT_S)


def test_whoever_waits_for_answers_is_told_that_another_thread_closed_it(make: Any) -> None:
    front = Front()
    engines = make(front)
    engines.whole.start()
    answer = engines.ask(front)
    engines.threads.submit(engines.whole.close).result(LIMIT_S)
    with pytest.raises(ServerEnded):
        answer.result(LIMIT_S)
    with pytest.raises(UserError, match="closed"):
        engines.whole.complete(ASKED)


def test_whoever_waits_for_answers_is_told_that_the_engines_were_given_up(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayk.serve.supervisor.MAX_LOSSES", 1)
    front = Front()
    engines = make(front)
    engines.whole.start()
    answer = engines.ask(front)
    engines.whole._loop.call_soon_threadsafe(engines.fleet.why.set_result, "killed")
    for wait in (answer, engines.threads.submit(engines.whole.complete, ASKED)):
        with pytest.raises(GaveUp, match="killed"):
            wait.result(LIMIT_S)
