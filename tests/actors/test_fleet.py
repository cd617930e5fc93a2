"""A server's engines and a front's router on a real cluster: tokens equal to transformers', whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from rayk.types.errors import UserError
from rayk.types.request import FinishReason
from tests.actors.served import Got, Served, complete, follow, settings_for
from tests.markers import nixl, ray

pytestmark = [ray, nixl, pytest.mark.timeout(300)]

NUM_TOKENS = 300
"""Long enough that something can die in the middle. The reference's best token leads by more than 1e-3 logits
at each of them: float32 cannot tie."""


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[None]:
    from rayk.actors import launch

    with launch.connect(ray_address):
        yield


@pytest.fixture(scope="module")
def served(cluster: None, checkpoint) -> Iterator[Served]:
    """P on one rank, D on two."""
    server = Served("rayk/fleet/pd", settings_for(checkpoint("qwen3"), "p1 d2", num_spares=1, front_s=4.0))
    yield server
    server.close()


@pytest.fixture(scope="module")
def prompts(checkpoint) -> list[list[int]]:
    from rayk.oracle.checkpoint import read_marker

    return [probe["prompt"] for probe in read_marker(checkpoint("qwen3"))["probes"]]


@pytest.fixture(scope="module")
def expected(prompts, checkpoint, reference) -> list[list[int]]:
    outputs = reference(checkpoint("qwen3")).generate(prompts, NUM_TOKENS, ignore_eos=True)
    assert min(min(o.margins) for o in outputs) > 1e-3, "no near ties: a wrong token is a bug"
    return [list(o.token_ids) for o in outputs]


async def complete_all(router, prompts: Sequence[Sequence[int]], max_tokens: int = NUM_TOKENS) -> list[Got]:
    return list(await asyncio.gather(*(complete(router, p, max_tokens) for p in prompts)))


def check(found: Sequence[Got], expected: Sequence[Sequence[int]], max_tokens: int = NUM_TOKENS) -> None:
    for got, tokens in zip(found, expected, strict=True):
        assert got.error is None, got.error
        assert got.token_ids == list(tokens[:max_tokens])
        assert got.finish_reason is FinishReason.LENGTH


def test_tokens_are_the_references_and_every_block_comes_back(served, prompts, expected) -> None:
    async def run() -> None:
        async with served.router() as router:
            assert router.model.vocab_size == 515
            assert (await router.health()).is_ready
            found = await complete_all(router, [*prompts, *prompts], 24)
            check(found, [*expected, *expected], 24)
            assert {g.num_deltas > 1 for g in found} == {True}, "tokens come as they are made"
        await served.until_free()

    asyncio.run(run())


def test_what_engines_would_refuse_is_refused_before(served, prompts) -> None:
    async def run() -> None:
        async with served.router() as router:
            for prompt, how in (
                ([], {}),
                ([515], {}),
                ([1], {"temperature": -1.0}),
                (prompts[0], {"max_tokens": 5000}),
            ):
                got = await complete(router, prompt, **({"max_tokens": 4} | how))
                assert isinstance(got.error, UserError)
                assert got.num_deltas == 0

    asyncio.run(run())


def test_log_probabilities_come_once_for_each_token(served, prompts, expected) -> None:
    async def run() -> None:
        async with served.router() as router:
            got = await complete(router, prompts[1], 12, logprobs=2, prompt_logprobs=0)
        assert got.token_ids == expected[1][:12]
        assert [t.token_id for t in got.logprobs] == got.token_ids
        assert {len(t.top) for t in got.logprobs} == {2}
        assert got.num_prompt_logprobs == len(prompts[1])

    asyncio.run(run())


def test_a_client_that_leaves_frees_blocks_on_both_engines(served, prompts) -> None:
    async def run() -> None:
        async with served.router() as router:
            got = Got()
            task = asyncio.create_task(follow(got, router, prompts[2], 1500))
            await got.has_begun.wait()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert len(got.token_ids) < 1500
            await served.until_free()
            assert await served.fleet.num_requests.remote() == (0, 0)

    asyncio.run(run())


class Front:
    """A router in a process of its own."""

    def __init__(self, served_name: str, settings) -> None:
        from rayk.actors.router import Router

        self._router = Router(served_name, settings)

    async def begin(self, prompt: list[int]) -> int:
        """A long request, until its first token; its process."""
        got = Got()
        self._task = asyncio.create_task(follow(got, self._router, prompt, 1500))
        await got.has_begun.wait()
        return os.getpid()


def test_a_front_that_dies_leaves_nothing_behind(served, prompts) -> None:
    import ray as ray_package

    async def run() -> None:
        front = ray_package.remote(Front).options(num_cpus=0).remote(served.name, served.settings)
        pid = await front.begin.remote(prompts[2])
        assert await served.fleet.num_requests.remote() == (1, 0)
        os.kill(pid, signal.SIGKILL)
        await served.until_free()
        assert await served.fleet.num_requests.remote() == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize(("engine", "rank"), [("decode0", 1), ("decode0", 0), ("prefill0", 0)])
def test_streams_go_on_when_a_rank_is_killed(served, prompts, expected, engine, rank) -> None:
    """Without a token twice, or one that is missing."""

    async def run() -> None:
        async with served.router() as router:
            before = served.epochs()
            first = [Got() for _ in prompts]
            tasks = [
                asyncio.create_task(follow(g, router, p, NUM_TOKENS, begins_at=8))
                for g, p in zip(first, prompts, strict=True)
            ]
            for got in first:
                await got.has_begun.wait()
            assert any(g.finish_reason is None for g in first), "something must be in flight"
            served.strike(engine, rank)
            later = asyncio.create_task(complete_all(router, prompts))  # waits for the new engine
            await asyncio.gather(*tasks)
            check(first, expected)
            check(await later, expected)
            await served.until_ready(lambda: served.epochs()[engine] > before[engine])
        await served.until_free()

    asyncio.run(run())
