"""Workers as threads of this process, in Ray's place: real engines, lines, fleets and coordinators, no Ray.

A worker that is ended in earnest lives in the thread it has; nobody reaches it any more.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError, RayTaskError

from rayk.actors import cell_deployment as cell_module
from rayk.actors import coordinator as coordinator_module
from rayk.actors import deployment as deployment_module
from rayk.actors import engines as engines_module
from rayk.actors import fleet as fleet_module
from rayk.actors import fleet_link as link_module
from rayk.actors import worker as worker_module
from rayk.actors.coordinator import Coordinator
from rayk.actors.fleet import Fleet
from rayk.actors.pool import WorkerPool
from rayk.actors.router import Router
from rayk.actors.worker import RankSpec, Worker
from rayk.parallel.factory import MadeComm
from rayk.parallel.local import LocalComm
from rayk.parallel.threads import ThreadComm
from rayk.specs.serving import ServerSettings
from tests.pd import local_agents

LIMIT_S = 120.0
"""Machines may be slow: nothing here measures time."""
_ACTORS: list[Actor] = []
_END: Any = object()


class Killed(BaseException):
    """Raised in a rank's step: its process is gone, and says nothing."""


@dataclass
class Plan:
    """What happens to ranks in the first lives of engines: (engine, rank) -> at which step, and what."""

    steps: dict[tuple[str, int], tuple[int, BaseException]] = field(default_factory=dict)
    may_be_noticed: threading.Event = field(default_factory=threading.Event)
    """Those who watch loops are told of their ends only then."""
    forms: list[tuple[str, int, int]] = field(default_factory=list)
    """(engine, epoch, rank) that were formed."""

    def plant(self, worker: Worker, spec: RankSpec) -> None:
        """In a rank that was just formed."""
        is_first = all(form[::2] != (spec.engine, spec.rank) for form in self.forms)
        self.forms.append((spec.engine, spec.epoch, spec.rank))
        if not is_first or (spec.engine, spec.rank) not in self.steps:
            return
        assert worker._rank is not None
        left, error = self.steps[spec.engine, spec.rank]
        step = worker._rank.step

        def failing(batch: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise error
            return step(batch)

        worker._rank.step = failing  # type: ignore[method-assign]


class Actor:
    """The handle of a worker in a thread. Crosses lines as Ray's do."""

    def __init__(self, plan: Plan, pool: ThreadPoolExecutor) -> None:
        self.worker = Worker(f"w{len(_ACTORS)}")
        self.plan, self.pool = plan, pool
        self.is_lost = False
        _ACTORS.append(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _actor, (_ACTORS.index(self),)

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return Method(self, name)

    def lose(self) -> None:
        """As its process would go: nobody reaches it, nor it others."""
        self.is_lost = True
        self.worker.stop()
        self.worker._close_line()
        if self.worker._rank is not None:
            self.worker._rank.comm.close()


def _actor(index: int) -> Actor:
    return _ACTORS[index]


class Method:
    """Of an actor."""

    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name, self._streams = actor, name, False

    def options(self, **options: Any) -> Method:
        self._streams = options.get("num_returns") == "streaming"
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        if self._streams:
            return Items(self, self._call(args, kwargs))
        return self.later(lambda: self._call(args, kwargs))

    def later(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        """On a thread."""
        future = asyncio.get_running_loop().run_in_executor(self._actor.pool, self._as_ray, call)
        future.add_done_callback(lambda f: f.cancelled() or f.exception())  # nobody may wait for it
        return future

    def _call(self, args: Any, kwargs: Any) -> Any:
        actor = self._actor
        result = getattr(actor.worker, self._name)(*args, **kwargs)
        if self._name == "form":
            actor.plan.plant(actor.worker, *args)
        return result

    def _as_ray(self, call: Callable[[], Any]) -> Any:
        if self._actor.is_lost:
            raise RayActorError
        try:
            return call()
        except Killed:
            self._actor.lose()
            raise RayActorError from None
        except Exception as error:  # noqa: BLE001 - as Ray tells of it
            raise RayTaskError(self._name, traceback.format_exc(), error) from None
        finally:
            if self._name == "run":
                self._actor.plan.may_be_noticed.wait(LIMIT_S)


class Items:
    """A generator's, each as something to wait for."""

    def __init__(self, method: Method, items: Iterator[Any]) -> None:
        self._method, self._items = method, items

    async def __anext__(self) -> Any:
        item = await self._method.later(lambda: next(self._items, _END))
        if item is _END:
            raise StopAsyncIteration
        found = asyncio.get_running_loop().create_future()
        found.set_result(item)
        return found


class Pool:
    """Stands for WorkerPool and for Spares."""

    num_ready = 0

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.threads = ThreadPoolExecutor(64)
        self.workers: dict[str, list[Actor]] = {}

    def engine(self, name: str, tp: int) -> tuple[list[Actor], Any]:
        """Its workers, and their node."""
        have = self.workers.setdefault(name, [])
        have += [Actor(self.plan, self.threads) for _ in range(tp - len(have))]
        return have[:tp], SimpleNamespace(node_id="node")

    async def fill(self, name: str, lost: Iterable[int]) -> None:
        for rank in lost:
            self.workers[name][rank].lose()
            self.workers[name][rank] = Actor(self.plan, self.threads)

    async def replace_workers(self, name: str, count: int) -> None:
        await self.fill(name, range(count))

    async def prepare(self, *_: Any, **__: Any) -> dict[str, int]:
        return {}

    async def is_placed(self, _name: str) -> bool:
        return True

    def start(self, *_: Any) -> None:
        pass

    async def stop(self) -> None:
        pass

    def free_all(self) -> None:
        for actor in [a for actors in self.workers.values() for a in actors]:
            actor.lose()
        self.threads.shutdown()


class Groups:
    """Comms of ranks that meet at the same address."""

    def __init__(self) -> None:
        self._made: dict[str, list[ThreadComm]] = {}
        self._lock = threading.Lock()

    def make(self, _kind: str, rank: int, size: int, address: str, **_: Any) -> MadeComm:
        if size == 1:
            return MadeComm(LocalComm(), None)
        with self._lock:
            group = self._made.setdefault(address, ThreadComm.make_group(size, LIMIT_S))
        return MadeComm(group[rank], None)


def make_pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """Workers for a fleet or a coordinator that is made in the same test."""
    make_agent = local_agents()
    monkeypatch.setattr(engines_module, "BLAME_S", LIMIT_S)
    monkeypatch.setattr(engines_module, "WHY_S", LIMIT_S)
    monkeypatch.setattr(worker_module.gc, "freeze", lambda: None)
    monkeypatch.setattr(worker_module, "make_comm", Groups().make)
    monkeypatch.setattr(worker_module, "make_agent", lambda name, _handling: make_agent(name))
    for module in (coordinator_module, cell_module, fleet_module):
        monkeypatch.setattr(module, "this_node", lambda: "node")
    for module in (coordinator_module, deployment_module):
        monkeypatch.setattr(module, "name_lost_nodes", lambda *_: asyncio.sleep(0))
    for module in (deployment_module, fleet_module):
        monkeypatch.setattr(module, "line_host", lambda _node: "127.0.0.1")
    plan = Plan()
    plan.may_be_noticed.set()
    return Pool(plan)


@asynccontextmanager
async def served(
    pool: Pool, settings: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Fleet, Router]]:
    """A fleet of such workers that has started, and a front's router to it. In the end every engine has all
    of its blocks."""
    fleet = Fleet("rayk/fleet/m", settings)
    fleet.pool = fleet.spares = pool  # type: ignore[assignment]
    line = SimpleNamespace(remote=fleet.line)
    monkeypatch.setattr(link_module.ray, "get_actor", lambda *_, **__: SimpleNamespace(line=line))
    router = Router(fleet.name, settings)
    try:
        await fleet.start()
        yield fleet, router
    finally:
        pool.plan.may_be_noticed.set()
        await router.close()
        accounts = await fleet.stop()
        await fleet._service.close()
    for account in accounts:
        assert account.is_clean, account
        assert account.ledger is not None
        assert account.ledger.num_held == 0, account


def coordinator_of(pool: Pool) -> Coordinator:
    """One that has such workers."""
    return Coordinator("rayk/coordinator/m", cast(WorkerPool, pool))
