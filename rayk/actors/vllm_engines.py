"""vLLM's engines of a run, kept from cell to cell, because starting one takes a minute.

An engine serves any role. Engines that a cell does not use stay until there are more than ENGINES_KEPT; then
the least recently used one ends first. One that failed is never used again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError

from rayk.actors import placement
from rayk.actors.engines import CONTROL_S, EngineHandle
from rayk.actors.failures import translate
from rayk.actors.forming import measure_clock
from rayk.actors.naming import loop_name
from rayk.actors.nodes import EngineDemand, Node, cell_demands, placement_of
from rayk.actors.pool import WorkerPool
from rayk.actors.vllm_engine import END_S
from rayk.specs import Cell
from rayk.specs.vllm_engines import ENGINES_KEPT
from rayk.types.config import EngineConfig, VllmEngineConfig
from rayk.types.errors import DeadlineExceeded, DeviceError, EngineDied, RaykError, Unsupported

LOG = logging.getLogger("rayk")
SETTLE_S = 15.0
"""How long an engine may take after a cell to have no block in use."""
SETTLE_POLL_S = 0.1
MOST_DEATHS = 2
"""An engine that died in so many cells of the same is not started for another: each start takes a minute."""
FREED_S, FREED_POLL_S = 10.0, 0.5
"""How long Ray may take to give the resources of engines that ended to others."""


@dataclass(eq=False)
class KeptEngine:
    """An engine that has started."""

    slot: str
    config: VllmEngineConfig
    demand: EngineDemand
    actor: Any
    node: Node
    facts: dict[str, Any]

    def suits(self, config: VllmEngineConfig, demand: EngineDemand, *, spread: bool) -> bool:
        """Return whether it can be the engine asked for. It keeps its role where roles are spread."""
        return (
            self.config == config
            and self.demand.labels == demand.labels
            and self.demand.resources == demand.resources
            and (not spread or self.demand.side == demand.side)
        )


class VllmEngines:
    """Keeps engines from cell to cell, and starts those that a cell lacks."""

    def __init__(self, run_id: str) -> None:
        self._pool = WorkerPool(run_id, keep=True, start=placement.start_vllm_engine)
        self._kept: list[KeptEngine] = []
        """Least recently used first."""
        self.nodes: dict[str, Node] = {}
        """Nodes of the last cell's engines, by name."""
        self._refused: dict[VllmEngineConfig, Unsupported] = {}
        self._deaths: Counter[tuple[VllmEngineConfig, str]] = Counter()
        """How many engines ended within cells, and of what."""
        self._numbers = itertools.count()
        self._secret = secrets.token_hex(16)
        """The secret with which the engines of a run prove KV to one another."""

    async def ready(self, cell: Cell) -> list[EngineHandle]:
        """Return the engines of a cell, running, in the order of its demands. Raises Unsupported where vLLM
        refuses one, EngineDied, DeviceError, DeadlineExceeded."""
        demands, spread = cell_demands(cell, placement.this_node()), placement_of(cell) == "spread"
        configs = cell.vllm_engines
        for config in configs:
            if config in self._refused:
                raise replace(self._refused[config])
        for (config, cause), num_deaths in self._deaths.items():
            if config in configs and num_deaths >= MOST_DEATHS:
                why = f"not started again, it died {num_deaths} times: {cause}"
                raise EngineDied(demands[configs.index(config)].name, why)
        chosen: list[KeptEngine | None] = []
        for config, demand in zip(configs, demands, strict=True):
            free = (e for e in self._kept if e not in chosen and e.suits(config, demand, spread=spread))
            chosen.append(next(free, None))
        found = [e for e in chosen if e is not None]
        await asyncio.gather(*(self._see_to(e) for e in found))
        chosen = [e if e in self._kept else None for e in chosen]
        missing = [i for i, engine in enumerate(chosen) if engine is None]
        used = [e for e in chosen if e is not None]
        self._make_room(len(missing), used)
        started = await self._start([(configs[i], demands[i]) for i in missing], placement_of(cell), used)
        engines = [e or started.pop(0) for e in chosen]
        self._kept = [e for e in self._kept if e not in engines] + engines
        self.nodes = {demand.name: engine.node for demand, engine in zip(demands, engines, strict=True)}
        return list(await asyncio.gather(*map(self._run, engines, demands, cell.all_engines)))

    async def settle(self, handles: Sequence[EngineHandle]) -> list[RaykError]:
        """Release engines after a cell, emptied for the next; returns what is wrong with those that are not
        kept. The others rest: they would take the cores of the next cell's engines."""
        found = await asyncio.gather(*map(self._settle, handles))
        kept = [e for e in self._kept if any(h.leader is e.actor for h in handles)]
        await asyncio.gather(*(self._rest(e) for e in kept))
        return [error for error in found if error is not None]

    def free_all(self) -> None:
        """End every engine."""
        self._kept.clear()
        self._pool.free_all()

    def _make_room(self, num_more: int, used: Sequence[KeptEngine]) -> None:
        idle = [e for e in self._kept if e not in used]
        num_over = len(self._kept) + num_more - ENGINES_KEPT
        for engine in idle[: max(0, num_over)]:
            self._drop(engine)

    async def _start(
        self, wanted: Sequence[tuple[VllmEngineConfig, EngineDemand]], how: str, used: Sequence[KeptEngine]
    ) -> list[KeptEngine]:
        """Start engines beside each other. Raises the first one's error; those that did start are kept."""
        if not wanted:
            return []
        demands = [replace(demand, name=f"{demand.side}{next(self._numbers)}") for _, demand in wanted]
        await self._place(demands, how, used)
        both = zip(wanted, demands, strict=True)
        results = await asyncio.gather(
            *(self._start_one(config, demand, asked.name) for (config, asked), demand in both),
            return_exceptions=True,
        )
        started = [r for r in results if isinstance(r, KeptEngine)]
        self._kept += started
        failed = [r for r in results if isinstance(r, BaseException)]
        if failed:
            raise failed[0]
        return started

    async def _place(self, demands: Sequence[EngineDemand], how: str, used: Sequence[KeptEngine]) -> None:
        """Reserve workers for new engines; where there is no room, end idle engines first."""
        until, beside = time.monotonic() + FREED_S, [e.demand for e in used]
        while True:
            try:
                await self._pool.prepare(demands, how, alone=True, beside=beside)
            except DeviceError:
                idle = [e for e in self._kept if e not in used]
                if not idle and time.monotonic() > until:
                    raise
                if idle:
                    self._drop(idle[0])
                    until = time.monotonic() + FREED_S
                await asyncio.sleep(FREED_POLL_S)
            else:
                return

    async def _start_one(self, config: VllmEngineConfig, demand: EngineDemand, name: str) -> KeptEngine:
        (actor,), node = self._pool.engine(demand.name, 1)
        host = await asyncio.to_thread(placement.line_host, node.node_id)
        limit_s = config.start_s + 2 * END_S
        starting = actor.start.remote(name, config, host, self._secret)
        try:
            facts = await asyncio.wait_for(_result(starting, name, str(node)), limit_s)
        except TimeoutError:
            self._pool.drop(demand.name)
            raise DeadlineExceeded(f"the start of {name}", limit_s) from None
        except RaykError as error:
            self._pool.drop(demand.name)
            if isinstance(error, Unsupported):
                self._refused[config] = error
            raise
        except asyncio.CancelledError:
            self._pool.drop(demand.name)
            raise
        return KeptEngine(demand.name, config, demand, actor, node, facts)

    async def _run(self, engine: KeptEngine, demand: EngineDemand, config: EngineConfig) -> EngineHandle:
        """Watch an engine for a cell."""
        handle = EngineHandle(demand.name, demand.side, 0, config, [engine.actor], node=str(engine.node))
        handle.facts = {**engine.facts, "node": handle.node}
        await handle.guard(engine.actor.join.remote(demand.name), "a new name", CONTROL_S)
        await measure_clock(handle)
        name = loop_name(handle.name, 0, 1, handle.role, config.model)
        handle.watch(0, engine.actor.run.options(name=name, enable_task_events=True).remote())
        return handle

    async def _see_to(self, engine: KeptEngine) -> None:
        """Drop an engine that has died since the last cell, or hangs."""
        try:
            answer = _result(engine.actor.ask.remote(CONTROL_S, "ping"), engine.slot, str(engine.node))
            await asyncio.wait_for(answer, CONTROL_S + END_S)
        except (RaykError, TimeoutError) as error:
            LOG.warning("%s is started anew: %s", engine.slot, error)
            self._drop(engine)

    async def _settle(self, handle: EngineHandle) -> RaykError | None:
        engine = next((e for e in self._kept if e.actor is handle.leader), None)
        if engine is None:
            return None
        try:
            # First: an engine that is not kept is gone at once, which is no death that a cell has to tell of.
            await handle.guard(handle.leader.leave.remote(), "its leave", CONTROL_S)
            await handle.stopped()
            handle.raise_if_dead()
            await self._empty(handle, engine)
        except RaykError as error:
            self._drop(engine)
            if isinstance(error, EngineDied):
                self._deaths[engine.config, error.cause] += 1
            return (
                EngineDied(handle.name, f"it hangs: {error}")
                if isinstance(error, DeadlineExceeded)
                else error
            )
        return None

    async def _rest(self, engine: KeptEngine) -> None:
        try:
            resting = _result(engine.actor.rest.remote(), engine.slot, str(engine.node))
            await asyncio.wait_for(resting, CONTROL_S)
        except (RaykError, TimeoutError) as error:
            LOG.warning("%s is not kept: %s", engine.slot, error)
            self._drop(engine)

    async def _empty(self, handle: EngineHandle, engine: KeptEngine) -> None:
        """Empty an engine's prefix cache; an engine that keeps blocks in use is not kept."""
        proofs, until = bool(engine.config.connector and engine.config.is_proven), time.monotonic() + SETTLE_S
        while True:
            asked = handle.leader.ask.remote(CONTROL_S, "forget", proofs=proofs)
            told, _ = await handle.guard(asked, "forget", CONTROL_S + END_S)
            if told["is_empty"]:
                return
            if time.monotonic() > until:
                LOG.warning("%s still has blocks in use %.0f s after a cell: it ends", handle.name, SETTLE_S)
                self._drop(engine)
                return
            await asyncio.sleep(SETTLE_POLL_S)

    def _drop(self, engine: KeptEngine) -> None:
        if engine in self._kept:
            self._kept.remove(engine)
        self._pool.drop(engine.slot)


async def _result(answer: Any, name: str, node: str) -> Any:
    """Await an actor's answer. Raises the error that comes instead of a result."""
    try:
        return await answer
    except RayError as error:
        raise translate(error, name, node=node) from None
