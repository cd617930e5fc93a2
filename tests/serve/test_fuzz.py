"""Whatever clients send, the server answers as its own OpenAPI document says, and its engine lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rayk.serve.app import make_app
from rayk.serve.limits import HttpSettings
from tests.completer import EngineCompleter, ScriptedEngines, serve
from tests.markers import one_per
from tests.serve.conftest import Server

MODES = {"valid": GenerationMode.POSITIVE, "broken": GenerationMode.NEGATIVE}
OPERATIONS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/engines"),
    ("POST", "/engines/{name}/role"),
)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
QUICK, THOROUGH = 30, 1500
"""Examples of each test."""


@pytest.fixture(scope="module")
def fuzzed(server: Server) -> Iterator[str]:
    """A server whose sequences are short, so that every one of many answers comes soon."""
    engine = server.completer.engine
    completer = EngineCompleter(engine, replace(server.completer.model, max_positions=40))
    limits = HttpSettings(ignores_unknown=True, max_n=2, max_choices=4)
    engines = ScriptedEngines(prefill0="prefill", prefill1="prefill", decode0="decode")
    with serve(make_app(completer, limits, engines=engines)) as url:
        yield url
    completer.check_all_free()
    assert engine.error is None


def fuzz(url: str, method: str, path: str, mode: str, num_examples: int, *, is_fixed: bool) -> dict[int, int]:
    """Answers by status."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: dict[int, int] = {}

    @given(case=schema[path][method].as_strategy(generation_mode=MODES[mode]), named=st.booleans())
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=is_fixed,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def run(case: schemathesis.Case, named: bool) -> None:
        if isinstance(case.body, dict) and not named:
            case.body.pop("model", None)  # hardly any text is the model's name
        response = case.call(timeout=120)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400 and path.startswith(("/v1", "/engines")):
            assert set(response.json()) == {"error"}
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    run()
    return statuses


def test_the_document_names_every_operation(fuzzed: str) -> None:
    document = requests.get(f"{fuzzed}/openapi.json", timeout=60).json()
    found = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    assert found == set(OPERATIONS)
    assert "422" not in json.dumps(document)
    assert "HTTPValidationError" not in json.dumps(document)


@one_per()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("method", "path"), OPERATIONS[:2])
def test_generated_bodies_are_answered_as_the_document_says(
    fuzzed: str, method: str, path: str, mode: str
) -> None:
    statuses = fuzz(fuzzed, method, path, mode, QUICK, is_fixed=True)
    assert sum(statuses.values()) >= QUICK // 2
    assert statuses.keys() <= {200, 400, 404}
    if mode == "broken":
        assert statuses.get(400, 0) > 0


@pytest.mark.parametrize("mode", MODES)
def test_roles_are_changed_or_refused_as_the_document_says(fuzzed: str, mode: str) -> None:
    statuses = fuzz(fuzzed, *OPERATIONS[-1], mode, QUICK, is_fixed=True)
    assert statuses.keys() <= {200, 400, 404, 409}
    assert statuses.get(400 if mode == "broken" else 404, 0) > 0


@pytest.mark.parametrize(("method", "path"), OPERATIONS[2:-1])
def test_other_operations_are(fuzzed: str, method: str, path: str) -> None:
    assert fuzz(fuzzed, method, path, "valid", 10, is_fixed=True).keys() <= {200, 404}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_many_more_are(fuzzed: str, method: str, path: str, mode: str) -> None:
    if mode == "broken" and method == "GET":
        pytest.skip("nothing of it can be broken: a model's name may be any text")
    fuzz(fuzzed, method, path, mode, THOROUGH, is_fixed=False)


def fields() -> st.SearchStrategy[dict[str, Any]]:
    """Requests that mean something, with parameters at the ends of their ranges."""
    ids = st.lists(st.integers(0, 511), min_size=1, max_size=12)
    text = st.text(max_size=12)
    penalty = st.sampled_from([-2.0, -1e-9, 0, 2])
    return st.fixed_dictionaries(
        {
            "prompt": st.one_of(ids, text, st.lists(text, min_size=1, max_size=2), st.lists(ids, max_size=2)),
            "max_tokens": st.integers(0, 8),
        },
        optional={
            "n": st.integers(1, 2),
            "stream": st.booleans(),
            "temperature": st.sampled_from([0, 1e-3, 0.5, 1, 100.0]),
            "top_p": st.sampled_from([0, 1e-300, 1e-6, 0.5, 1]),
            "top_k": st.sampled_from([-1, 0, 1, 3, 2**40]),
            "min_p": st.sampled_from([0, 1e-300, 0.3, 1]),
            "seed": st.sampled_from([0, 1, -(2**63), 2**63 - 1]),
            "stop": st.one_of(text, st.lists(text, max_size=3)),
            "stop_token_ids": st.lists(st.sampled_from([0, 1, 500, 10**6, 2**70]), max_size=3),
            "presence_penalty": penalty,
            "frequency_penalty": penalty,
            "repetition_penalty": st.sampled_from([0.01, 1, 1.5, 100]),
            "logprobs": st.sampled_from([0, 1, 20]),
            "echo": st.booleans(),
            "ignore_eos": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "return_token_ids": st.booleans(),
            "priority": st.sampled_from([-(2**31), 0, 2**31 - 1]),
            "prompt_cache_key": text,
        },
    )


def ask_anything(url: str, num_examples: int, *, is_fixed: bool) -> dict[int, int]:
    """Answers by status."""
    statuses: dict[int, int] = {}

    @given(body=fields())
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=is_fixed,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def run(body: dict[str, Any]) -> None:
        answer = requests.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code in (200, 400), answer.text
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        if answer.status_code == 200 and body.get("stream"):
            assert answer.text.endswith("data: [DONE]\n\n"), answer.text

    run()
    return statuses


def test_parameters_at_the_ends_of_their_ranges_harm_nobody(fuzzed: str, server: Server) -> None:
    statuses = ask_anything(fuzzed, 60, is_fixed=True)
    assert statuses[200] > 5
    assert server.complete([5, 6], max_tokens=2).usage.completion_tokens == 2, "the engine lives"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_of_them(fuzzed: str) -> None:
    assert ask_anything(fuzzed, 3000, is_fixed=False)[200] > 100
