"""Idle workers in the places of lost ones: which is taken, what starts instead, and what is given back. No
Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rayk.actors import pool as pool_module
from rayk.actors import spares as spares_module
from rayk.actors.engines import EngineHandle
from rayk.actors.forming import survivors
from rayk.actors.nodes import EngineDemand, Node
from rayk.actors.placement import NODE_ID_LABEL
from rayk.actors.pool import WorkerPool
from rayk.actors.spares import Spares
from rayk.types.config import EngineConfig
from rayk.types.errors import EngineDied

CPU = {"CPU": 1.0}


def node(name: str) -> Node:
    return Node(
        node_id=name, address=name, resources={"CPU": 8.0}, free={"CPU": 8.0}, labels={NODE_ID_LABEL: name}
    )


@dataclass(eq=False)
class FakeWorker:
    """In a bundle of a group."""

    name: str
    place: tuple[str, int]
    is_dead: bool = False
    can_start: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def describe(self) -> FakeWorker:
        return self

    @property
    def release(self) -> FakeWorker:
        return self

    def options(self, **_: object) -> FakeWorker:
        return self

    def remote(self, *_: object) -> Awaitable[dict[str, object]]:
        async def answer() -> dict[str, object]:
            await self.can_start.wait()
            if self.is_dead:
                raise RayActorError
            return {"name": self.name, "pid": 1}

        return asyncio.ensure_future(answer())


@dataclass
class Cluster:
    """Stands for rayk.actors.placement."""

    nodes: list[Node]
    workers: list[FakeWorker] = field(default_factory=list)
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    freed: list[str] = field(default_factory=list)
    stalls: bool = False
    """Workers that are started from now on are not there soon."""

    def live_nodes(self) -> list[Node]:
        return list(self.nodes)

    def reserve_group(self, name: str, _: int, __: object, labels: dict[str, str]) -> str:
        short = name.rpartition("/")[2]
        self.labels[short] = labels
        return short

    def node_of(self, group: str) -> str:
        return self.labels[group].get(NODE_ID_LABEL, self.nodes[0].node_id)

    def start_worker(self, name: str, group: str, index: int, _: object) -> FakeWorker:
        worker = FakeWorker(name.partition("/run/")[2], (group, index))
        if not self.stalls:
            worker.can_start.set()
        self.workers.append(worker)
        return worker

    def kill(self, worker: FakeWorker) -> None:
        worker.is_dead = True
        worker.can_start.set()

    def free_group(self, group: str) -> None:
        assert group not in self.freed
        self.freed.append(group)
        for worker in self.workers:
            if worker.place[0] == group:
                self.kill(worker)

    def of(self, pool: WorkerPool, engine: str, count: int) -> list[FakeWorker]:
        return list(pool.engine(engine, count)[0])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster([node("here")])
    monkeypatch.setattr(pool_module, "placement", made)
    monkeypatch.setattr(pool_module, "WATCH_S", 0.01)
    monkeypatch.setattr(spares_module, "LOOK_S", 0.01)
    return made


D, P = (EngineDemand(name=n, num_workers=k, resources=CPU) for n, k in (("decode0", 2), ("prefill0", 1)))


def run(
    cluster: Cluster, num_spares: int, body: Callable[[WorkerPool, Spares], Coroutine[Any, Any, None]]
) -> None:
    async def whole() -> None:
        pool = WorkerPool("run", keep=True)
        spares = Spares(pool, [D, P], num_spares, "model")
        await pool.prepare([D, P], "auto")
        spares.start()
        await until(lambda: spares.num_ready == num_spares)
        try:
            await body(pool, spares)
        finally:
            await spares.stop()

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake workers have no checkpoints to look at."""
    prepare = WorkerPool.prepare

    async def without(self: WorkerPool, demands: Any, how: str, model: Any = None, **more: Any) -> Any:
        return await prepare(self, demands, how, None, **more)

    monkeypatch.setattr(WorkerPool, "prepare", without)


def test_a_spare_takes_one_lost_ranks_place_and_the_other_rank_stays(cluster: Cluster) -> None:
    async def body(pool: WorkerPool, spares: Spares) -> None:
        before = cluster.of(pool, "decode0", 2)
        await spares.fill("decode0", [1])
        after = cluster.of(pool, "decode0", 2)
        assert after[0] is before[0]
        assert (after[1].name, after[1].place) == ("spare0/r0", ("spare0", 0))
        assert before[1].is_dead
        assert not before[0].is_dead
        # What starts instead has the bundle that the lost one left: nothing more is asked of the node.
        assert cluster.workers[-1].name == "spare0/r0#1"
        assert cluster.workers[-1].place == ("decode0", 1)
        await spares.fill("decode0", [0, 1])
        names = {w.name for w in cluster.of(pool, "decode0", 2)}
        assert names == {"spare1/r0", "spare0/r0#1"}, "each spare once"

    run(cluster, 2, body)


def test_the_spare_that_began_first_is_taken_though_it_starts_still(cluster: Cluster) -> None:
    async def body(pool: WorkerPool, spares: Spares) -> None:
        cluster.stalls = True
        await spares.fill("prefill0", [0])  # a spare was there
        starting = cluster.workers[-1]
        filling = asyncio.create_task(spares.fill("prefill0", [0]))
        await until(lambda: len(cluster.workers) == 6)
        await asyncio.sleep(0.05)
        assert not filling.done()
        assert cluster.of(pool, "prefill0", 1) == [starting]
        starting.can_start.set()
        await filling

    run(cluster, 1, body)


def test_a_spare_that_is_gone_is_passed_over_and_replaced(cluster: Cluster) -> None:
    async def body(pool: WorkerPool, spares: Spares) -> None:
        first = next(w for w in cluster.workers if w.name == "spare0/r0")
        first.is_dead = True
        await spares.fill("decode0", [0])
        assert cluster.of(pool, "decode0", 1)[0].name == "spare1/r0"
        idle = next(w for w in cluster.workers[::-1] if w.name.startswith("spare1"))
        idle.is_dead = True
        await until(lambda: cluster.workers[-1].name == "spare1/r0#2")
        assert cluster.workers[-1].place == idle.place

    run(cluster, 2, body)


def test_without_spares_a_new_worker_starts_in_the_lost_ones_place(cluster: Cluster) -> None:
    async def body(pool: WorkerPool, spares: Spares) -> None:
        kept = cluster.of(pool, "decode0", 2)[1]
        await spares.fill("decode0", [0])
        found = cluster.of(pool, "decode0", 2)
        assert (found[0].name, found[0].place) == ("decode0/r0#1", ("decode0", 0))
        assert found[1] is kept

    run(cluster, 0, body)


def test_workers_that_never_come_up_end_in_an_error(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(pool: WorkerPool, spares: Spares) -> None:
        start = cluster.start_worker

        def stillborn(*arguments: Any) -> FakeWorker:
            worker = start(*arguments)
            worker.is_dead = True
            return worker

        monkeypatch.setattr(cluster, "start_worker", stillborn)
        with pytest.raises(EngineDied):
            await spares.fill("decode0", [0])

    run(cluster, 0, body)


def test_spares_are_beside_engines_and_one_elsewhere_is_of_no_use(cluster: Cluster) -> None:
    cluster.nodes.append(node("there"))

    async def body(pool: WorkerPool, spares: Spares) -> None:
        assert {cluster.labels[n][NODE_ID_LABEL] for n in ("spare0", "spare1")} == {"here"}
        pool._slots["spare0"].node = node("there")
        await spares.fill("decode0", [0])
        assert cluster.of(pool, "decode0", 1)[0].name == "spare1/r0"

    run(cluster, 2, body)


def test_groups_are_given_back_when_nobody_has_a_part_in_them(cluster: Cluster) -> None:
    async def body(pool: WorkerPool, spares: Spares) -> None:
        await spares.fill("decode0", [1])
        await spares.stop()
        engine, spare = cluster.of(pool, "decode0", 2), cluster.of(pool, "spare0", 1)[0]
        pool.drop("decode0")
        assert cluster.freed == ["spare0"], "the spare is in a bundle of the engine's group"
        assert all(w.is_dead for w in engine)
        assert not spare.is_dead
        pool.free_all()
        assert sorted(cluster.freed) == ["decode0", "prefill0", "spare0"]
        assert all(w.is_dead for w in cluster.workers)

    run(cluster, 1, body)


def test_ranks_that_outlive_their_engine_are_those_that_say_so_in_time() -> None:
    async def look() -> None:
        workers = [FakeWorker(str(i), ("g", i)) for i in range(3)]
        workers[0].can_start.set()
        workers[1].is_dead = True
        workers[1].can_start.set()
        config = EngineConfig(model="m", tp=3)
        engine = EngineHandle("decode0", "decode", 1, config, workers)
        assert await survivors(engine, 0.2) == {0}
        workers[2].can_start.set()
        assert await survivors(engine, 60) == {0, 2}
        alone = EngineHandle("prefill0", "prefill", 1, EngineConfig(model="m"), workers[:1])
        assert await survivors(alone, 60) == set(), "its only rank is the one that died"

    asyncio.run(look())


@pytest.mark.parametrize(
    ("how", "left", "goes"), [("spread", 3, "n2"), ("spread", 2, "n0"), ("pack", 3, "n0")]
)
def test_an_engine_that_lost_its_node_returns_to_a_node_that_suits_the_others(
    cluster: Cluster, how: str, left: int, goes: str
) -> None:
    """n1 is lost. Where the nodes that are left cannot be had as asked for, any will do."""
    cluster.nodes[:] = [node(f"n{i}") for i in range(left)]

    async def whole() -> None:
        pool = WorkerPool("run", keep=True)
        await pool.prepare([P], "auto")
        assert pool.node_id("prefill0") == "n0"
        labelled = replace(D, labels={NODE_ID_LABEL: "n1"})
        await pool.prepare([labelled], "auto")
        del cluster.nodes[1]
        pool.drop("decode0")
        await pool.prepare([D], how, alone=True, beside=[P])
        assert pool.node_id("decode0") == goes
        assert pool.node_id("prefill0") == "n0"

    asyncio.run(whole())
