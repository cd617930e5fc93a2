"""Parts whose processes never say their first word: each is ended at its deadline. No Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.serve import fleet_part, front_actor
from rayk.serve.fleet_part import FleetPart
from rayk.serve.front_actor import UvicornPart
from rayk.types.errors import DeadlineExceeded

LIMIT_S = 60.0


def never(*_: object) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


class Silent:
    """An actor whose process hangs."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=never, options=lambda **_: SimpleNamespace(remote=never))


class Deaf(Silent):
    """It fails to say whether it listens, and runs on."""

    def __getattr__(self, name: str) -> Any:
        async def fail() -> int:
            raise KeyError("no socket")

        return SimpleNamespace(remote=fail) if name == "listening" else super().__getattr__(name)


@pytest.mark.parametrize("kind", [Silent, Deaf])
def test_a_front_that_never_says_that_it_listens_is_ended(
    kind: type[Silent], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[object] = []
    monkeypatch.setattr(front_actor, "START_S", 0.05)
    monkeypatch.setattr(front_actor.ray, "kill", lambda actor, **_: killed.append(actor))

    async def run() -> None:
        model = SimpleNamespace(model_id="m")
        part = UvicornPart(SimpleNamespace(settings=SimpleNamespace(model=model)))  # type: ignore[arg-type]
        monkeypatch.setattr(part, "_make", kind)
        with pytest.raises(DeadlineExceeded, match="the start of the HTTP front"):
            await asyncio.wait_for(part.start(), LIMIT_S)
        assert killed == [part._actor]

    asyncio.run(run())


def test_a_fleet_that_never_says_that_it_started_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[object] = []
    fleet = Silent()
    monkeypatch.setattr(fleet_part, "READY_S", 0.05)
    monkeypatch.setattr(fleet_part.ray, "kill", lambda actor, **_: killed.append(actor))
    monkeypatch.setattr(fleet_part.launch, "start_fleet", lambda *_: fleet)

    async def run() -> None:
        with pytest.raises(DeadlineExceeded, match="the start of the fleet of engines"):
            await asyncio.wait_for(FleetPart("rayk/fleet/m", Any).start(), LIMIT_S)

    asyncio.run(run())
    assert killed == [fleet]
