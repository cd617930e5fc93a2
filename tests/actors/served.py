"""A fleet of engines on the tests' cluster, and what requests through a router bring."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from rayk.actors import launch
from rayk.actors.router import Router
from rayk.models.families import load_config
from rayk.specs.serving import EngineEntry, ServerSettings, model_card
from rayk.types.config import EngineConfig
from rayk.types.request import FinishReason, Request, SamplingParams
from rayk.types.serving import ServerRequest

START_S = 240.0
"""Machines may be slow: nothing here measures time."""
REQUEST_S = 120.0


def settings_for(model: Path, engines: str, **changes: Any) -> ServerSettings:
    """`engines`: p1 (a prefill engine of TP 1), d2, a1 (aggregated), in order; `num_blocks` and other fields
    of EngineConfig may be among the changes."""
    fields = {f: changes.pop(f) for f in tuple(changes) if f in EngineConfig.__dataclass_fields__}
    roles = {"p": "prefill", "d": "decode", "a": "aggregated"}
    entries = []
    for text in engines.split():
        role = roles[text[0]]
        name = "prefill" if role == "aggregated" else role
        number = sum(e.name.startswith(name) for e in entries)
        config = EngineConfig(model=str(model), tp=int(text[1:]), **fields)
        entries.append(EngineEntry(name=f"{name}{number}", role=role, config=config))
    base: dict[str, Any] = {"gpus_per_worker": 0.0, "request_s": REQUEST_S, "hang_s": 20.0}
    card = model_card(str(model), load_config(str(model)), "tiny")
    return ServerSettings(model=card, engines=tuple(entries), **(base | changes))


class Served:
    """A fleet actor and its settings."""

    def __init__(self, name: str, settings: ServerSettings) -> None:
        self.name = name
        self.settings = settings
        self.start()

    def start(self) -> None:
        """The first fleet of this name, or another."""
        self.fleet = launch.start_fleet(self.name, self.settings)
        self.facts = ray.get(self.fleet.start.remote(), timeout=START_S)

    def ask(self, method: str, *args: Any) -> Any:
        """The fleet's answer."""
        return ray.get(getattr(self.fleet, method).remote(*args), timeout=START_S)

    def pid(self, engine: str, rank: int) -> int:
        """Process of a rank."""
        return int(self.ask("pids")[engine][rank])

    def strike(self, engine: str, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        """A rank's process dies, or stops."""
        os.kill(self.pid(engine, rank), how)

    def epochs(self) -> dict[str, int]:
        """Of engines as they are now."""
        return {str(e["name"]): int(e["epoch"]) for e in self.ask("health").engines}

    async def until_ready(self, what: Callable[[], bool] = lambda: True) -> None:
        """Every engine takes requests, and this is true."""
        deadline = time.monotonic() + START_S
        while True:
            health = await self.fleet.health.remote()
            if health.is_ready and what():
                return
            assert time.monotonic() < deadline, health
            await asyncio.sleep(0.1)

    async def until_free(self) -> None:
        """Every block of every engine is free."""
        deadline = time.monotonic() + REQUEST_S
        while in_use := {n: a for n, a in (await self.fleet.blocks.remote()).items() if a[0] != a[1] - 1}:
            assert time.monotonic() < deadline, in_use
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """End the fleet with all of its workers."""
        ray.kill(self.fleet, no_restart=True)

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Router]:
        """A front's way in."""
        router = Router(self.name, self.settings)
        try:
            yield router
        finally:
            await router.close()


@dataclass
class Got:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[Any] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    num_deltas: int = 0
    num_cached_tokens: int | None = None
    error: Exception | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)


async def complete(
    router: Router, prompt: Sequence[int], max_tokens: int, name: str = "r", **how: Any
) -> Got:
    """Run a request to its end."""
    return await follow(Got(), router, prompt, max_tokens, name, **how)


async def follow(
    got: Got, router: Router, prompt: Sequence[int], max_tokens: int, name: str = "r", **how: Any
) -> Got:
    """Run a request to its end; `got` is filled on the way. `begins_at`: tokens at which it has begun."""
    begins_at, salt = how.pop("begins_at", 1), how.pop("cache_salt", None)
    own_fields = {f: how.pop(f) for f in tuple(how) if f in ServerRequest.__dataclass_fields__}
    sampling = SamplingParams(max_tokens=max_tokens, **({"ignore_eos": True} | how))
    request = Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, cache_salt=salt)
    server_request = ServerRequest(request=request, **own_fields)
    try:
        async for delta in router.generate(server_request):
            assert got.finish_reason is None, "news after the end"
            got.num_deltas += 1
            got.token_ids += delta.token_ids
            got.logprobs += delta.logprobs or ()
            got.num_prompt_logprobs += len(delta.prompt_logprobs or ())
            got.finish_reason = delta.finish_reason
            got.num_cached_tokens = delta.num_cached_tokens
            if len(got.token_ids) >= begins_at:
                got.has_begun.set()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        got.error = error
    finally:
        got.has_begun.set()
    return got
