"""OpenAI's error bodies: every problem a client can meet, with its status, and nothing else ever."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rayk.serve.responses import ErrorBody
from rayk.types.errors import (
    DeadlineExceeded,
    InternalError,
    NotFiniteError,
    Overloaded,
    RaykError,
    RoleConflict,
    ServerEnded,
    UnknownEngine,
    Unsupported,
    UserError,
)

INVALID = "invalid_request_error"
SERVER = "server_error"
_SHAPES = {
    "prompt": "text, a list of texts, a list of token ids, or a list of lists of token ids",
    "stop": "text, or a list of texts",
    "content": 'text, or a list of {"type": "text", "text": ...}',
}
"""What fields that take several kinds of values may be."""


@dataclass
class ApiError(Exception):
    """An error as clients are told it."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    """The field that is wrong."""
    code: str | None = None
    retry_after_s: float | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> ErrorBody:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Tell when to try again, or how to log in."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def to_json(value: Any) -> bytes:
    """Write compact JSON in UTF-8. Halves of surrogate pairs, which no UTF-8 has, are escaped."""
    return _encode(value).encode("utf-8", "backslashreplace")


def error_response(error: ApiError, **headers: str) -> Response:
    return JsonResponse(error.body, error.status, headers={**error.headers, **headers})


def api_error(error: Exception) -> ApiError:
    """Translate the error that a request ended with. A bug's details stay here."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnknownEngine):
        return ApiError(404, str(error), param="name", code="engine_not_found")
    if isinstance(error, RoleConflict):
        return ApiError(409, str(error), param="role", code="role_conflict")
    if isinstance(error, UserError | Unsupported):
        return ApiError(400, str(error))
    if isinstance(error, Overloaded):
        return ApiError(
            429, str(error), "rate_limit_error", code="overloaded", retry_after_s=error.retry_after_s
        )
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), "timeout_error", code="deadline_exceeded")
    if isinstance(error, NotFiniteError):
        return ApiError(500, str(error), SERVER, code="not_finite")
    if isinstance(error, RaykError) and not isinstance(error, InternalError):
        code = "server_ended" if isinstance(error, ServerEnded) else "engine_failed"
        return ApiError(503, str(error), SERVER, code=code, retry_after_s=1)
    return ApiError(500, "the server failed", SERVER, code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Let every error of the app leave in OpenAI's form."""
    for kind in (ApiError, RaykError, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)


async def _on_error(_request: Request, error: Exception) -> Response:
    return error_response(api_error(error))


async def _on_invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid(error.errors()))


async def _on_http(_request: Request, error: Exception) -> Response:
    """Answer the framework's own errors: unknown paths, methods, bodies that cannot be parsed."""
    assert isinstance(error, HTTPException)
    response = error_response(ApiError(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


def invalid(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Tell the first of the problems that validation found."""
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    place = [step for step in first["loc"] if step != "body"]
    if not place:
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    param = str(place[0])
    field = next((p for p in reversed(place) if p in _SHAPES), None)
    message = first["msg"].removeprefix("Value error, ")
    if field is not None and first["type"] != "value_error":
        message = f"must be {_SHAPES[field]}"
    if first["type"] == "missing":
        message, where = "Missing required parameter", ".".join(map(str, place))
        return ApiError(400, f"{message}: {where}", param=param, code="missing_required_parameter")
    where = param if field in (None, param) else f"{param}: {field}"
    return ApiError(400, f"{where}: {message}", param=param, code="invalid_value")
