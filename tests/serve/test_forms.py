"""Schemas of clients may take for ever to compile: what they take is bounded, and others go on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.forms import Forms
from rayk.serve.text import Text
from rayk.types.errors import UserError
from rayk.types.serving import ModelCard
from rayk.types.structured import StructuredOutputs
from tests.completer import ScriptedCompleter, serve, tokens_then_end
from tests.markers import thorough
from tests.pd import wait_until
from tests.serve.test_guard import ask, assert_error

SLOW: dict[str, Any] = {"allOf": [{"type": "string", "pattern": f"(.*a){{{i}}}"} for i in range(1, 30)]}
"""Intersections of expressions, whose states multiply: minutes."""
FORMS = (
    (StructuredOutputs(json='{"enum": ["ü", 1]}', disable_any_whitespace=True), ""),
    (StructuredOutputs(choice=("a", "b")), ""),
    (StructuredOutputs(choice=("a", "")), "structured_outputs.choice: 2 texts"),
    (StructuredOutputs(regex="(a"), "structured_outputs.regex: .*unclosed group.*mend: .*Rust"),
    (StructuredOutputs(json=json.dumps(SLOW)), "structured_outputs.json: it took more than 2 s.*mend: fewer"),
    (StructuredOutputs(), "asks for nothing"),
)


def test_a_form_is_taken_or_refused_within_bounds() -> None:
    forms = Forms()
    for wanted, problem in FORMS:
        if problem:
            with pytest.raises(UserError) as caught:
                forms.check(wanted)
            assert caught.match("(?s)" + problem)
        else:
            forms.check(wanted)


@thorough
def test_what_is_known_takes_no_process_and_a_dead_one_is_started_again() -> None:
    forms, (known, _), (other, _) = Forms(), *FORMS[:2]
    forms.check(known)
    pid = forms._children.start()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2], what=lambda: "dead")
    forms.check(known)
    assert forms._children.start() == pid
    forms.check(other)
    assert forms._children.start() != pid


def test_a_front_leaves_no_process_and_no_descriptor(checkpoint: Callable[..., Path]) -> None:
    """Neither of chat templates, whose process starts with the front, nor of forms."""
    folder, this = checkpoint("qwen3"), psutil.Process()
    card = ModelCard(model_id="tiny", folder=str(folder), vocab_size=10_000, max_positions=4096)
    num_fds = []
    for _ in range(2):
        before = {child.pid for child in this.children()}
        with serve(make_app(ScriptedCompleter(card, tokens_then_end([70])))) as url:
            wanted = {"prompt": "x", "structured_outputs": {"regex": "a+"}}
            assert ask(url, "POST", "/v1/completions", wanted)[0] == 200
            (templates, forms) = [child for child in this.children() if child.pid not in before]
            assert [templates.cmdline()[2], forms.cmdline()[2]] == [
                "rayk.serve.templates",
                "rayk.serve.forms",
            ]
        # Processes of earlier tests may end meanwhile.
        assert {child.pid for child in this.children()} <= before
        num_fds.append(this.num_fds())
    assert num_fds[0] >= num_fds[1]


@thorough
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SLOW}}}, "response_format"),
        ({"structured_outputs": {"json": SLOW}}, "structured_outputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_over_http_a_greedy_form_is_a_bad_request_and_others_go_on(fields: Any, param: str) -> None:
    card = ModelCard(model_id="tiny", folder="nowhere", vocab_size=300, max_positions=4096)
    text = Text(build_tokenizer(300, adds_bos=True))
    with serve(make_app(ScriptedCompleter(card, tokens_then_end([70])), text=text)) as url:

        def complete(**more: Any) -> Any:
            return ask(url, "POST", "/v1/completions", {"prompt": "x", **more})

        for _ in range(2):
            assert "processor time" in assert_error(complete(**fields), 400, param=param)
        assert complete(structured_outputs={"regex": "a+"})[0] == 200
