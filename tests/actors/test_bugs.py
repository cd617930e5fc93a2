"""What becomes of errors that nobody raises on purpose: told as what they are, logged whole, never tried
again. No Ray."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from rayk.actors import fleet as fleet_module
from rayk.actors import fleet_link as link_module
from rayk.actors.attempts import Engines
from rayk.actors.bugs import lasting
from rayk.actors.coordinator import Coordinator
from rayk.actors.engines import EngineHandle, translate
from rayk.actors.fleet import Fleet
from rayk.actors.lines import LineService
from rayk.actors.members import Member
from rayk.actors.router import Router
from rayk.serve.fleet_part import FleetPart
from rayk.serve.supervisor import Supervisor
from rayk.specs.serving import EngineEntry, ServerSettings
from rayk.types.config import EngineConfig
from rayk.types.errors import EngineDied, InternalError, RaykError
from rayk.types.serving import ModelCard

LIMIT_S = 60.0
CARD = ModelCard(model_id="m", folder="m", vocab_size=500, max_positions=64)
ENTRY = EngineEntry(name="prefill0", role="aggregated", config=EngineConfig(model="m"))
SETTINGS = ServerSettings(model=CARD, engines=(ENTRY,))


def test_a_front_tells_of_a_fleets_bug_and_does_not_ask_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    async def place(front: str) -> None:
        asked.append(front)
        raise KeyError("no such seat")

    async def run() -> None:
        service = LineService(calls={"place": place})
        address = await service.open("127.0.0.1")
        line = SimpleNamespace(remote=lambda: asyncio.sleep(0, address))
        monkeypatch.setattr(link_module.ray, "get_actor", lambda *_, **__: SimpleNamespace(line=line))
        router = Router("fleet", SETTINGS)
        with pytest.raises(InternalError, match="KeyError: 'no such seat'") as caught:
            await router._link.call("place", "f", until=time.monotonic() + LIMIT_S)
        assert not router._may_try_again(caught.value, [], 0)
        assert router._may_try_again(EngineDied("prefill0", "killed"), [], 0)
        await router._link.close()
        await service.close()

    asyncio.run(run())
    assert asked == ["f"]
    assert "in place\n    raise KeyError" in caplog.text, "where it was raised"


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (KeyError("layer"), InternalError),
        (AssertionError(), InternalError),
        (OSError("no disk"), EngineDied),
        (json.JSONDecodeError("half a file", "{", 1), EngineDied),
    ],
)
def test_what_a_worker_raises_is_a_bug_unless_its_machine_may_be_to_blame(
    cause: Exception, kind: type[RaykError]
) -> None:
    found = translate(RayTaskError("form", "the remote traceback", cause), "prefill0", 1)
    assert type(found) is kind
    if isinstance(found, InternalError):
        assert found.where == "prefill0 rank 1"
        assert "the remote traceback" in found.trace


@pytest.mark.parametrize(
    "last", [KeyError("a place"), InternalError("prefill0", "KeyError: 'layer'")], ids=["here", "there"]
)
def test_an_engine_is_formed_again_until_a_bug_is_met_which_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, last: Exception
) -> None:
    """And the driver, which asks how the fleet is, starts no other one."""
    monkeypatch.setattr(fleet_module, "PAUSES_S", (0.0,))
    failures: list[Exception] = [EngineDied("prefill0", "killed"), EngineDied("prefill0", "killed"), last]
    tries = []

    async def replace(_member: Member) -> int:
        tries.append(len(failures))
        raise failures.pop(0)

    async def run() -> None:
        fleet = Fleet("rayk/fleet/m", SETTINGS)
        monkeypatch.setattr(fleet, "_replace_workers", replace)
        member = fleet._members["prefill0"]
        member.handle = EngineHandle("prefill0", "aggregated", 1, ENTRY.config, [])
        member.handle.declare_dead("killed")
        watch = lasting(fleet._look_after(member), "the watch", fleet._on_bug)
        await asyncio.wait({watch}, timeout=LIMIT_S)

        async def health() -> Any:
            try:
                return await fleet.health()
            except RaykError as error:
                raise RayTaskError("health", "", error).as_instanceof_cause() from None

        part = FleetPart("rayk/fleet/m", SETTINGS)
        part._actor = SimpleNamespace(health=SimpleNamespace(remote=health))
        monkeypatch.setattr(part, "start", lambda: asyncio.sleep(0))
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        supervisor = Supervisor((part,), asyncio.Event(), lambda _: None)
        with pytest.raises(InternalError, match="KeyError"):
            await asyncio.wait_for(supervisor.run(lambda: never, lambda: None), LIMIT_S)

    asyncio.run(run())
    assert tries == [3, 2, 1]


def test_a_watch_over_an_engine_that_breaks_down_is_missed() -> None:
    class Broken:
        """No worker: whoever asks it finds that out."""

    async def run() -> None:
        member = Member(ENTRY, "aggregated")
        member.handle = EngineHandle("prefill0", "aggregated", 1, ENTRY.config, [Broken()])
        with pytest.raises(AttributeError):
            await asyncio.wait_for(member.until_lost(LIMIT_S), LIMIT_S)

    asyncio.run(run())


def test_a_cell_waits_for_no_engine_whose_forming_met_a_bug() -> None:
    async def form_again(_lost: EngineHandle, *, was_serving: bool) -> EngineHandle:
        raise ZeroDivisionError(str(was_serving))

    async def run() -> None:
        restart = SimpleNamespace(kind="restart", engine_role="prefill")
        cell: Any = SimpleNamespace(
            faults=(restart,), failure_policy="fail", deadlines=SimpleNamespace(transfer_s=1.0)
        )
        engine = EngineHandle("prefill0", "aggregated", 1, ENTRY.config, [])
        engines = Engines(cell, [engine], form_again)
        async with engines.watched():
            engine.declare_dead("killed")
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                await asyncio.wait_for(engines.live("prefill", 0), LIMIT_S)

    asyncio.run(run())


def test_a_cell_that_meets_a_bug_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_cell: Any) -> Awaitable[Any]:
        raise TypeError("unlike")

    async def run() -> InternalError:
        coordinator = Coordinator("rayk/coordinator/x")
        monkeypatch.setattr(coordinator, "_form", broken)
        cell: Any = SimpleNamespace(
            deadlines=SimpleNamespace(cell_s=LIMIT_S),
            prefill=SimpleNamespace(model="m"),
            spec=SimpleNamespace(offload=SimpleNamespace(settings=lambda: None)),
        )
        outcome = await coordinator.run_cell(cell, [], 0, capture=False)
        [error] = outcome.errors
        assert isinstance(error, InternalError)
        return error

    error = asyncio.run(run())
    assert str(error) == "a bug in the coordinator: TypeError: unlike"
    assert "in broken" in error.trace
