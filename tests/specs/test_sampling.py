"""How a spec says how tokens are chosen."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rayk.specs import load_spec, plan_cells
from rayk.specs.experiment import AXES, SamplingSpec
from rayk.types.admission import bad_sampling
from rayk.types.errors import CheckpointError, SpecError
from rayk.types.request import SamplingParams
from rayk.types.structured import StructuredOutputs
from tests.specs.models import decoder, spec

ALL = {
    "max_tokens": 3,
    "temperature": 0.5,
    "ignore_eos": False,
    "stop_token_ids": [7],
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": -3,
    "stop": ["\n", "a b"],
    "logprobs": 0,
    "prompt_logprobs": 20,
    "presence_penalty": -2.0,
    "frequency_penalty": 2,
    "repetition_penalty": 1.5,
    "structured_outputs": {"regex": "[a-f]+"},
}


def plan(**changes: Any) -> Any:
    return plan_cells(load_spec(spec(**changes)), decoder(), device="cpu")


def test_every_parameter_is_a_key_an_axis_and_reaches_the_engine() -> None:
    names = {f.name for f in fields(SamplingParams)}
    assert set(SamplingSpec.model_fields) == names == set(ALL)
    assert {f"sampling.{name}" for name in names} <= set(AXES)
    ((cell, _),) = plan(sampling=ALL, checks=["kv_bytes"])
    for name, value in ALL.items():
        wanted = tuple(value) if isinstance(value, list) else value
        if name == "structured_outputs":
            wanted = StructuredOutputs(**value)
        assert getattr(cell.sampling, name) == wanted
    for field in fields(SamplingParams):
        if field.name not in ("max_tokens", "ignore_eos"):  # a spec's own defaults
            assert getattr(plan()[0][0].sampling, field.name) == field.default


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", [""]),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("presence_penalty", 2.01),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_spec_and_engine_refuse_the_same_values(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"sampling.{name}"):
        load_spec(spec(sampling={name: value}))
    file = tmp_path / "bad.yaml"
    file.write_text(f"model: m\nprompts: {{file: f}}\nsampling:\n  {name}: {_yaml(value)}\n")
    with pytest.raises(SpecError, match=f"sampling.{name}") as caught:
        load_spec(file)
    assert caught.value.where == f"{file}:4"
    given = tuple(value) if isinstance(value, list) else value
    error = bad_sampling(SamplingParams(**{name: given}))
    assert error is not None
    assert error.problem.startswith(name)
    assert error.mend.startswith(f"{name}: ")


def _yaml(value: Any) -> str:
    return f".{value}" if str(value) in ("nan", "inf") else str(value).replace("'", '"')


def test_what_the_spec_takes_the_engine_takes() -> None:
    ((cell, _),) = plan(sampling=ALL, checks=["kv_bytes"])
    assert bad_sampling(cell.sampling) is None
    assert bad_sampling(SamplingParams(stop="ab")) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("stop", ["x"]),
    ],
)
def test_tokens_are_compared_with_plain_greedy_ones_only(name: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"compares greedy tokens: {name} must be"):
        plan(sampling={name: value})
    ((cell, _),) = plan(sampling={name: value}, checks=["kv_bytes"])
    assert cell.checks == ("kv_bytes",)


def test_one_stop_string_may_stand_for_a_list() -> None:
    ((cell, _),) = plan(sampling={"stop": "\n\n"}, checks=["kv_bytes"])
    assert cell.sampling.stop == ("\n\n",)


def test_cells_of_unlike_stop_strings_have_unlike_names() -> None:
    values = [["!"], ["?"], "a+b", ["a", "b"], [], "ok"]
    cells = [c for c, _ in plan(matrix={"sampling.stop": values}, checks=["kv_bytes"])]
    assert [c.sampling.stop for c in cells] == [("!",), ("?",), ("a+b",), ("a", "b"), (), ("ok",)]
    assert len({c.cell_id for c in cells}) == len(values)


def test_stop_strings_need_a_tokenizer() -> None:
    def no_tokenizer(model: str) -> Any:
        raise CheckpointError("no tokenizer here", where=model)

    loaded = load_spec(spec(sampling={"stop": ["x"]}, checks=["kv_bytes"]))
    with pytest.raises(SpecError, match="no tokenizer here"):
        plan_cells(loaded, decoder(), device="cpu", tokenizer_loader=no_tokenizer)
    plain = load_spec(spec(checks=["kv_bytes"]))
    assert plan_cells(plain, decoder(), device="cpu", tokenizer_loader=no_tokenizer)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_forms_are_written_as_clients_write_them_and_each_is_a_cell() -> None:
    forms = [{"json": SCHEMA}, {"json_object": True}, {"choice": ["a", "b"]}, {"grammar": 'start: "a"'}]
    cells = [c for c, _ in plan(matrix={"sampling.structured_outputs": [*forms, None]})]
    assert len({c.cell_id for c in cells}) == len(cells)
    found = [c.sampling.structured_outputs for c in cells]
    assert found[0] is not None
    assert json.loads(found[0].json or "") == SCHEMA
    wanted = [{"json_object": True}, {"choice": ("a", "b")}, {"grammar": 'start: "a"'}]
    assert found[1:] == [*(StructuredOutputs(**form) for form in wanted), None]


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"regx": "a"}, "'regx' is none of json"),
        ({"regex": 5}, "regex: 5 is no str"),
        ({"regex": "a", "choice": ["a"]}, "asks for regex and choice"),
        ({}, "asks for nothing"),
        ({"choice": [1]}, "every one is a text"),
        ({"regex": "("}, "unclosed group"),
        ({"json": "{"}, "no JSON"),
        ({"json": {"type": "strange"}}, "strange"),
    ],
)
def test_forms_that_no_output_can_have_are_refused(form: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match="sampling.structured_outputs") as caught:
        plan(sampling={"structured_outputs": form})
    assert problem in str(caught.value)


def test_forms_need_a_tokenizer_and_rayks_engines() -> None:
    def no_tokenizer(model: str) -> Any:
        raise CheckpointError("no tokenizer here", where=model)

    loaded = load_spec(spec(sampling={"structured_outputs": {"regex": "a+"}}))
    with pytest.raises(SpecError, match="no tokenizer here"):
        plan_cells(loaded, decoder(), device="cpu", tokenizer_loader=no_tokenizer)
    with pytest.raises(SpecError, match="vLLM's engines are asked for no form"):
        plan(sampling={"structured_outputs": {"regex": "a+"}}, engine={"kind": "vllm"})
