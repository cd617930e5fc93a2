"""The engines behind a front: what they do, and which role each has. For whoever runs the server."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from rayk.serve.errors import ApiError, JsonResponse
from rayk.serve.responses import ROLE_PROBLEMS, STATE_PROBLEMS, EngineAnswer, EnginesAnswer
from rayk.types.errors import HandshakeMismatch, LayoutVetoed, UnknownEngine, Unsupported
from rayk.types.serving import EngineControl, EngineState

LONGEST_NAME = 200
"""Longer names that a client gave are cut where they are told back."""


class RoleRequest(BaseModel):
    """The role that an engine takes from now on."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["prefill", "decode"]


def add_engine_routes(app: FastAPI, control: EngineControl) -> None:
    """Let clients see the engines and change their roles."""

    @app.get("/engines", responses={200: {"model": EnginesAnswer}, **STATE_PROBLEMS})
    async def engines() -> Response:
        """Describe every engine: its role and TP size, its restarts, its load."""
        return JsonResponse({"object": "list", "data": [_as_json(e) for e in await control.engines()]})

    @app.post("/engines/{name}/role", responses={200: {"model": EngineAnswer}, **ROLE_PROBLEMS})
    async def set_role(name: str, body: RoleRequest) -> Response:
        """Have an engine prefill from now on, or decode; requests that are on it end there."""
        if len(name) > LONGEST_NAME:
            raise UnknownEngine(f"no engine {name[:LONGEST_NAME]!r}...")
        try:
            await control.set_role(name, body.role)
        except (HandshakeMismatch, LayoutVetoed, Unsupported) as error:
            # It and its partners would read the same bytes differently.
            raise ApiError(409, str(error), param="role", code="role_conflict") from error
        found = {e.name: e for e in await control.engines()}
        return JsonResponse(_as_json(found[name]))


def _as_json(engine: EngineState) -> dict[str, object]:
    return {"object": "engine", **asdict(engine)}
