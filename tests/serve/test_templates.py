"""Chat templates are programs: what they take is bounded, and they say what transformers says."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve import children
from rayk.serve.app import make_app
from rayk.serve.request_parsing import BoundedThreads
from rayk.serve.text import Text
from rayk.types.errors import EngineDied, Overloaded, UserError
from rayk.types.serving import ModelCard
from tests.completer import ScriptedCompleter, serve, tokens_then_end
from tests.markers import thorough
from tests.pd import wait_until
from tests.serve.test_guard import ask, assert_error

LIMIT_S = 60.0
USER = [{"role": "user", "content": "how many 🦙?"}]
LISTED = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m | tojson }}{% endfor %}{{ extra }}"
DO = """{% if do == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% elif do == 'range' %}{{ range(10**12) | list }}
{% elif do == 'double' %}{% set n = namespace(t='ab') %}
{% for i in range(99) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}
{% elif do == 'long' %}{{ messages[0].role * 10**10 }}
{% elif do == 'refuse' %}{{ raise_exception('no') }}
{% elif do == 'divide' %}{{ 1 // (messages[0].role | length - 4) }}
{% elif do == 'escape' %}{{ ''.__class__.__mro__ }}
{% elif do == 'miss' %}{{ messages[7].role }}
{% endif %}{{ messages[0].content }}"""


def text_of(template: str) -> Text:
    tokenizer = build_tokenizer(300, adds_bos=True)
    tokenizer.chat_template = template
    return Text(tokenizer)


def peak_bytes(pid: int) -> int:
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def test_a_conversation_is_what_transformers_makes_of_it() -> None:
    text = text_of(LISTED)
    for arguments in ({}, {"extra": [1, {"ü": None}]}, {"bos_token": "mine"}):
        expected = text._tokenizer.apply_chat_template(USER, tokenize=False, **arguments)
        assert text.conversation(USER, **arguments) == expected


@pytest.fixture(scope="module")
def doing() -> Text:
    return text_of(DO)


@pytest.mark.parametrize(
    ("do", "told"),
    [
        ("range", "OverflowError"),
        ("double", "took more than"),
        ("long", "took more than"),
        ("refuse", "refuses the messages: TemplateError: no"),
        ("divide", "refuses the messages: ZeroDivisionError"),
        ("escape", "refuses the messages: SecurityError"),
        ("miss", "refuses the messages: UndefinedError"),
    ],
)
def test_what_cannot_be_is_refused(doing: Text, do: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match=told):
        doing.conversation(USER, do=do)
    assert len(caplog.records) == ("took" in told)
    assert doing.conversation(USER) == USER[0]["content"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{% for %}",
        pytest.param("{{ (10**10)**(10**10) }}", marks=pytest.mark.slow),
    ],
)
def test_compiling_is_bounded_too(template: str) -> None:
    """Jinja works constants out meanwhile."""
    text = text_of(template)
    with pytest.raises(UserError, match="the chat template"):
        text.conversation(USER)
    assert text.templates is not None
    assert peak_bytes(text.templates.start()) < 1 << 30


def test_what_is_no_json_is_refused(doing: Text) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for extra in (deep, object()):
        with pytest.raises(UserError, match="plain JSON"):
            doing.conversation(USER, extra=extra)


def test_over_http_a_greedy_chat_is_a_bad_request_and_others_go_on(doing: Text) -> None:
    card = ModelCard(model_id="tiny", folder="nowhere", vocab_size=300, max_positions=4096)
    with serve(make_app(ScriptedCompleter(card, tokens_then_end([70])), text=doing)) as url:

        def chat(**more: Any) -> Any:
            return ask(url, "POST", "/v1/chat/completions", {"messages": USER, **more})

        assert "processor time" in assert_error(chat(chat_template_kwargs={"do": "loop"}), 400)
        assert chat()[0] == 200


@thorough
def test_a_warm_process_that_died_is_started_again_and_ends_with_its_text() -> None:
    text = text_of(LISTED)
    expected = text.conversation(USER)
    assert text.templates is not None
    first = text.templates.start()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "Z" in Path(f"/proc/{first}/stat").read_text().rpartition(")")[2], what=lambda: "dead")
    assert text.conversation(USER) == expected
    second = text.templates.start()
    assert second != first
    del text
    gc.collect()
    assert not Path(f"/proc/{second}").exists()


def test_a_few_conversations_at_once_and_a_bounded_line() -> None:
    """Whoever has a place keeps it until its thread is done, also when its client goes."""
    inside, go_on = [], threading.Event()

    def chat() -> None:
        inside.append(1)
        assert go_on.wait(LIMIT_S)

    async def run() -> None:
        line = BoundedThreads("conversations wait")
        first = [asyncio.ensure_future(line.run(chat)) for _ in range(BoundedThreads.PLACES)]
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            while len(inside) < BoundedThreads.PLACES:
                await asyncio.sleep(0.001)
            first[0].cancel()
            for _ in range(BoundedThreads.WAITING):
                group.create_task(line.run(chat))
            while line._num_waiting < BoundedThreads.WAITING:
                await asyncio.sleep(0.001)
            assert first[0].cancelled()
            with pytest.raises(Overloaded):
                await line.run(chat)
            assert len(inside) == BoundedThreads.PLACES
            go_on.set()
        await asyncio.gather(*first[1:])
        assert len(inside) == BoundedThreads.PLACES + BoundedThreads.WAITING

    asyncio.run(run())


@thorough
def test_a_conversation_whose_process_is_killed_is_read_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not to blame; nor is it where each one ends."""
    text = text_of(LISTED)
    expected = text.conversation(USER)
    templates = text.templates
    assert templates is not None
    hand_over = children._Warm.hand_over
    to_be_killed = [1]

    def killed(warm: Any, line: socket.socket) -> None:
        if not to_be_killed:
            hand_over(warm, line)
            return
        warm.process.send_signal(signal.SIGSTOP)
        hand_over(warm, line)  # not, where it was killed already
        to_be_killed.pop()
        warm.process.kill()

    monkeypatch.setattr(children._Warm, "hand_over", killed)
    assert text.conversation(USER) == expected
    to_be_killed += [1, 1]
    with pytest.raises(EngineDied, match="the chat template's process"):
        text.conversation(USER)
    assert text.conversation(USER) == expected
