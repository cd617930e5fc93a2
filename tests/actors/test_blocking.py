"""What waits for Ray's GCS does not keep the event loop that a fleet answers on. No Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rayk.actors import pool as pool_module
from rayk.actors.pool import WorkerPool, name_lost_nodes
from rayk.types.errors import DeadlineExceeded, EngineDied
from tests.actors.test_waits import DEMANDS, NODE, Cluster

LIMIT_S = 60.0


class SlowCluster(Cluster):
    """Its GCS answers when it may; while it may not, who asks it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def live_nodes(self) -> Any:
        self._wait()
        return super().live_nodes()

    def node_of(self, group: str) -> str:
        self._wait()
        return super().node_of(group)

    def _wait(self) -> None:
        self.is_asked.set()
        assert self.may_answer.wait(LIMIT_S / 6), "the loop that lets it answer waits for the answer"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> SlowCluster:
    made = SlowCluster()
    monkeypatch.setattr(pool_module, "placement", made)
    monkeypatch.setattr(pool_module, "WATCH_S", 0.01)
    return made


async def lost(_pool: WorkerPool) -> str:
    error = EngineDied("prefill0", "killed")
    await name_lost_nodes([error], {"prefill0": NODE})
    return error.cause


@pytest.mark.parametrize(
    "ask",
    [
        lambda pool: pool.is_placed("prefill0"),
        lambda pool: pool.prepare(DEMANDS, "auto"),
        lambda pool: pool.replace_workers("prefill0", 2),
        lost,
    ],
    ids=["is_placed", "prepare", "replace_workers", "name_lost_nodes"],
)
def test_a_loop_goes_on_while_the_gcs_is_asked(
    cluster: SlowCluster, ask: Callable[[WorkerPool], Awaitable[Any]]
) -> None:
    async def run() -> None:
        pool = WorkerPool("run", keep=True)
        await pool.prepare(DEMANDS, "auto")
        cluster.is_asked.clear()
        cluster.may_answer.clear()
        asking = asyncio.ensure_future(ask(pool))
        async with asyncio.timeout(LIMIT_S):
            while not cluster.is_asked.is_set():
                await asyncio.sleep(0.001)
            assert not asking.done()
            cluster.may_answer.set()
            await asking

    asyncio.run(run())


def test_a_gcs_that_answers_late_keeps_no_start_from_ending_well(
    cluster: SlowCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is that of the start."""
    monkeypatch.setattr(pool_module, "NODES_S", 0.0)
    assert len(asyncio.run(WorkerPool("run", keep=True).prepare(DEMANDS, "auto"))) == 4


def test_a_gcs_that_does_not_answer_is_not_waited_for(
    cluster: SlowCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is taken for lost that it says nothing of."""
    monkeypatch.setattr(pool_module, "NODES_S", 0.05)

    async def run() -> None:
        pool = WorkerPool("run", keep=True)
        cluster.may_answer.clear()
        with pytest.raises(DeadlineExceeded, match="an answer of Ray's GCS"):
            await pool.is_placed("prefill0")
        assert await lost(pool) == "killed"
        cluster.may_answer.set()

    asyncio.run(run())
