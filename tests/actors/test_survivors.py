"""A rank that outlived its engine serves another one, with the right tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from rayk.actors.engines import EngineHandle
from rayk.actors.forming import form_engine, stop_loops, survivors
from rayk.actors.worker import RankSpec
from rayk.handover.engine_request import EngineRequest
from rayk.types.config import EngineConfig
from rayk.types.errors import EngineDied
from rayk.types.request import Request, SamplingParams
from tests.handover.cases import NUM_TOKENS, Model
from tests.markers import nixl, ray, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(300), thorough]

START_S = 240.0
"""Machines may be slow: nothing here measures time."""


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[None]:
    from rayk.actors import launch

    with launch.connect(ray_address):
        yield


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_outlived_its_engine_serves_another_one(
    cluster: None, checkpoint, reference, lost: int
) -> None:
    """It decoded, so that it has an agent of the transport to forget, and was in the middle of a request."""
    from rayk.actors import placement

    path = checkpoint("qwen3")
    model = Model(path, reference(path))

    async def form(epoch: int, workers: list, **config: int) -> EngineHandle:
        engine = EngineHandle("decode0", "decode", epoch, EngineConfig(model=str(path), **config), workers)

        def spec(rank: int, address: str) -> RankSpec:
            return RankSpec(
                engine="decode0",
                epoch=epoch,
                role="decode",
                rank=rank,
                config=engine.config,
                address=address,
                comm_timeout_s=START_S,
                lease_s=START_S,
                notices_deaths=True,
            )

        await form_engine(engine, spec)
        return engine

    async def tokens(engine: EngineHandle, index: int, count: int) -> list[int]:
        request = Request(
            request_id=f"r{engine.epoch}-{index}",
            prompt_token_ids=tuple(model.prompts[index]),
            sampling=SamplingParams(max_tokens=count, ignore_eos=True),
        )
        events = [e async for batch in engine.stream(START_S, EngineRequest(request=request)) for e in batch]
        if events[-1].error is not None:
            raise events[-1].error
        return [t for e in events for t in e.token_ids]

    async def run() -> None:
        name, left = f"rayk/survivors{lost}", 1 - lost
        group = placement.reserve_group(name, 2, {"CPU": 0.01}, {})
        workers = [placement.start_worker(f"{name}/r{i}", group, i, {"CPU": 0.01}) for i in range(2)]
        try:
            pids = [(await w.describe.remote())["pid"] for w in workers]
            first = await form(1, workers, tp=2)
            assert not await workers[left].release.remote(0.01), "its engine lives"
            running = asyncio.create_task(tokens(first, 2, 500))
            assert await tokens(first, 0, NUM_TOKENS) == model.expected[0]
            os.kill(pids[lost], signal.SIGKILL)
            with pytest.raises(EngineDied):
                await running
            assert await survivors(first, START_S) == {left}
            second = await form(2, [workers[left]], tp=1)
            assert (await workers[left].describe.remote())["pid"] == pids[left]
            for index in range(2):
                assert await tokens(second, index, NUM_TOKENS) == model.expected[index]
            status, leaked = await stop_loops(second, 0.0)
            assert leaked == ()
            assert status["num_free_blocks"] == status["num_blocks"] - 1
        finally:
            placement.free_group(group)

    asyncio.run(run())
