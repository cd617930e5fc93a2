"""The front with the least between clients and engines: uvicorn on the loop of one async Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import ray
import uvicorn
from ray.exceptions import RayActorError, RayError

from rayk.actors.naming import bounded, front_name
from rayk.actors.placement import on_this_node
from rayk.serve.fronts import FrontPlan, open_app
from rayk.serve.listener import CLOSE_S, listener_config
from rayk.serve.ports import listen
from rayk.types.errors import DeadlineExceeded, EngineDied, UserError
from rayk.types.waiting import busy

START_S = 120.0
"""Imports, tokenizer and bind must end within this."""
LISTEN_POLL_S = 0.02


class UvicornFront:
    """Answers HTTP in one process. A plain class; `UvicornPart` makes it remote."""

    def __init__(self, plan: FrontPlan) -> None:
        self._plan = plan
        self._server: uvicorn.Server | None = None

    def __repr__(self) -> str:
        plan = self._plan
        return f"UvicornFront({bounded(plan.settings.model.model_id)} at {plan.host}:{plan.port})"

    async def run(self) -> None:
        """Answer requests until `stop`. Raises UserError when the port is taken."""
        plan = self._plan
        try:
            socket = listen(plan.host, plan.port)
        except OSError as error:
            raise UserError(f"cannot listen at {plan.host}:{plan.port}: {error}", where="--port") from error
        async with open_app(plan) as app:
            self._server = uvicorn.Server(listener_config(app, plan.http))
            await self._server.serve(sockets=[socket])

    async def listening(self) -> int:
        """Wait until clients are answered; returns the process' id."""
        while self._server is None or not self._server.started:
            await asyncio.sleep(LISTEN_POLL_S)
        return os.getpid()

    async def ping(self) -> None:
        """Show that the process lives."""

    async def stop(self) -> None:
        """Take no more connections; `run` ends when those that are there have closed."""
        if self._server is not None:
            self._server.should_exit = True


LOOK_S = 1.0
"""A front is asked for a sign of life this often."""
PATIENCE_S = 60.0
"""A front that gives none for so long hangs: it is killed, and all its streams with it. On a machine that is
busy with forming engines a live one was silent for 15 s."""


class UvicornPart:
    """Keeps the front, as a supervisor.Part."""

    name = "the HTTP front"

    def __init__(self, plan: FrontPlan) -> None:
        self._plan = plan
        self._actor: Any = None
        self._run: Any = None
        self._pid = 0
        self._num_starts = 0

    async def start(self) -> None:
        """Start a new process and wait until it listens. Raises UserError where it cannot, EngineDied,
        DeadlineExceeded."""
        # To name an actor waits for Ray's GCS.
        self._actor = await asyncio.to_thread(self._make)
        about = bounded(self._plan.settings.model.model_id)
        # One event in its life; else a ping a second would fill the tables of tasks.
        self._run = self._actor.run.options(name=f"front: {about}", enable_task_events=True).remote()
        run = asyncio.ensure_future(self._ended())
        listening: asyncio.Future[int] = asyncio.ensure_future(self._actor.listening.remote())
        waiting: set[asyncio.Future[Any]] = {run, listening}
        try:
            async with asyncio.timeout(START_S):
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if run.done() or listening.exception() is not None:
                    raise EngineDied(self.name, await run)
            self._pid = listening.result()
        except TimeoutError:
            ray.kill(self._actor, no_restart=True)
            failure = {"listening": str(listening.exception())} if listening.done() else {}
            raise DeadlineExceeded(f"the start of {self.name}", START_S, {**failure, **busy()}) from None
        finally:
            run.cancel()
            listening.cancel()

    def _make(self) -> Any:
        make = ray.remote(UvicornFront).options(
            name=front_name(self._plan.fleet, self._num_starts),
            num_cpus=0,
            max_concurrency=100,
            max_restarts=0,
            enable_task_events=False,
            scheduling_strategy=on_this_node(),
        )
        self._num_starts += 1
        return make.remote(self._plan)

    async def lost(self) -> str:
        """Wait until the front is lost, and tell why; one that hangs is ended."""
        hang = asyncio.ensure_future(self._hangs())
        run = asyncio.ensure_future(self._ended())
        try:
            done, _ = await asyncio.wait({hang, run}, return_when=asyncio.FIRST_COMPLETED)
            return (hang if hang in done else run).result()
        finally:
            hang.cancel()
            run.cancel()

    async def _hangs(self) -> str:
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                async with asyncio.timeout(PATIENCE_S):
                    await self._actor.ping.remote()
        except TimeoutError:
            # Ray asks a process to end and waits for seconds, in which it still holds the port.
            os.kill(self._pid, signal.SIGKILL)
            await self._ended()
            return f"it hangs: no answer in {PATIENCE_S:g} s"
        except RayError:
            return await self._ended()

    async def _ended(self) -> str:
        try:
            await self._run
        except RayActorError:
            return "its process ended"
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, UserError):
                raise cause from None
            return str(cause or error).strip().splitlines()[-1]
        return "it stopped"

    async def stop(self) -> None:
        """End it in order, or by force after a while."""
        if self._actor is None:
            return
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(2 * CLOSE_S):
                await self._actor.stop.remote()
                await self._run
        ray.kill(self._actor, no_restart=True)
