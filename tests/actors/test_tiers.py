"""Host tiers as their owner sees them: who is told that one was lost, and what placement makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from ray.exceptions import RayActorError

from rayk.actors.engines import EngineHandle
from rayk.actors.tiers import HostTiers, _TierActor
from rayk.handover.tier_side import TierFacts
from rayk.sched.admission import AdmissionController, News
from rayk.sched.dispatcher import Dispatcher, DispatchRules
from rayk.sched.policies import get_policy
from rayk.sched.policy import PolicySettings
from rayk.sched.request_describer import RequestDescriber
from rayk.types.config import EngineConfig
from rayk.types.offload import OffloadSettings

SETTINGS = OffloadSettings(host_bytes=1 << 20)
POLICY = PolicySettings(block_tokens=4, index_blocks=0, host_cost=0.1, host_blocks=100)


class Method:
    """A method of an actor."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self.remote = call

    def options(self, **_: Any) -> Method:
        return self


async def silence(*_: Any) -> None:
    """What a live worker answers."""


def engine_of(name: str) -> EngineHandle:
    worker = SimpleNamespace(lose_tier=Method(silence), call=Method(silence))
    return EngineHandle(name, "aggregated", 1, EngineConfig(model="m"), [worker])


class Node:
    """A host tier with engines, which dies when it is told to."""

    def __init__(self, tiers: HostTiers, name: str, engines: list[EngineHandle]) -> None:
        self._is_over = asyncio.Event()
        handle = SimpleNamespace(until_over=Method(self._until_over))
        facts = TierFacts(epoch=0, unit_tokens=16, row_unit_tokens=256)
        self.tier = _TierActor(name, handle, facts, 1, "node", {e.name: e for e in engines})
        for engine in engines:
            engine.tier = handle
            assert tiers.told is not None
            tiers.told.attached(engine.name, name)
        self.watcher = asyncio.create_task(tiers._watch(self.tier))

    async def _until_over(self) -> None:
        await self._is_over.wait()
        raise RayActorError

    async def die(self) -> None:
        self._is_over.set()
        await self.watcher


def test_the_name_of_a_lost_tier_is_told_and_no_engine_has_it_any_more() -> None:
    async def play() -> None:
        told: list[str] = []
        policy = SimpleNamespace(lost=told.append)
        dispatcher = Dispatcher(policy, DispatchRules(hands_over=False))  # type: ignore[arg-type]
        tiers = HostTiers("t", SETTINGS, dispatcher)
        engines = [engine_of(f"e{i}") for i in range(3)]
        first, second = Node(tiers, "t/host0", engines[:2]), Node(tiers, "t/host1", engines[2:])
        for engine in engines:
            dispatcher.open(engine.name, "aggregated", 1, 0)
        await asyncio.sleep(0)
        assert told == []
        await first.die()
        assert told == ["t/host0"]
        assert [(e.tier is None, dispatcher.load(e.name).tier) for e in engines] == [
            (True, ""),
            (True, ""),
            (False, "t/host1"),
        ]
        assert len(tiers.losses) == 1
        second.watcher.cancel()

    asyncio.run(play())


def test_requests_are_not_placed_for_kv_of_a_lost_tier() -> None:
    """Two nodes: a prompt goes where its tier has it, and counts for nothing once that is lost."""

    async def play() -> None:
        dispatcher = Dispatcher(
            get_policy("prefix_aware", POLICY),
            DispatchRules(hands_over=False, max_waiting=4),
        )
        admission = AdmissionController(dispatcher, lambda _: None)
        tiers = HostTiers("t", SETTINGS, dispatcher)
        nodes = [Node(tiers, f"t/{name}", [engine_of(name)]) for name in ("e0", "e1")]
        describer = RequestDescriber("prefix_aware", POLICY, b"secret")

        async def place(name: str, prompt: list[int]) -> tuple[str | None, int]:
            placed = await admission.place(
                "front", describer.describe(name, prompt), priority=0, deadline_s=5, again=False
            )
            admission.tell("front", News(prefilled=(), ended=(name,)))
            return placed.prefill, placed.num_host_tokens

        admission.open("e0", "aggregated", 1)
        assert await place("a", [*range(40)]) == ("e0", 0)
        admission.open("e1", "aggregated", 1)
        assert [await place(f"b{i}", [*range(40), 7]) for i in range(3)] == [("e0", 40)] * 3
        await nodes[0].die()
        found = [await place(f"c{i}", [*range(40), 7]) for i in range(3)]
        assert found[0][1] == 0
        assert all(num == 0 for name, num in found if name == "e0")
        nodes[1].watcher.cancel()

    asyncio.run(play())
