"""A server's engines and a front's router on a real cluster: tokens equal to transformers', whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rayk.types.errors import Overloaded, RoleConflict, UnknownEngine, UserError
from rayk.types.request import FinishReason
from tests.actors.served import REQUEST_S, Got, Served, complete, follow, settings_for
from tests.markers import nixl, one_per, ray, thorough

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
    """P on one rank, one D on two and another on one; workers for one engine more. Most tests ask for more
    blocks at once than there are."""
    limits = {"num_spares": 1, "front_s": 4.0, "hang_s": 6.0, "num_blocks": 72}
    settings = settings_for(checkpoint("qwen3"), "p1 d2 d1", **limits)
    server = Served("rayk/fleet/pd", settings)
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


class Begun:
    """Requests that have some of their tokens, and not all."""

    def __init__(self, router, prompts: Sequence[Sequence[int]]) -> None:
        self.got = [Got() for _ in prompts]
        self._tasks = [
            asyncio.create_task(follow(got, router, prompt, NUM_TOKENS, begins_at=8))
            for got, prompt in zip(self.got, prompts, strict=True)
        ]

    async def end(self) -> list[Got]:
        return list(await asyncio.gather(*self._tasks))


async def begin(router, prompts: Sequence[Sequence[int]]) -> Begun:
    begun = Begun(router, prompts)
    await asyncio.gather(*(got.has_begun.wait() for got in begun.got))
    assert any(got.finish_reason is None for got in begun.got), "something must be in flight"
    return begun


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


def test_whoever_joins_the_cluster_sees_its_engines_and_what_they_did(served, prompts) -> None:
    from rayk.actors.fleets import engines_of_fleets, fleet_names
    from rayk.actors.naming import fleet_name

    assert fleet_names() == ["rayk/fleet/pd"]
    assert fleet_name("models/qwen3").startswith("rayk/fleet/qwen3-"), "as servers call theirs"

    def told() -> dict[str, dict[str, Any]]:
        return {engine["name"]: engine for engine in engines_of_fleets(60.0)}

    async def run() -> list[Got]:
        async with served.router() as router:
            return await complete_all(router, prompts, 24)

    before = told()
    assert {name: e["role"] for name, e in before.items()} == {
        "prefill0": "prefill",
        "decode0": "decode",
        "decode1": "decode",
    }
    got, after = asyncio.run(run()), told()
    made = {name: e["num_sampled_tokens"] - before[name]["num_sampled_tokens"] for name, e in after.items()}
    # The first token of each answer is the prefill engine's; a preempted one may be sampled again.
    assert made["prefill0"] >= len(prompts)
    assert sum(made.values()) >= sum(len(g.token_ids) for g in got)
    computed = after["prefill0"]["num_computed_tokens"] - before["prefill0"]["num_computed_tokens"]
    assert computed >= sum(map(len, prompts))


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
            task = asyncio.create_task(follow(got, router, prompts[2], 800))
            await got.has_begun.wait()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert len(got.token_ids) < 800
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
        self._task = asyncio.create_task(follow(got, self._router, prompt, 800))
        await got.has_begun.wait()
        return os.getpid()


@thorough
def test_a_front_that_dies_leaves_nothing_behind(served, prompts) -> None:
    import ray as ray_package

    async def run() -> None:
        front = ray_package.remote(Front).options(num_cpus=0).remote(served.name, served.settings)
        pid = await front.begin.remote(prompts[2])
        assert await served.fleet.num_requests.remote() == (1, 0)
        os.kill(pid, signal.SIGKILL)
        await served.until_free()
        async with asyncio.timeout(REQUEST_S):
            while await served.fleet.num_requests.remote() != (0, 0):
                await asyncio.sleep(0.05)

    asyncio.run(run())


LOST_RANKS = [
    ("decode0", 1, signal.SIGKILL),
    ("prefill0", 0, signal.SIGKILL),
    ("decode0", 0, signal.SIGSTOP),
]


@one_per()
@pytest.mark.parametrize(("engine", "rank", "how"), LOST_RANKS, ids=lambda v: getattr(v, "name", str(v)))
def test_streams_go_on_when_a_rank_is_lost(served, prompts, expected, engine, rank, how) -> None:
    """Without a token twice, or one that is missing."""

    async def run() -> None:
        await served.until_ready()
        async with served.router() as router:
            before = served.epochs()
            first = await begin(router, prompts)
            served.strike(engine, rank, how)
            if how is signal.SIGSTOP:  # long before it is ended for that
                while not (reason := (await router.health()).reason):
                    await asyncio.sleep(0.05)
                assert reason.startswith(f"{engine} has given no sign of life")
            later = asyncio.create_task(complete_all(router, prompts))
            check(await first.end(), expected)
            check(await later, expected)
            await served.until_ready(lambda: served.epochs()[engine] > before[engine])
        await served.until_free()

    asyncio.run(run())


@thorough
def test_roles_change_under_load_and_no_request_is_lost(served, prompts, expected) -> None:
    """A decode engine becomes a prefill engine, then the only one."""

    async def run() -> None:
        await served.until_ready()
        async with served.router() as router:
            with pytest.raises(RoleConflict, match="only prefill engine"):
                await router.set_role("prefill0", "decode")
            with pytest.raises(RoleConflict, match="cannot be 'aggregated'"):
                await router.set_role("decode1", "aggregated")
            with pytest.raises(UnknownEngine, match="prefill0, decode0, decode1"):
                await router.set_role("decode9", "prefill")
            first = await begin(router, [*prompts, *prompts])
            busy = {e.name: e for e in await router.engines()}
            assert sum(e.num_requests for e in busy.values()) >= len(prompts), "some wait for a place"
            assert sum(e.num_output_tokens for e in busy.values() if e.role == "decode") >= NUM_TOKENS
            await router.set_role("decode1", "prefill")
            both = asyncio.create_task(complete_all(router, [*prompts, *prompts]))
            await router.set_role("prefill0", "decode")
            check(await first.end(), [*expected, *expected])
            check(await both, [*expected, *expected])
            check(await complete_all(router, prompts), expected)
            roles = {e["name"]: e["role"] for e in (await router.health()).engines}
            assert roles == {"prefill0": "decode", "decode0": "decode", "decode1": "prefill"}
            idle = await router.engines()
            assert [(e.name, e.role, e.tp, e.state) for e in idle] == [
                ("prefill0", "decode", 1, "ready"),
                ("decode0", "decode", 2, "ready"),
                ("decode1", "prefill", 1, "ready"),
            ]
            await router.set_role("prefill0", "prefill")
            await router.set_role("decode1", "decode")
        await served.until_free()

        told = await served.fleet.engines.remote()
        assert [(e.num_requests, e.num_prompt_tokens, e.num_output_tokens) for e in told] == [(0, 0, 0)] * 3
        assert [(e.num_running, e.num_waiting) for e in told] == [(0, 0)] * 3
        assert [e.num_free_blocks for e in told] == [e.num_blocks - 1 for e in told] == [71] * 3

    asyncio.run(run())


@thorough
def test_streams_go_on_when_the_whole_fleet_is_lost(served, prompts, expected) -> None:
    async def run() -> None:
        await served.until_ready()
        async with served.router() as router:
            first = await begin(router, prompts)
            served.close()
            while (await router.health()).is_ready:  # its process ends soon
                await asyncio.sleep(0.01)
            await asyncio.to_thread(served.start)
            check(await first.end(), expected)
            check(await complete_all(router, prompts), expected)
        await served.until_free()

    asyncio.run(run())


def test_a_server_that_drains_ends_what_it_began_and_leaves_every_block(served, prompts, expected) -> None:
    """The last test of this fleet."""

    async def run() -> None:
        await served.until_ready()
        async with served.router() as router:
            first = await begin(router, prompts)
            drained = asyncio.ensure_future(served.fleet.drain.remote(120.0))
            while "about to end" not in (await router.health()).reason:
                await asyncio.sleep(0.01)
            late = await complete(router, prompts[0], 4)
            assert isinstance(late.error, Overloaded)
            assert late.error.retry_after_s >= 1
            check(await first.end(), expected)
            assert await drained == 0
        accounts = await served.fleet.stop.remote()
        assert [a.engine for a in accounts] == ["prefill0", "decode0", "decode1"]
        assert all(a.is_clean for a in accounts), accounts
        assert all(a.ledger.num_held == 0 for a in accounts)
        assert sum(a.ledger.num_leased for a in accounts) > 0

    asyncio.run(run())
