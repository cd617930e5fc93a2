"""Clusters that were there: whether they ask for a token is found out and said, and a wrong one is refused
at once. Who listens here is gRPC's own server."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
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
                    assert joined == (address, token is not None)
                    assert os.environ[AUTH_MODE] == expected
                    assert os.environ[BEYOND_LOOPBACK] == "0", "it listens on loopback alone"
                assert os.environ[AUTH_MODE] == mode
                assert BEYOND_LOOPBACK not in os.environ


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "asks for a token; none is set"),
        ({TOKEN: "b" * 64}, "asks for a token; this is another"),
        ({TOKEN_FILE: "none/here"}, "asks for a token; RAY_AUTH_TOKEN_PATH .*none/here\n"),
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


@pytest.mark.parametrize(
    ("token", "is_told", "says"),
    [
        (None, True, "asks for no token: whoever reaches its ports can run commands"),
        (GOOD, True, "asks for a token$"),
        (GOOD, False, "^it is not known whether .* asks for a token$"),  # as under TLS
    ],
)
def test_who_gets_in_is_asked_before_joining_and_said(
    token: str | None, is_told: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayk.actors import launch, ray_private

    monkeypatch.setenv(TOKEN, GOOD)
    if not is_told:
        monkeypatch.setattr(ray_private, "is_protected", lambda _: None)
    monkeypatch.setattr(launch.ray, "init", lambda address, **_: {"gcs_address": address})
    with ExitStack() as stack:
        with gcs(token) as address:
            joined = stack.enter_context(launch.connect(address))
        assert re.search(says, joined.in_words())  # nobody answers any more


def test_an_llm_says_it_of_a_cluster_that_was_joined_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rayk.actors import launch
    from rayk.serve.llm import _Engines

    def enough() -> float:
        raise DeviceError("enough")

    caplog.set_level(logging.INFO, "rayk")
    monkeypatch.setattr(launch, "num_cluster_gpus", enough)
    monkeypatch.setattr(launch.ray, "is_initialized", lambda: True)
    plan: Any = SimpleNamespace(on_device=lambda device: None)
    for token, level, says in (
        (None, logging.WARNING, "asks for no token"),
        (GOOD, logging.INFO, "asks for a token"),
    ):
        with gcs(token) as address:
            where = SimpleNamespace(gcs_address=address)
            monkeypatch.setattr(launch.ray, "get_runtime_context", lambda where=where: where)
            with pytest.raises(DeviceError, match="enough"):
                _Engines(plan, None)
        assert [(r.levelno, says in r.getMessage()) for r in caplog.records] == [(level, True)]
        caplog.clear()
    assert launch.joined_before().is_protected is None  # it is gone


def test_no_proxy_is_shown_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with gcs(GOOD) as address:
        assert is_protected(address)
        assert is_protected(address, GOOD) is False
