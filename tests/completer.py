"""A Completer over an engine in this process, and an HTTP server of it: no Ray.

with ThreadEngine(config) as engine, serve(make_app(EngineCompleter(engine, card))) as url:
    ...
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from rayk.engine.build import ThreadEngine
from rayk.engine.leader import RequestEvent
from rayk.serve.limits import HttpSettings
from rayk.serve.listener import listener_config
from rayk.types.errors import RoleConflict, UnknownEngine
from rayk.types.request import FinishReason, TokenLogprobs
from rayk.types.serving import Delta, EngineState, Health, ModelCard, ServerRequest
from tests.pd import wait_until


def card_of(model: Path, engine: ThreadEngine) -> ModelCard:
    """What a front knows of the engine's model."""
    config = engine.ranks[0].model_config
    return ModelCard(
        model_id=model.name,
        folder=str(model),
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
    )


class EngineCompleter:
    """Implements Completer over a ThreadEngine."""

    def __init__(self, engine: ThreadEngine, model: ModelCard) -> None:
        self.engine = engine
        self.model = model
        self.asked: list[ServerRequest] = []
        self.closed: list[str] = []
        """Requests whose iterator was closed before their end."""

    async def generate(self, server_request: ServerRequest) -> AsyncIterator[Delta]:
        self.asked.append(server_request)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[RequestEvent]()

        def sink(event: RequestEvent) -> None:
            loop.call_soon_threadsafe(news.put_nowait, event)

        request_id, has_ended = server_request.request.request_id, False
        self.engine.leader.submit(server_request.request, sink)
        try:
            while not has_ended:
                async with asyncio.timeout(self.engine.timeout_s):
                    event = await news.get()
                has_ended = event.is_last
                if event.error is not None:
                    raise event.error
                yield Delta(
                    token_ids=event.token_ids,
                    logprobs=event.logprobs,
                    prompt_logprobs=event.prompt_logprobs,
                    finish_reason=event.finish_reason,
                    stop_reason=event.stop_reason,
                    num_cached_tokens=_num_cached(event) if has_ended else None,
                )
        finally:
            if not has_ended:
                self.closed.append(request_id)
                self.engine.leader.abort(request_id)

    async def health(self) -> Health:
        """Ready unless the engine failed."""
        error = self.engine.error
        return Health(is_ready=error is None, reason="" if error is None else str(error))

    def check_all_free(self) -> None:
        """Nothing is left of any request."""
        pool = self.engine.leader.manager.pool
        wait_until(lambda: pool.num_free_blocks == pool.num_blocks - 1, what=lambda: "blocks all free")


Script = Callable[[ServerRequest], AsyncIterator[Delta]]


class ScriptedCompleter:
    """Implements Completer with a function: for what engines do seldom."""

    def __init__(self, model: ModelCard, script: Script) -> None:
        self.model = model
        self.script = script
        self.asked: list[ServerRequest] = []
        self.closed: list[str] = []
        """Requests whose iterator ended, in whatever way."""
        self.answer = Health(is_ready=True)

    async def generate(self, server_request: ServerRequest) -> AsyncIterator[Delta]:
        """The script's."""
        self.asked.append(server_request)
        try:
            async for delta in self.script(server_request):
                yield delta
        finally:
            self.closed.append(server_request.request.request_id)

    async def health(self) -> Health:
        """`answer`."""
        return self.answer


class ScriptedEngines:
    """Implements EngineControl: engines that have names and roles, and do nothing."""

    def __init__(self, **roles: str) -> None:
        self.states = {name: idle_engine(name, role) for name, role in roles.items()}
        self.error: Exception | None = None
        """What both methods raise, if anything."""

    async def engines(self) -> tuple[EngineState, ...]:
        """As they were made, and changed since."""
        self._fail()
        return tuple(self.states.values())

    async def set_role(self, engine: str, role: str) -> None:
        """Each role keeps an engine."""
        self._fail()
        if engine not in self.states:
            raise UnknownEngine(f"no engine {engine!r}")
        others = {state.role for name, state in self.states.items() if name != engine}
        if {role, *others} != {"prefill", "decode"}:
            raise RoleConflict(f"{engine} is the only {self.states[engine].role} engine")
        self.states[engine] = replace(self.states[engine], role=role)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def idle_engine(name: str, role: str) -> EngineState:
    """One that has nothing to do; decode engines do not say how they are."""
    said = {"num_running": 0, "num_waiting": 0, "num_steps": 7, "num_free_blocks": 9, "num_blocks": 10}
    return EngineState(
        name=name,
        role=role,
        tp=2,
        pp=1,
        dcp=1,
        state="ready",
        trouble="",
        epoch=1,
        num_restarts=0,
        restart={},
        num_requests=0,
        num_prompt_tokens=0,
        num_output_tokens=0,
        **(said if role == "prefill" else {}),
    )


def tokens_then_end(token_ids: list[int], *, per_delta: int = 1) -> Script:
    """The same tokens for every request, the last with finish reason stop."""

    async def script(server_request: ServerRequest) -> AsyncIterator[Delta]:
        wanted = server_request.request.sampling.logprobs
        for start in range(0, len(token_ids), per_delta):
            part = token_ids[start : start + per_delta]
            told = tuple(TokenLogprobs(token_id=t, logprob=-1.0, rank=1, top=()) for t in part)
            yield Delta(token_ids=tuple(part), logprobs=None if wanted is None else told)
        yield Delta(finish_reason=FinishReason.STOP)

    return script


@contextmanager
def serve(app: Any, settings: HttpSettings | None = None) -> Iterator[str]:
    """The app on a free port of this machine, by uvicorn in a thread; its URL. `settings`: of heads."""
    config = listener_config(app, settings or HttpSettings(), host="127.0.0.1", port=0, lifespan="on")
    server = uvicorn.Server(config)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:  # noqa: BLE001 - told by whoever waits
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive(), f"uvicorn did not start: {failed}"
        assert time.monotonic() < until, "uvicorn did not start"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "uvicorn did not end"


def _num_cached(event: RequestEvent) -> int:
    return (event.info.num_cached_tokens if event.info is not None else None) or 0
