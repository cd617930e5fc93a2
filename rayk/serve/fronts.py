"""What every front is made of: a router to the fleet, and the app over it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rayk.serve.limits import HttpSettings
from rayk.specs.serving import ServerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class FrontPlan:
    """Everything that a front's process is told."""

    fleet: str
    """The fleet's actor name."""
    settings: ServerSettings
    host: str
    port: int
    http: HttpSettings = HttpSettings()


@asynccontextmanager
async def open_app(plan: FrontPlan) -> AsyncIterator[Any]:
    """Make a front's ASGI app, with a router of its own on the running loop."""
    from rayk.actors.router import Router
    from rayk.serve.app import make_app

    router = Router(plan.fleet, plan.settings)
    try:
        yield make_app(router, plan.http, engines=router)
    finally:
        await router.close()
