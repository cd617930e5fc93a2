"""Drawn tokens on a real cluster: the same at every TP and hand-over, and what the tables tell of them."""

from __future__ import annotations

import json

import jsonschema
import pandas as pd
import pytest
import torch

from rayk import Experiment
from rayk.actors.tokenizer import load_decoder
from tests.helpers import assert_matches
from tests.markers import nixl, ray, slow

pytestmark = [ray, nixl, pytest.mark.timeout(240), slow]

STOP = "e"


@pytest.fixture(scope="module")
def drawn_run(ray_address, checkpoint, tmp_path_factory):
    return Experiment(
        {
            "name": "drawn",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": 3, "input_tokens": [5, 37, 300], "seed": 0}},
            "sampling": {
                "max_tokens": 12,
                "temperature": 1.0,
                "top_p": 0.98,
                "stop": STOP,
                "logprobs": 1,
                "prompt_logprobs": 0,
            },
            "matrix": [
                {"mode": "aggregated", "prefill.tp": [1, 2]},
                {"prefill.tp": 1, "decode.tp": 2},
                {"prefill.tp": 2, "decode.tp": 1},
            ],
            "checks": ["kv_bytes"],
            "repeat": 2,
        }
    ).run(tmp_path_factory.mktemp("drawn") / "run", address=ray_address)


def test_a_spec_draws_the_same_tokens_in_every_cell(drawn_run):
    assert drawn_run.cells["verdict"].tolist() == ["PASS"] * 4
    rows = drawn_run.requests
    assert rows["error"].isna().all()
    for _, same in rows.groupby(["repeat", "prompt_index"]):
        assert len(same) == 4
        assert len({tuple(ids) for ids in same["output_token_ids"]}) == 1
        assert (same["seed"] == same["seed"].iloc[0]).all()
    assert rows["seed"].nunique() == 3 * 2, "every prompt and repeat draws for itself"
    first, second = (rows[rows["repeat"] == r]["output_token_ids"].map(tuple).tolist() for r in (0, 1))
    assert first != second


def test_rows_tell_why_requests_ended_and_how_likely_tokens_were(drawn_run, checkpoint):
    rows = drawn_run.requests
    decode = load_decoder(str(checkpoint("qwen3")))
    stopped = rows["finish_reason"] == "stop"
    assert 0 < stopped.sum() < len(rows)
    assert rows["stop_reason"].eq(STOP).tolist() == stopped.tolist()
    for row in rows.itertuples():
        output = list(map(int, row.output_token_ids))
        assert STOP not in decode(output[:-1])
        assert (STOP in decode(output)) == (row.finish_reason == "stop")
        assert pd.isna(row.prompt_logprobs[0]), "nothing comes before the first token"
        assert row.prompt_top_logprobs is None, "nothing beside the prompt's own tokens was asked for"
        best = [position[0] for position in row.output_top_logprobs]
        assert len(best) == len(output)
        for chosen, logprob, top in zip(output, row.output_logprobs, best, strict=True):
            assert top["logprob"] >= logprob
            assert (top["token_id"] == chosen) == (top["logprob"] == logprob)


@pytest.mark.parametrize("name", ["output_logprobs", "prompt_logprobs"])
def test_logprobs_are_the_references(drawn_run, checkpoint, reference, name):
    """Of all rows together: an output of a few tokens says too little of how far rounding goes."""
    by_dtype = {dtype: reference(checkpoint("qwen3"), dtype=dtype) for dtype in ("float64", "float32")}
    told, exact, eager = [], [], []
    for row in drawn_run.requests.itertuples():
        text = list(map(int, row.prompt_token_ids)), list(map(int, row.output_token_ids))
        told += list(getattr(row, name))[1 if name == "prompt_logprobs" else 0 :]
        exact += getattr(by_dtype["float64"].score(*text), name)
        eager += getattr(by_dtype["float32"].score(*text), name)
    assert len(told) == len(exact) > 100
    assert_matches(
        torch.tensor(told, dtype=torch.float32),
        torch.tensor(exact, dtype=torch.float64),
        torch.tensor(eager, dtype=torch.float32),
        what=name,
    )


def test_outputs_of_a_form_are_those_of_transformers_under_the_same_masks(
    ray_address, checkpoint, tmp_path_factory
):
    properties = {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 200}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
    run = Experiment(
        {
            "name": "forms",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": 3, "input_tokens": [5, 37], "seed": 0}},
            "sampling": {
                "max_tokens": 100,
                "structured_outputs": {
                    "json": schema | {"additionalProperties": False},
                    "disable_any_whitespace": True,
                },
            },
            "matrix": {"prefill.tp": 1, "decode.tp": 2},
            "checks": ["tokens", "kv_bytes", "logprobs"],
        }
    ).run(tmp_path_factory.mktemp("forms") / "run", address=ray_address)
    assert run.cells["verdict"].tolist() == ["PASS"]
    assert set(run.requests["finish_reason"]) == {"stop"}
    decode = load_decoder(str(checkpoint("qwen3")))
    for output in run.requests["output_token_ids"]:
        jsonschema.validate(json.loads(decode(list(map(int, output)))), schema)
