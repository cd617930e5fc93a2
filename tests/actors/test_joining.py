"""Clusters that were there: whether they ask for a token is found out and said, and a wrong one is refused
at once. Who listens here is gRPC's own server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rayk.actors.environment import AUTH_MODE, BEYOND_LOOPBACK, TOKEN, TOKEN_FILE, is_protected
from rayk.types.errors import DeviceError

GOOD = "a" * 64


class Gcs(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call, of who has the token."""

    def __init__(self, token: str | None) -> None:
        self.token = token

    def service(self, call: Any) -> Any:
        """The method of this name."""
        has_token = ("authorization", f"Bearer {self.token}") in call.invocation_metadata

        def answer(_: bytes, context: Any) -> bytes:
            if self.token is not None and not has_token:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def gcs(token: str | None) -> Iterator[str]:
    """Its HOST:PORT."""
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[Gcs(token)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait(60)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token in the environment or in the home folder."""
    for name in (AUTH_MODE, TOKEN, TOKEN_FILE, "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_mode_is_the_clusters_whatever_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayk.actors.ray_private import joining

    for mode in ("disabled", "token"):
        monkeypatch.setenv(AUTH_MODE, mode)
        monkeypatch.setenv(TOKEN, GOOD)
        for token, expected in ((None, "disabled"), (GOOD, "token")):
            with gcs(token) as address:
                assert is_protected(address) is (token is not None)
                with joining(address) as joined:
                    assert joined == address
                    assert os.environ[AUTH_MODE] == expected
                    assert os.environ[BEYOND_LOOPBACK] == "0", "it listens on loopback alone"
                assert os.environ[AUTH_MODE] == mode
                assert BEYOND_LOOPBACK not in os.environ


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "asks for a token; none is set"),
        ({TOKEN: "b" * 64}, "asks for a token; this is another"),
        ({TOKEN_FILE: "none/here"}, "asks for a token; RAY_AUTH_TOKEN_PATH .*none/here"),
    ],
)
def test_a_wrong_token_is_refused_before_ray_tries(
    environment: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayk.actors.ray_private import joining

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with gcs(GOOD) as address, pytest.raises(DeviceError, match=why), joining(address):
        raise AssertionError("it is joined")


def test_who_gets_in_is_said() -> None:
    from rayk.actors.launch import Joined

    with gcs(None) as address:
        found = Joined(address, is_own=False, pages="")
        assert found.is_open
        assert "asks for no token: whoever reaches its ports can run commands" in found.in_words()
    with gcs(GOOD) as address:
        found = Joined(address, is_own=False, pages="")
        assert not found.is_open
        assert found.in_words() == f"the Ray cluster at {address} asks for a token"
