"""Waits that end: workers that never answer, waits that are cancelled, engines that do not stop. No Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from rayk.actors import engines as engines_module
from rayk.actors import pool as pool_module
from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.engines import EngineHandle
from rayk.actors.failures import translate
from rayk.actors.nodes import EngineDemand, Node
from rayk.actors.pool import WorkerPool
from rayk.engine.leader import dead_engine
from rayk.specs import expand, load_spec
from rayk.types.config import EngineConfig
from rayk.types.errors import CommError, DeadlineExceeded, LayoutVetoed
from tests.actors.cells import cell_deployment
from tests.specs.models import decoder, spec

NODE = Node(node_id="n0", address="10.0.0.1", resources={"CPU": 8.0}, free={"CPU": 8.0}, labels={})
CPU = {"CPU": 1.0}
LIMIT_S = 60.0


@dataclass
class Method:
    """What a handle's method looks like: `.remote()` starts it and gives something to await."""

    answer: Callable[[], Coroutine[Any, Any, object]]

    def remote(self, *_: object, **__: object) -> Awaitable[object]:
        return asyncio.ensure_future(self.answer())

    def options(self, **_: object) -> Method:
        return self


@dataclass
class Cluster:
    """Stands for rayk.actors.placement: one node, workers that answer unless they are to hang."""

    hung: set[str] = field(default_factory=set)
    """Engines whose workers do not answer."""
    started: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=lambda: [NODE])

    def live_nodes(self) -> list[Node]:
        return list(self.nodes)

    def reserve_group(self, name: str, *_: object) -> str:
        return name

    def node_of(self, group: str) -> str:
        return NODE.node_id

    def start_worker(self, name: str, *_: object) -> Any:
        self.started.append(name)
        hangs = name.split("/")[2] in self.hung

        async def describe() -> dict[str, object]:
            if hangs:
                await asyncio.Event().wait()
            return {"name": name, "pid": len(self.started)}

        return SimpleNamespace(name=name, describe=Method(describe))

    def kill(self, worker: Any) -> None:
        self.killed.append(worker.name)

    def free_group(self, group: str) -> None:
        self.freed.append(group)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(pool_module, "placement", made)
    monkeypatch.setattr(pool_module, "WATCH_S", 0.01)
    return made


DEMANDS = [EngineDemand(name=n, num_workers=2, resources=CPU) for n in ("prefill0", "decode0")]


async def until_only_decode0_is_waited_for(workers: WorkerPool) -> None:
    """The others' answers are in."""
    async with asyncio.timeout(LIMIT_S):
        while not (workers._waiting_for == "starting 4 workers" and workers._slots["prefill0"].has_answered):
            await asyncio.sleep(0.001)


def test_workers_that_never_answer_are_replaced(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[float | None, asyncio.Timeout] = {}
    of_library = asyncio.timeout

    def timeout(limit_s: float | None) -> asyncio.Timeout:
        limits[limit_s] = of_library(limit_s)
        return limits[limit_s]

    monkeypatch.setattr(asyncio, "timeout", timeout)
    cluster.hung = {"decode0"}
    workers = WorkerPool("run", keep=True)

    async def twice() -> dict[str, int]:
        preparing = asyncio.ensure_future(workers.prepare(DEMANDS, "auto"))
        await until_only_decode0_is_waited_for(workers)
        limits[pool_module.FORM_S].reschedule(0.0)  # now
        with pytest.raises(DeadlineExceeded, match="starting 4 workers"):
            await preparing
        cluster.hung = set()
        return await workers.prepare(DEMANDS, "auto")

    pids = asyncio.run(twice())
    assert cluster.killed == ["rayk/run/decode0/r0", "rayk/run/decode0/r1"]
    assert cluster.freed == ["rayk/run/decode0"], "those that answered stay"
    assert sorted(pids) == [
        "rayk/run/decode0/r0#1",
        "rayk/run/decode0/r1#1",
        "rayk/run/prefill0/r0",
        "rayk/run/prefill0/r1",
    ]


def test_a_cells_own_deadline_spares_workers_that_are_still_starting(cluster: Cluster) -> None:
    cluster.hung = {"decode0"}
    workers = WorkerPool("run", keep=True)

    async def hasty() -> None:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            group.create_task(workers.prepare(DEMANDS, "auto"))
            await until_only_decode0_is_waited_for(workers)
            limit.reschedule(0.0)  # now

    with pytest.raises(TimeoutError):
        asyncio.run(hasty())
    assert (cluster.killed, cluster.freed) == ([], [])


def test_a_cancellation_is_not_lost_while_a_lost_nodes_wait_ends(cluster: Cluster) -> None:
    is_ending = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_ending.set()
            await asyncio.Event().wait()

    async def cancel_meanwhile() -> None:
        waiting = asyncio.ensure_future(pool_module._while_alive(slow_to_end(), [NODE]))
        cluster.nodes.clear()
        await asyncio.wait_for(is_ending.wait(), LIMIT_S)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel_meanwhile())


def test_a_cancelled_guard_leaves_nothing_running() -> None:
    ends: list[str] = []

    async def reply() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def cancel() -> None:
        engine = EngineHandle("e", "decode", 1, EngineConfig(model="m"), [])
        waiting = asyncio.ensure_future(engine.guard(reply(), "a reply", 60.0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0)
        assert ends == ["cancelled"]

    asyncio.run(cancel())


def test_the_parts_of_an_engines_end_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is within its own; a cell must not wait for all of them one after the other."""
    monkeypatch.setattr("rayk.actors.forming.STOP_S", 60.0)
    monkeypatch.setattr("rayk.actors.cell_deployment.END_S", 0.1)

    async def slow() -> dict[str, object]:
        await asyncio.sleep(40)
        return {}

    parts = ("status", "stop", "check_integrity", "dissolve", "run")
    worker = SimpleNamespace(**{part: Method(slow) for part in parts})
    replaced: list[tuple[str, int]] = []
    (cell,) = expand(load_spec(spec()).spec, decoder(), device="cpu")

    async def end() -> tuple[CellOutcome, float]:
        async def replace(*which: Any) -> None:
            replaced.append(which)

        outcome = CellOutcome()
        pool = SimpleNamespace(replace_workers=replace)
        engines = cell_deployment(cell, outcome, pool)
        engine = EngineHandle("decode0", "decode", 1, EngineConfig(model="m"), [worker])
        engine.start()
        engines.members["decode0"].handle = engine
        started = time.monotonic()
        await engines._end(engines.members["decode0"])
        return outcome, time.monotonic() - started

    outcome, took_s = asyncio.run(end())
    assert took_s < 30, "it waited for a part"
    assert [str(e) for e in outcome.errors] == ["the end of decode0 exceeded its deadline of 0.1 s"]
    assert replaced == [("decode0", 1)]


def test_a_refused_layout_names_its_engine() -> None:
    """The worker that refuses does not know which engine it is of."""
    refusal = LayoutVetoed((("BHLNC", "user", "asked for LHBNC"), ("LHBNC", "specs", "unlike")), "LHBNC")
    translated = translate(RayTaskError("load", "traceback", refusal), "decode0")
    assert str(translated) == "decode0: unlike; mend: any other layout (BHLNC)"


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_rank_died_of_is_told_rather_than_that_another_lost_it(
    monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    monkeypatch.setattr(engines_module, "BLAME_S", 60.0 if is_told else 0.01)

    def failure(rank: int, error: Exception) -> RayTaskError:
        return RayTaskError("run", "", dead_engine("d", error, rank))

    async def lose() -> BaseException | None:
        ends: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
        workers = [SimpleNamespace(run=Method(lambda end=end: asyncio.wait_for(end, None))) for end in ends]
        engine = EngineHandle("d", "decode", 1, EngineConfig(model="m"), workers)
        engine.start()
        ends[0].set_exception(failure(0, CommError("gather_bytes", "rank 1 is gone")))
        await asyncio.sleep(0.05)
        if is_told:
            ends[1].set_exception(failure(1, KeyError("a bug")))
        else:
            ends[1].set_result(None)
        await engine.stopped()
        return engine.died.exception()

    assert str(asyncio.run(lose())) == (
        "a bug in the loop of d rank 1: KeyError: 'a bug'"
        if is_told
        else "engine d rank 0 died: CommError: gather_bytes: rank 1 is gone"
    )
