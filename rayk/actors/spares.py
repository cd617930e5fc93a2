"""Idle workers of a server, each ready to take a lost one's place: a process that has imported everything
forms a rank in a second or two, a new one takes several seconds of processor time before it can.

Runs inside the fleet's actor, on its pool of workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rayk.actors.nodes import EngineDemand
from rayk.actors.placement import NODE_ID_LABEL
from rayk.actors.pool import WorkerPool
from rayk.types.errors import EngineDied, InternalError, RaykError
from rayk.types.tasks import lasting

LOOK_S = 2.0
"""How often an idle worker is asked whether it is there."""
NUM_TRIES = 4
"""A lost worker's place is given to so many others, should they be gone, too."""


class Spares:
    """Keeps `count` idle workers, assigned to the engines in turn."""

    def __init__(
        self, pool: WorkerPool, engines: Sequence[EngineDemand], count: int, model: str | None
    ) -> None:
        """`engines` are sorted, the largest first."""
        self._pool = pool
        self._model = model
        self._beside = {f"spare{i}": engines[i % len(engines)] for i in range(count)}
        self._order = list(self._beside)
        """Who started first comes first: it is ready first."""
        self._task: asyncio.Task[None] | None = None
        self._ready: set[str] = set()

    @property
    def num_ready(self) -> int:
        """Count those that answered when they were last asked."""
        return len(self._ready)

    def start(self, on_bug: Callable[[InternalError], object] = lambda _: None) -> None:
        """Keep the spares from now on. `on_bug` receives an error that ends this watch."""
        self._task = lasting(self._keep(), "the watch over spare workers", on_bug)

    async def stop(self) -> None:
        """Stop looking after the spares; they end with the pool."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def fill(self, engine: str, indices: Iterable[int]) -> None:
        """End these workers of an engine at once and replace them, then wait until the new ones answer.
        Spares on the engine's node come first, even those that still start: they began before a new worker
        would. Raises RaykError."""
        await asyncio.gather(*(self._fill(engine, index) for index in indices))

    async def _fill(self, engine: str, index: int) -> None:
        for left in reversed(range(NUM_TRIES)):
            spare = next((n for n in self._order if self._pool.exchange(engine, index, n)), None)
            if spare is None:
                self._pool.replace_worker(engine, index)
            else:
                self._began(spare)
            try:
                await self._pool.answers(engine, index)
            except EngineDied:
                if not left:
                    raise
            else:
                return

    async def _keep(self) -> None:
        """Prepare all spares at once, then replace each by itself."""
        try:
            await self._prepare(self._beside)
        except RaykError as error:
            _say(error)
        await asyncio.gather(*(self._keep_one(name) for name in self._beside))

    async def _keep_one(self, name: str) -> None:
        """Look after the worker of this name, and start it again where it is gone."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if self._pool.has(name):
                    await self._look(name)
                else:
                    await self._prepare([name])
            except RaykError as error:
                _say(error)

    async def _look(self, name: str) -> None:
        worker = self._pool.worker(name)
        try:
            await self._pool.answers(name)
            self._ready.add(name)
        except RaykError:
            self._ready.discard(name)
            is_placed = await self._pool.is_placed(name)
            if self._pool.worker(name) is not worker:
                return  # it was taken meanwhile, and another one starts
            if is_placed:
                self._pool.replace_worker(name, 0)
                self._began(name)
            else:
                self._pool.drop(name)
            raise

    async def _prepare(self, names: Iterable[str]) -> None:
        demands = []
        for name in names:
            engine = self._beside[name]
            home = self._pool.node_id(engine.name)
            labels = engine.labels if home is None else {NODE_ID_LABEL: home}
            demands.append(replace(engine, name=name, num_workers=1, labels=labels))
        await self._pool.prepare(demands, "auto", self._model, alone=True)

    def _began(self, name: str) -> None:
        """Note that a new worker has this name."""
        self._ready.discard(name)
        self._order.remove(name)
        self._order.append(name)


def _say(error: RaykError) -> None:
    logging.getLogger("rayk").warning("a spare worker: %s", error)
