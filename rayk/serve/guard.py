"""What must not come in: who has no key, bodies that are too large or too slow, and limits on the rest."""

from __future__ import annotations

import asyncio
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayk.serve.errors import ApiError, error_response
from rayk.serve.limits import HttpSettings

OPEN_PATHS = frozenset({"/health"})
"""Paths that answer without a key, and then with a status alone: load balancers have none."""


class Guard:
    """Lets requests with the key and a body of bounded size through, the body read (ASGI)."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            received = await self._read(scope, receive)
        except ApiError as error:
            # What is left of a body that was not read is no next request.
            await error_response(error, Connection="close")(scope, receive, send)
            return
        if received is not None:
            await self._app(scope, received, send)

    def _check_key(self, scope: Scope) -> None:
        if scope["path"] in OPEN_PATHS or has_key(self._settings, scope):
            return
        _, _, given = _header(scope, b"authorization").partition(b" ")
        problem = "incorrect API key" if given else "no API key: send `Authorization: Bearer KEY`"
        raise ApiError(401, problem, code="invalid_api_key")

    async def _read(self, scope: Scope, receive: Receive) -> Receive | None:
        """Read the whole body into a new `receive`; None where the client left. Raises ApiError."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return receive
        length = _header(scope, b"content-length")
        if length.isdigit():
            self._check_length(int(length))
        try:
            async with asyncio.timeout(self._settings.body_s):
                body = await self._read_all(receive)
        except TimeoutError:
            problem = f"the body was not here within {self._settings.body_s:g} s"
            raise ApiError(408, problem, "timeout_error") from None
        return None if body is None else _replay(body, receive)

    async def _read_all(self, receive: Receive) -> bytes | None:
        parts, length = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            self._check_length(length)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _check_length(self, length: int) -> None:
        limit = self._settings.max_body_bytes
        if length > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def has_key(settings: HttpSettings, scope: Scope) -> bool:
    """Tell whether a client has the key, or needs none. A key that is wrong in its first letter takes as long
    as one wrong in its last."""
    key = settings.api_key
    if key is None:
        return True
    scheme, _, given = _header(scope, b"authorization").partition(b" ")
    is_right = hmac.compare_digest(given.strip(), key.encode())
    return scheme.lower() == b"bearer" and is_right


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body in one message, then what the connection says."""
    is_read = False

    async def receive_again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
