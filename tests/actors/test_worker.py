"""What a worker does around its engine: what it forgets, and what it does not wait for. No Ray, no model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import pytest
from ray._private.async_compat import has_async_methods

from rayk.actors import worker as worker_module
from rayk.actors.worker import ABORTED_KEPT, LineStreams, RankSpec, Worker
from rayk.engine.leader import RequestEvent
from rayk.handover.engine_request import EngineRequest
from rayk.lines.line import Last
from rayk.types.config import EngineConfig
from rayk.types.errors import CommError, EngineDied
from rayk.types.request import FinishReason, Request, SamplingParams

LIMIT_S = 30.0


class Extension:
    """What must be forgotten with an engine."""


class Comm:
    def close(self) -> None:
        pass


class Rank:
    comm = Comm()

    def close(self) -> None:
        pass


class Leader:
    """Knows who was aborted; loads a tokenizer until it is let go on."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.entered, self.go = threading.Event(), threading.Event()
        self.went_on = False

    def prepare(self, request: Request) -> None:
        assert request.sampling.stop
        self.entered.set()
        self.went_on = self.go.wait(LIMIT_S)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Handover:
    """Answers every request at once."""

    def submit(self, request: Request, put: Callable[[RequestEvent], Any], **_: Any) -> None:
        put(RequestEvent(request_id=request.request_id, finish_reason=FinishReason.LENGTH))


class Loop:
    """Ends as where a peer was killed: one error in the wake of another, whose frames hold the extension."""

    def __init__(self, extension: Extension) -> None:
        self._extension = extension

    def run(self) -> None:
        try:
            self._receive()
        except ConnectionError as error:
            raise CommError("gather", "rank 1 was killed") from error

    def _receive(self) -> None:
        raise ConnectionResetError("by peer")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(worker_module.gc, "freeze", lambda: None)
    return Worker("w")


def lead(worker: Worker) -> Leader:
    """Have it lead an engine."""
    leader = Leader()
    worker._leader, worker._handover = cast(Any, leader), cast(Any, Handover())
    return leader


def test_a_rank_whose_peer_was_killed_keeps_nothing_of_its_engine(worker: Worker) -> None:
    spec = {"engine": "decode0", "epoch": 1, "role": "decode", "rank": 0, "config": EngineConfig(model="m")}
    worker._spec = RankSpec(**spec, address="", comm_timeout_s=1.0, lease_s=1.0)  # type: ignore[arg-type]
    worker._rank, worker._extension = cast(Any, Rank()), cast(Any, Extension())
    worker._loop = cast(Any, Loop(cast(Any, worker._extension)))
    with pytest.raises(EngineDied) as kept:  # as Ray keeps it
        worker.run()
    assert "rank 1 was killed" in kept.value.cause
    assert worker.release(LIMIT_S)


def test_what_another_thread_holds_for_a_moment_does_not_cost_the_rank(worker: Worker) -> None:
    worker._lost_peer = True
    worker._ended.set()
    worker._extension = cast(Any, Extension())
    extensions, threads = [worker._extension], list[threading.Timer]()

    def dissolve(forget: Callable[[], None] = worker.dissolve) -> None:
        forget()
        threads.append(threading.Timer(0.01, extensions.clear))
        threads[0].start()

    worker.dissolve = dissolve  # type: ignore[method-assign]
    worker_module.LET_GO_S, usual = LIMIT_S, worker_module.LET_GO_S
    try:
        assert worker.release(LIMIT_S)
    finally:
        worker_module.LET_GO_S = usual
        threads[0].join()


def test_ray_runs_the_methods_of_a_worker_on_threads() -> None:
    """Ray asks this of a class. With one coroutine among the methods, requests would run one at a time."""
    assert not has_async_methods(Worker)


def test_streams_go_on_while_a_tokenizer_is_loaded_and_an_abort_meanwhile_counts(worker: Worker) -> None:
    leader = lead(worker)
    streams = LineStreams(worker._prepare, worker._submit, worker.abort, 0.0)

    async def run() -> None:
        plain = Request(request_id="plain", prompt_token_ids=(1,), sampling=SamplingParams())
        stops = Request(request_id="stops", prompt_token_ids=(1,), sampling=SamplingParams(stop=("x",)))

        async def events(request: Request) -> list[RequestEvent]:
            asked = EngineRequest(request=request)
            batches = cast(AsyncGenerator[list[RequestEvent] | Last], streams.generate(asked))
            return [e async for batch in batches for e in (batch.item if isinstance(batch, Last) else batch)]

        waits = asyncio.create_task(events(stops))
        await asyncio.to_thread(leader.entered.wait, LIMIT_S)
        assert [e.request_id for e in await events(plain)] == ["plain"]
        assert not waits.done(), "it was let in before the tokenizer was there"
        worker.abort("stops")
        leader.go.set()
        assert [e.request_id for e in await waits] == ["stops"]

    asyncio.run(run())
    assert leader.went_on, "nothing went on meanwhile"
    assert leader.aborted == ["stops", "stops"], "the second one finds the request"


def test_aborts_of_requests_that_never_come_are_forgotten(worker: Worker) -> None:
    leader = lead(worker)
    names = [f"r{i}" for i in range(ABORTED_KEPT + 1)]
    for name in names:
        worker.abort(name)
    leader.aborted.clear()
    for name in (names[0], names[1], names[-1]):
        request = Request(request_id=name, prompt_token_ids=(1,), sampling=SamplingParams())
        assert len(list(worker.generate(EngineRequest(request=request)))) == 1
    assert leader.aborted == [names[1], names[-1]]
