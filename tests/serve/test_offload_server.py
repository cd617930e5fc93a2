"""A server whose engines swap all the time, and whose host tier is killed: every answer is right."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayk.actors import launch
from rayk.actors.fleets import fleet_names
from rayk.specs.experiment import OffloadSpec, TransferSpec
from tests.actors.served import Got, Served, complete, settings_for
from tests.markers import nixl, ray, slow, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(240), thorough]
NUM_TOKENS = 60
LENGTHS = (40, 57, 75, 90)
OFFLOAD = OffloadSpec(host_gib=0.03, load="always", swap="always", store_tokens=64)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[4 + (37 * i + 11 * n + n * n) % 480 for n in range(k)] for i, k in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(checkpoint, reference, prompts) -> list[list[int]]:
    outputs = reference(checkpoint("qwen3")).generate(prompts, NUM_TOKENS, ignore_eos=True)
    return [list(o.token_ids) for o in outputs]


@pytest.fixture(scope="module")
def cluster(ray_address) -> Iterator[None]:
    with launch.connect(ray_address):
        yield


@contextmanager
def serving(name: str, folder: Path, engines: str, **changes: Any) -> Iterator[Served]:
    served = Served(f"rayk/fleet/{name}", settings_for(folder, engines, offload=OFFLOAD, **changes))
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def swapping(cluster: None, checkpoint) -> Iterator[Served]:
    """Two engines, each with room for two of its 16 rows' requests when these have all of their answers."""
    with serving("swap", checkpoint("qwen3"), "a1 a2", num_blocks=22, max_seqs=16) as served:
        yield served


def tier_pid(served: Served) -> int | None:
    told = served.ask("tiers")
    return next(iter(told.values()))["pid"] if told else None


def kill_tier(served: Served) -> None:
    """And wait for the one that takes its place, with engines."""
    pid = tier_pid(served)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60

    def has_one() -> bool:
        return all((e.offload or {}).get("why_off") == "" for e in served.ask("engines"))

    while tier_pid(served) in (None, pid) or not has_one():
        assert time.monotonic() < deadline, "no other tier"
        time.sleep(0.1)


def counted(served: Served, name: str) -> dict[str, int]:
    return {e.name: int((e.offload or {}).get(name, 0)) for e in served.ask("engines")}


def check(found: list[Got], expected: list[list[int]]) -> None:
    for index, got in enumerate(found):
        assert got.error is None, got.error
        assert got.token_ids == expected[index % len(expected)]


async def ask_all(served: Served, prompts: list[list[int]], count: int) -> list[Got]:
    async with served.router() as router:
        completions = (complete(router, prompts[i % len(prompts)], NUM_TOKENS) for i in range(count))
        found = list(await asyncio.gather(*completions))
    await served.until_free()
    return found


def test_engines_that_swap_all_the_time_answer_as_the_reference_does(swapping, prompts, expected) -> None:
    check(asyncio.run(ask_all(swapping, prompts, 32)), expected)
    assert min(counted(swapping, "swaps").values()) >= 1
    assert sum(counted(swapping, "swapped_in_bytes").values()) > 0
    assert fleet_names() == [swapping.name], "host tiers have names of their own"


def test_a_prefix_that_one_engine_computed_is_found_by_the_other(swapping, prompts, expected) -> None:
    """Asked one after the other, an engine each: they have no prefix caches of their own."""

    stored = sum(counted(swapping, "stored_bytes").values())

    async def run() -> list[int | None]:
        prompt = [7, *prompts[3]]
        async with swapping.router() as router:
            found = [await complete(router, prompt, 4)]
            # Its store goes on beside whatever comes next.
            while sum(counted(swapping, "stored_bytes").values()) == stored:
                await asyncio.sleep(0.01)
            found += [await complete(router, prompt, 4) for _ in range(3)]
        assert len({tuple(got.token_ids) for got in found}) == 1
        return [got.num_cached_tokens for got in found]

    before = counted(swapping, "loads")
    cached = asyncio.run(run())
    assert cached[0] == 0
    assert cached[1:] == [80] * 3
    gained = {name: n - before[name] for name, n in counted(swapping, "loads").items()}
    assert sorted(gained.values()) == [1, 2]


@slow
def test_a_tier_behind_a_router_keeps_salts_apart(swapping, prompts) -> None:
    """As swapped requests are, whose salt comes back with them."""

    async def run(salt: str) -> list[int | None]:
        stored = sum(counted(swapping, "stored_bytes").values())
        prompt = [8, *prompts[3]]
        async with swapping.router() as router:
            found = [await complete(router, prompt, 4, cache_salt=salt)]
            while sum(counted(swapping, "stored_bytes").values()) == stored:
                await asyncio.sleep(0.01)
            found.append(await complete(router, prompt, 4, cache_salt=salt))
            completions = (complete(router, prompts[i % 4], NUM_TOKENS, cache_salt=salt) for i in range(16))
            assert all(got.error is None for got in await asyncio.gather(*completions))
        await swapping.until_free()
        return [got.num_cached_tokens for got in found]

    assert [asyncio.run(run(salt)) for salt in ("a", "b")] == [[0, 80]] * 2


@slow
def test_killing_the_tier_twice_costs_no_answer(swapping, prompts, expected) -> None:
    """While 16 clients ask for one prompt after the other."""
    found: list[tuple[int, Got]] = []

    async def ask_on(client: int, router: Any, over: asyncio.Event) -> None:
        for number in itertools.count(client):
            if over.is_set():
                return
            index = number % len(prompts)
            found.append((index, await complete(router, prompts[index], NUM_TOKENS)))

    async def run() -> None:
        over = asyncio.Event()
        async with swapping.router() as router, asyncio.TaskGroup() as group:
            for client in range(16):
                group.create_task(ask_on(client, router, over))
            for _ in range(2):
                await asyncio.sleep(1.0)
                await asyncio.to_thread(kill_tier, swapping)
            await asyncio.sleep(1.0)
            over.set()
        await swapping.until_free()
        for index, got in found:
            check([got], [expected[index]])

    lost = counted(swapping, "tier_losses")
    asyncio.run(run())
    assert all(n - lost[name] == 2 for name, n in counted(swapping, "tier_losses").items())
    assert len(swapping.ask("tiers")) == 1
    # The third one serves both.
    before = counted(swapping, "stores")
    check(asyncio.run(ask_all(swapping, prompts, 16)), expected)
    assert all(n > before[name] for name, n in counted(swapping, "stores").items())


@slow
def test_hand_overs_go_on_through_the_tier_that_takes_a_lost_ones_place(
    cluster: None, checkpoint, prompts, expected
) -> None:
    path = TransferSpec(path="host")
    with serving("relay", checkpoint("qwen3"), "p1 d1", transfer=path) as served:

        async def run() -> None:
            async with served.router() as router:
                check([await complete(router, p, NUM_TOKENS) for p in prompts], expected)
                await asyncio.to_thread(kill_tier, served)
                # This front knows the engines, and the tier that is gone.
                check([await complete(router, p, NUM_TOKENS) for p in prompts], expected)
            await served.until_free()

        asyncio.run(run())
        (tier,) = served.ask("tiers").values()
        assert tier["hits"] >= len(prompts)
