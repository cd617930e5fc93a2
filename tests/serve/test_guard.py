"""What is turned away, how, and that nothing of it reached the engines."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.app import make_app
from rayk.serve.limits import HttpSettings
from rayk.serve.text import Text
from rayk.types.errors import (
    CheckpointError,
    DeadlineExceeded,
    EngineDied,
    KVMismatch,
    Overloaded,
    RaykError,
    ServerEnded,
    Unsupported,
    UserError,
)
from rayk.types.request import FinishReason
from rayk.types.serving import Delta, Health, ModelCard, ServerRequest
from tests.completer import ScriptedCompleter, serve, tokens_then_end

CARD = ModelCard(model_id="tiny", folder="nowhere", vocab_size=300, max_positions=64)
KEY = "sk-right"
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}


def scripted(script: Any = None) -> ScriptedCompleter:
    return ScriptedCompleter(CARD, script or tokens_then_end([70, 71]))


@contextmanager
def running(completer: ScriptedCompleter, **settings: Any) -> Iterator[str]:
    text = Text(build_tokenizer(CARD.vocab_size, adds_bos=False))
    with serve(make_app(completer, HttpSettings(**settings), text=text)) as url:
        yield url


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(
    url: str, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """(status, parsed body, headers). A body of bytes is sent as it is."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, raw, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    parsed = json.loads(data) if answer.headers.get_content_type() == "application/json" else data
    return answer.status, parsed, dict(answer.headers)


def complete(url: str, **fields: Any) -> tuple[int, Any, dict[str, str]]:
    return ask(url, "POST", "/v1/completions", {**PLAIN, **fields})


def assert_error(answer: tuple[int, Any, Any], status: int, param: str | None = None) -> str:
    """It is OpenAI's form and nothing more; the message."""
    found, body, _ = answer
    assert found == status, body
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param
    assert body["error"]["message"]
    return str(body["error"]["message"])


def test_the_key_is_asked_for_everywhere_but_of_health() -> None:
    completer = scripted()
    with running(completer, api_key=KEY) as url:
        for method, path in [
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/tiny"),
            ("GET", "/metrics"),
            ("GET", "/openapi.json"),
            ("GET", "/nowhere"),
        ]:
            body = PLAIN if method == "POST" else None
            for headers in (
                {},
                {"Authorization": "Bearer"},
                {"Authorization": f"Bearer {KEY}x"},
                {"Authorization": f"Bearer {KEY[:-1]}"},
                {"Authorization": f"Basic {KEY}"},
                {"Authorization": KEY},
            ):
                found = ask(url, method, path, body, **headers)
                assert_error(found, 401)
                assert found[2]["www-authenticate"] == "Bearer"
        assert completer.asked == []
        assert ask(url, "GET", "/health")[0] == 200
        with client_of(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(url, KEY) as client:
            assert [m.id for m in client.models.list()] == ["tiny"]
            assert client.completions.create(**PLAIN).choices[0].finish_reason == "stop"


@pytest.mark.parametrize("is_ready", [True, False])
def test_without_the_key_health_is_a_status_alone(is_ready: bool) -> None:
    completer = scripted()
    engines = ({"name": "decode0", "trouble": "node 10.0.0.7 is lost"},)
    completer.answer = Health(is_ready=is_ready, reason="10.0.0.7 is lost", engines=engines)
    with running(completer, api_key=KEY) as url:
        for wrong in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": f"Basic {KEY}"}):
            status, body, _ = ask(url, "GET", "/health", **wrong)
            assert status == (200 if is_ready else 503)
            assert body == {"status": "ready" if is_ready else "unavailable"}
        known = ask(url, "GET", "/health", Authorization=f"Bearer {KEY}")
        assert known[0] == status
        assert known[1] == {**body, "reason": "10.0.0.7 is lost", "engines": list(engines)}


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    seen: list[tuple[Any, Any]] = []
    right = hmac.compare_digest

    def compare(a: Any, b: Any) -> bool:
        seen.append((a, b))
        return right(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with running(scripted(), api_key=KEY) as url:
        ask(url, "GET", "/v1/models", Authorization="Bearer guess")
    assert seen == [(b"guess", KEY.encode())]


def test_a_body_that_is_too_large_is_not_read() -> None:
    completer = scripted()
    with running(completer, max_body_bytes=1000) as url:
        assert "1000 bytes" in assert_error(complete(url, user="x" * 1000), 413)
        # Told to be large: refused without a byte of it. Not told: refused where it becomes so.
        place = urlsplit(url)
        for head, body in (
            (b"Content-Length: 100000000", b""),
            (b"Transfer-Encoding: chunked", b"3e8\r\n" + b" " * 1000 + b"\r\n3e8\r\n" + b" " * 1000),
        ):
            with socket.create_connection((place.hostname, place.port), timeout=60) as peer:
                peer.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n" + body)
                assert b" 413 " in peer.recv(100)
        assert complete(url)[0] == 200
    assert len(completer.asked) == 1


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with running(scripted(), body_s=0.2) as url:
        place = urlsplit(url)
        with socket.create_connection((place.hostname, place.port), timeout=60) as peer:
            peer.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert b" 408 " in peer.recv(100)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": [5] * 21}, "prompt"),
        ({"prompt": [5] * 20, "max_tokens": 45}, "max_tokens"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": [[5]] * 3, "n": 3}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 4}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a" * 300]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [1, 2, 3, 4]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"temprature": 0}, "temprature"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    assert_error(complete(the_url(), **fields), 400, param)
    assert the_completer().asked == []


_SHARED: dict[str, Any] = {}


@pytest.fixture(autouse=True, scope="module")
def _shared() -> Iterator[None]:
    """One server for all that it refuses."""
    completer = scripted()
    limits = {"max_n": 4, "max_choices": 8, "max_stop": 3, "max_prompt_tokens": 20}
    with running(completer, **limits) as url:
        _SHARED.update(url=url, completer=completer)
        yield


def the_url() -> str:
    return str(_SHARED["url"])


def the_completer() -> ScriptedCompleter:
    found = _SHARED["completer"]
    assert isinstance(found, ScriptedCompleter)
    return found


def test_messages_name_both_numbers() -> None:
    message = assert_error(complete(the_url(), prompt=[5] * 20, max_tokens=50), 400, "max_tokens")
    assert "64 tokens" in message
    assert "70 tokens (20 in the prompt, 50 in the completion)" in message
    message = assert_error(complete(the_url(), prompt=[5] * 30), 400, "prompt")
    assert "30 tokens" in message
    assert "takes 20" in message


class Unused:
    """A tokenizer that renders chats, and counts how often it is asked for tokens."""

    def __init__(self) -> None:
        self._tokenizer = build_tokenizer(CARD.vocab_size, adds_bos=False)
        self.num_calls = 0

    def __call__(self, *given: Any, **arguments: Any) -> Any:
        self.num_calls += 1
        return self._tokenizer(*given, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_a_text_that_cannot_fit_is_not_tokenised() -> None:
    completer, tokenizer, long = scripted(), Unused(), "how many " * 170_000
    with serve(make_app(completer, text=Text(tokenizer))) as url:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": long}]}
        for found in (
            complete(url, prompt=long),
            complete(url, prompt=[long], echo=True, logprobs=1),
            ask(url, "POST", "/v1/chat/completions", chat),
        ):
            message = assert_error(found, 400, "prompt")
            assert found[1]["error"]["code"] == "context_length_exceeded"
            assert message.startswith("This model's maximum context length is 64 tokens. However, ")
        assert tokenizer.num_calls == 0
        assert_error(complete(url, prompt=[5] * CARD.max_positions), 400, "prompt")
        assert_error(complete(url, prompt=[5] * (CARD.max_positions - 1)), 400, "max_tokens")
        assert complete(url, prompt="how many")[0] == 200
        assert tokenizer.num_calls > 0
    settings = HttpSettings(max_prompt_tokens=1)
    with serve(make_app(scripted(), settings, text=Text(tokenizer := Unused()))) as url:
        found = complete(url, prompt="x" * (16 * 40))
        assert "takes 1" in assert_error(found, 400, "prompt")
        assert found[1]["error"]["code"] == "prompt_too_long"
        assert tokenizer.num_calls == 0
    assert len(completer.asked) == 1


def test_other_models_are_not_found() -> None:
    url = the_url()
    assert_error(complete(url, model="gpt-4"), 404, "model")
    assert_error(ask(url, "GET", "/v1/models/gpt-4"), 404, "model")
    with client_of(url) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(**{**PLAIN, "model": "gpt-4"})
        assert caught.value.code == "model_not_found"
        assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[]", b'"a"', b"\xff", b"[" * 100000, b'{"prompt": NaN}', b"1" * 5000]
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    found = ask(the_url(), "POST", "/v1/completions", body)
    assert found[0] == 400, found
    assert set(found[1]["error"]) == {"message", "type", "param", "code"}
    found = ask(
        the_url(), "POST", "/v1/completions", json.dumps(PLAIN).encode(), **{"Content-Type": "text/plain"}
    )
    assert_error(found, 400)


def test_unknown_paths_and_methods_are_openais_errors() -> None:
    url = the_url()
    assert_error(ask(url, "GET", "/v1/nothing"), 404)
    assert_error(ask(url, "GET", "/v1/completions"), 405)
    assert_error(ask(url, "DELETE", "/v1/models"), 405)


def test_unknown_fields_may_be_ignored() -> None:
    with running(scripted(), ignores_unknown=True) as url:
        assert complete(url, temprature=0)[0] == 200
        assert_error(complete(url, suffix="end"), 400, "suffix")


@pytest.mark.parametrize(
    ("error", "status", "raised"),
    [
        (UserError("no such thing"), 400, openai.BadRequestError),
        (Unsupported("the model cannot"), 400, openai.BadRequestError),
        (Overloaded("the queue is full", 2.4), 429, openai.RateLimitError),
        (EngineDied("decode0", "killed"), 503, openai.InternalServerError),
        (ServerEnded(), 503, openai.InternalServerError),
        (DeadlineExceeded("the request", 3.0), 504, openai.InternalServerError),
        (
            KVMismatch(
                request_id="r", layer=0, group=0, field="k", head=0, token=0, classification="bits differ"
            ),
            503,
            openai.InternalServerError,
        ),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_before_the_first_token_have_their_status(
    error: RaykError, status: int, raised: type[openai.APIStatusError], stream: bool
) -> None:
    async def fails(_request: ServerRequest) -> AsyncIterator[Delta]:
        raise error
        yield Delta()

    with running(scripted(fails)) as url:
        with client_of(url) as client, pytest.raises(raised) as caught:
            list(client.completions.create(**PLAIN, stream=stream))
        assert caught.value.status_code == status
        assert str(error).splitlines()[0] in caught.value.message
        answer = complete(url, stream=stream)
        assert_error(answer, status)
        retry = {k.lower(): v for k, v in answer[2].items()}.get("retry-after")
        assert (retry == "3") if status == 429 else (retry == ("1" if status == 503 else None))


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_behind_the_first_token_is_an_event_and_no_done(n: int) -> None:
    async def fails(_request: ServerRequest) -> AsyncIterator[Delta]:
        yield Delta(token_ids=(70,))
        raise EngineDied("decode0", "killed")

    completer = scripted(fails)
    with running(completer) as url:
        with client_of(url) as client:
            stream = client.completions.create(**PLAIN, stream=True, n=n)
            assert next(iter(stream)).choices[0].text
            with pytest.raises(openai.APIError, match="decode0"):
                list(stream)
        status, data, _ = complete(url, stream=True, n=n)
        assert status == 200
        assert b"[DONE]" not in data
        assert json.loads(data.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "engine_failed"
        assert_error(complete(url, n=n), 503)
        text = ask(url, "GET", "/metrics")[1].decode()
    counted = {
        status: f'rayk_front_requests_total{{path="/v1/completions",status="{status}"}} {number}' in text
        for status, number in {"200": "0.0", "503": "3.0", "504": "0.0"}.items()
    }
    assert all(counted.values()), "streams that broke off are errors, though they began with 200"
    assert len(completer.closed) == len(completer.asked) == 3 * n


def test_an_abort_or_a_stream_without_an_end_is_no_answer() -> None:
    async def aborted(_request: ServerRequest) -> AsyncIterator[Delta]:
        yield Delta(token_ids=(70,))
        yield Delta(finish_reason=FinishReason.ABORT)

    async def cut(_request: ServerRequest) -> AsyncIterator[Delta]:
        yield Delta(token_ids=(70,))

    for script in (aborted, cut):
        with running(scripted(script)) as url:
            assert_error(complete(url), 503)


@pytest.mark.parametrize("stream", [True, False])
def test_half_a_character_at_the_end_is_told(stream: bool) -> None:
    tokenizer = build_tokenizer(CARD.vocab_size, adds_bos=False)
    token_ids = tokenizer("a\U0001f999")["input_ids"][:-1]
    expected = tokenizer.decode(token_ids)
    assert expected.endswith("\ufffd")
    with running(scripted(tokens_then_end(token_ids))) as url, client_of(url) as client:
        answer: Any = client.completions.create(**PLAIN, stream=stream)
        chunks = list(answer) if stream else [answer]
    assert "".join(c.choices[0].text for c in chunks) == expected


def test_a_fault_of_ours_says_nothing_of_itself(capfd: pytest.CaptureFixture[str]) -> None:
    async def fails(_request: ServerRequest) -> AsyncIterator[Delta]:
        yield Delta(token_ids=(70,))
        raise ZeroDivisionError("secret")

    with running(scripted(fails)) as url:
        message = assert_error(complete(url), 500)
        assert "secret" not in message
        data = complete(url, stream=True)[1]
        assert b"secret" not in data
        assert b"internal_error" in data
    assert "secret" in capfd.readouterr().err, "whoever runs the server is told"


def test_health_and_metrics_say_how_it_is() -> None:
    completer = scripted()
    with running(completer) as url:
        completer.answer = Health(
            is_ready=False,
            reason="decode0 is forming",
            engines=({"name": "decode0", "role": "decode", "state": "forming"},),
        )
        status, body, _ = ask(url, "GET", "/health")
        assert (status, body["status"], body["reason"]) == (503, "unavailable", "decode0 is forming")
        assert body["engines"] == [{"name": "decode0", "role": "decode", "state": "forming"}]
        assert complete(url, n=2)[0] == 200
        assert complete(url, n=0)[0] == 400
        text = ask(url, "GET", "/metrics")[1].decode()
        rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        path = 'path="/v1/completions"'
        assert rows[f'rayk_front_requests_total{{{path},status="200"}}'] == "1.0"
        assert rows[f'rayk_front_requests_total{{{path},status="400"}}'] == "1.0"
        assert rows["rayk_front_prompt_tokens_total"] == "3.0"
        assert rows["rayk_front_output_tokens_total"] == "4.0"
        assert rows["rayk_front_ttft_seconds_count"] == "1.0"
        assert rows["rayk_front_running_requests"] == "0.0", "looking is no work"
        assert rows['rayk_front_engine_ready{engine="decode0",role="decode"}'] == "0.0"
        assert ask(url, "GET", f"/{'x' * 50}")[0] == 404
        assert "xxx" not in ask(url, "GET", "/metrics")[1].decode()


def test_a_model_without_a_tokenizer_serves_token_ids(tmp_path: Any) -> None:
    completer = ScriptedCompleter(replace(CARD, folder=str(tmp_path)), tokens_then_end([70, 71]))
    with serve(make_app(completer)) as url:
        status, body, _ = complete(url, return_token_ids=True, logprobs=1, echo=True)
        assert status == 200
        assert body["choices"][0]["token_ids"] == [70, 71]
        assert body["choices"][0]["text"] == ""
        assert "tokenizer" in assert_error(complete(url, prompt="text"), 400)
        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert "tokenizer" in assert_error(ask(url, "POST", "/v1/chat/completions", chat), 400)
    with pytest.raises(CheckpointError):
        Text.load(str(tmp_path))
