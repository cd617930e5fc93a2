"""Which engines of vLLM a run keeps from cell to cell. Nothing behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rayk.actors import placement, vllm_engines
from rayk.actors.engines import EngineHandle
from rayk.actors.nodes import EngineDemand, Node
from rayk.actors.vllm_engines import VllmEngines
from rayk.specs import Cell, expand, load_spec
from rayk.types.config import VllmEngineConfig
from rayk.types.errors import DeviceError, EngineDied, RaykError, Unsupported
from tests.specs.models import decoder, spec

NODE = Node(node_id="n", address="127.0.0.1", resources={}, free={})
ONE = VllmEngineConfig(python="p", model="m")
TWO = replace(ONE, tp=2)


class Method:
    """Stands for a method of an actor."""

    def __init__(self, function: Any) -> None:
        self.remote = function

    def options(self, **_: Any) -> Method:
        return self


class Actor:
    def __init__(self, name: str, pool: Pool) -> None:
        self.name, self._pool, self._left = name, pool, asyncio.Event()
        self.used_as: list[str] = []
        self.start, self.join, self.ask = Method(self._start), Method(self._join), Method(self._ask)
        self.run, self.leave, self.clock_ns = Method(self._run), Method(self._leave), Method(self._clock)
        self.rests, self.rest = False, Method(self._rest)

    async def _start(self, *_: Any) -> dict[str, Any]:
        if self._pool.refusal is not None:
            raise self._pool.refusal
        return {"version": "0.32.0"}

    async def _join(self, name: str) -> None:
        self.used_as.append(name)
        self._left = asyncio.Event()

    async def _run(self) -> None:
        await self._left.wait()

    async def _leave(self) -> None:
        self._raise_if_gone()
        self._left.set()

    async def _rest(self) -> None:
        self._raise_if_gone()
        self.rests = True

    async def _clock(self) -> int:
        return 0

    async def _ask(self, timeout_s: float, op: str, **_: Any) -> tuple[dict[str, Any], bytes]:
        del timeout_s
        self._raise_if_gone()
        self.rests = False
        if self.name in self._pool.dead:
            raise EngineDied(self.name, "killed")
        return {"is_empty": op == "forget" and self.name not in self._pool.holding}, b""

    def _raise_if_gone(self) -> None:
        if self.name not in self._pool.actors:
            raise EngineDied(self.name, "the worker process ended")


class Pool:
    """Stands for a WorkerPool with room for so many engines."""

    def __init__(self, max_engines: int = 100) -> None:
        self.max_engines = max_engines
        self.actors: dict[str, Actor] = {}
        self.started: list[str] = []
        self.dead: set[str] = set()
        self.holding: set[str] = set()
        """Those that keep blocks of requests for ever."""
        self.refusal: RaykError | None = None

    async def prepare(self, demands: Sequence[EngineDemand], how: str, **_: Any) -> None:
        del how
        if len(self.actors) + len(demands) > self.max_engines:
            raise DeviceError("no room")
        for demand in demands:
            self.actors[demand.name] = Actor(demand.name, self)
            self.started.append(demand.name)

    def engine(self, name: str, num_workers: int) -> tuple[list[Actor], Node]:
        assert num_workers == 1
        return [self.actors[name]], NODE

    def drop(self, name: str) -> None:
        del self.actors[name]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(placement, "this_node", lambda: "n")
    monkeypatch.setattr(placement, "line_host", lambda _: "127.0.0.1")
    monkeypatch.setattr(vllm_engines, "FREED_POLL_S", 0.0)
    monkeypatch.setattr(vllm_engines, "FREED_S", 0.0)
    return Pool()


def cell(*engines: VllmEngineConfig) -> Cell:
    """Aggregated, or of a prefill and a decode engine."""
    (made,) = expand(load_spec(spec(device="cpu", matrix={})).spec, decoder())
    of_one: dict[str, Any] = {"mode": "aggregated", "decode": None, "num_decode_engines": 0}
    return replace(made, gpus_per_worker=0.0, vllm=engines, **(of_one if len(engines) == 1 else {}))


def run(pool: Pool, *cells: Cell) -> list[list[str]]:
    """Have the engines of one cell after the other; the slots that each had."""

    async def one_after_the_other() -> list[list[str]]:
        engines, had = VllmEngines("run"), []
        engines._pool = pool  # type: ignore[assignment]
        for each in cells:
            handles: list[EngineHandle] = await engines.ready(each)
            assert [h.name for h in handles] == ["prefill0", "decode0"][: len(handles)]
            had.append([h.leader.name for h in handles])
            assert await engines.settle(handles) == []
        return had

    return asyncio.run(one_after_the_other())


def test_an_engine_serves_any_role_in_later_cells(pool: Pool) -> None:
    had = run(pool, cell(ONE), cell(ONE, TWO), cell(TWO, ONE), cell(ONE, ONE))
    assert had == [["prefill0"], ["prefill0", "decode1"], ["decode1", "prefill0"], ["prefill0", "decode2"]]
    assert pool.actors["prefill0"].used_as == ["prefill0", "prefill0", "decode0", "prefill0"]
    assert all(actor.rests for actor in pool.actors.values())


def test_the_least_recently_used_end_first(pool: Pool) -> None:
    others = [replace(ONE, model=f"m{i}") for i in range(4)]
    run(pool, cell(ONE), *(cell(other) for other in others))
    assert list(pool.actors) == ["prefill1", "prefill2", "prefill3", "prefill4"]


def test_idle_engines_end_where_there_is_no_room(pool: Pool) -> None:
    pool.max_engines = 2
    assert run(pool, cell(ONE), cell(ONE, TWO), cell(replace(ONE, model="n"), TWO))[-1] == [
        "prefill2",
        "decode1",
    ]
    pool.max_engines = 1
    with pytest.raises(DeviceError, match="no room"):
        run(Pool(max_engines=1), cell(ONE, TWO))


def test_an_engine_that_died_since_is_started_anew(pool: Pool) -> None:
    pool.dead.add("prefill0")

    async def dies_between() -> None:
        engines = VllmEngines("run")
        engines._pool = pool  # type: ignore[assignment]
        (error,) = await engines.settle(await engines.ready(cell(ONE)))
        assert isinstance(error, EngineDied)
        await engines.ready(cell(ONE))

    asyncio.run(dies_between())
    assert list(pool.actors) == ["prefill1"]


def test_an_engine_that_always_dies_of_the_same_is_not_started_for_ever(pool: Pool) -> None:
    pool.dead |= {f"prefill{number}" for number in range(10)}

    async def dies_in_each_cell() -> None:
        engines = VllmEngines("run")
        engines._pool = pool  # type: ignore[assignment]
        for _ in range(vllm_engines.MOST_DEATHS):
            await engines.settle(await engines.ready(cell(ONE)))
        with pytest.raises(EngineDied, match="prefill0 died: not started again, it died 2 times: killed"):
            await engines.ready(cell(ONE))
        await engines.ready(cell(TWO))

    asyncio.run(dies_in_each_cell())
    assert pool.started == ["prefill0", "prefill1", "prefill2"]


def test_an_engine_that_keeps_blocks_ends_but_is_no_failure(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engines, "SETTLE_S", 0.0)
    pool.holding.add("prefill0")
    run(pool, cell(ONE), cell(ONE))
    assert list(pool.actors) == ["prefill1"]


def test_what_vllm_refused_is_not_started_again(pool: Pool) -> None:
    pool.refusal = Unsupported("vLLM refuses")

    async def twice() -> None:
        engines = VllmEngines("run")
        engines._pool = pool  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(Unsupported, match="vLLM refuses"):
                await engines.ready(cell(ONE))

    asyncio.run(twice())
    assert pool.started == ["prefill0"]
    assert pool.actors == {}
