"""What a front tells of the engines behind it, and how their roles are changed from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest

from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.limits import HttpSettings
from rayk.serve.text import Text
from rayk.types.errors import (
    DeadlineExceeded,
    EngineDied,
    HandshakeMismatch,
    LayoutVetoed,
    RoleConflict,
    UnknownEngine,
    Unsupported,
)
from tests.completer import ScriptedCompleter, ScriptedEngines, serve, tokens_then_end
from tests.serve.test_guard import CARD, KEY, ask, assert_error

ROLES = {"prefill0": "prefill", "decode0": "decode", "decode1": "decode"}


@contextmanager
def running(engines: ScriptedEngines | None, **settings: Any) -> Iterator[str]:
    completer = ScriptedCompleter(CARD, tokens_then_end([70, 71]))
    text = Text(build_tokenizer(CARD.vocab_size, adds_bos=False))
    with serve(make_app(completer, HttpSettings(**settings), text=text, engines=engines)) as url:
        yield url


def turn(url: str, name: str, role: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
    return ask(url, "POST", f"/engines/{name}/role", {"role": role}, **headers)


def test_engines_are_told_in_order_with_all_that_is_known_of_them() -> None:
    engines = ScriptedEngines(**ROLES)
    with running(engines) as url:
        status, body, _ = ask(url, "GET", "/engines")
    assert status == 200
    assert body == {
        "object": "list",
        "data": [{"object": "engine", **asdict(state)} for state in engines.states.values()],
    }
    assert [e["num_free_blocks"] for e in body["data"]] == [9, None, None]


def test_a_role_is_changed_and_told() -> None:
    engines = ScriptedEngines(**ROLES)
    with running(engines) as url:
        for _ in range(2):  # the second time there is nothing to do
            status, body, _ = turn(url, "decode1", "prefill")
            assert (status, body["object"], body["name"], body["role"]) == (
                200,
                "engine",
                "decode1",
                "prefill",
            )
        assert turn(url, "prefill0", "decode")[0] == 200
        told = {e["name"]: e["role"] for e in ask(url, "GET", "/engines")[1]["data"]}
    assert told == {"prefill0": "decode", "decode0": "decode", "decode1": "prefill"}


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    engines = ScriptedEngines(**ROLES)
    with running(engines) as url:
        assert "only prefill engine" in assert_error(turn(url, "prefill0", "decode"), 409, "role")
        for name in ("decode7", "a%20b", "x" * 5000, "%ff"):
            assert "no engine" in assert_error(turn(url, name, "prefill"), 404, "name")
        for role in ("aggregated", "", None, 3, ["prefill"], "PREFILL"):
            assert_error(turn(url, "decode1", role), 400, "role")
        for body, param in (({}, "role"), ({"role": "prefill", "name": "decode0"}, "name"), ([], None)):
            assert_error(ask(url, "POST", "/engines/decode1/role", body), 400, param)
        assert_error(ask(url, "GET", "/engines/decode1/role"), 405)
    assert {name: state.role for name, state in engines.states.items()} == ROLES


def test_nobody_sees_or_changes_engines_without_the_key() -> None:
    engines = ScriptedEngines(**ROLES)
    with running(engines, api_key=KEY) as url:
        for headers in ({}, {"Authorization": f"Bearer {KEY}x"}):
            assert_error(ask(url, "GET", "/engines", None, **headers), 401)
            assert_error(turn(url, "decode1", "prefill", **headers), 401)
        assert engines.states["decode1"].role == "decode"
        assert turn(url, "decode1", "prefill", Authorization=f"Bearer {KEY}")[0] == 200


@pytest.mark.parametrize(
    ("error", "seen", "changed"),
    [
        (EngineDied("fleet", "it is not there"), 503, 503),
        (DeadlineExceeded("engines of the fleet", 5.0), 504, 504),
        (UnknownEngine("no engine 'decode1'"), 404, 404),
        (RoleConflict("not now"), 409, 409),
        (HandshakeMismatch((("kv_dtype", "a", "b"),)), 503, 409),
        (LayoutVetoed((("LHBNC", "specs", "why"),)), 503, 409),
        (Unsupported("fp8 to bf16"), 400, 409),
        (RuntimeError("a secret"), 500, 500),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Exception) else "",
)
def test_what_the_fleet_says_has_a_status(error: Exception, seen: int, changed: int) -> None:
    engines = ScriptedEngines(**ROLES)
    engines.error = error
    with running(engines) as url:
        for answer, status in (
            (ask(url, "GET", "/engines"), seen),
            (turn(url, "decode1", "prefill"), changed),
        ):
            assert answer[0] == status
            assert set(answer[1]["error"]) == {"message", "type", "param", "code"}
            assert "secret" not in answer[1]["error"]["message"]


def test_a_completer_without_engines_has_none_to_show() -> None:
    with running(None) as url:
        assert_error(ask(url, "GET", "/engines"), 404)
        assert_error(turn(url, "decode1", "prefill"), 404)
        assert not [path for path in ask(url, "GET", "/openapi.json")[1]["paths"] if "engines" in path]
