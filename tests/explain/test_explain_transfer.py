"""What `rayk explain` says of the way KV travels: conversion, staging, pushes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from tests.conftest import CheckpointFactory

SMALL_RUNS = ("--prefill-tp", "2", "--prefill-layout", "BLNHC", "--decode-layout", "LBHNC")


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["explain", *(str(a) for a in arguments)])


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3")


def explain(model: Path, *arguments: str) -> dict[str, Any]:
    result = invoke("--model", model, "--format", "json", *arguments)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_a_conversion_is_told_with_what_travels(model: Path):
    plain = explain(model)
    assert plain["conversion"] is None
    found = explain(model, "--decode-kv-dtype", "fp8_e4m3")
    # float32 travels, of which fp8 keeps a quarter.
    assert found["conversion"] == {
        "producer_formats": ["float32"],
        "consumer_formats": ["fp8_e4m3"],
        "wire_bytes": plain["bytes"],
        "kept_bytes": plain["bytes"] // 4,
    }
    said = f"float32 -> fp8_e4m3; {plain['bytes']:,} bytes on the wire become {plain['bytes'] // 4:,}"
    for output in ("text", "html"):
        arguments = ("--decode-kv-dtype", "fp8_e4m3", "--format", output)
        told = " ".join(invoke("--model", model, *arguments).stdout.replace("&gt;", ">").split())
        assert said in told


def test_one_format_for_both_is_not_converted(model: Path):
    plain = explain(model)
    found = explain(model, "--kv-dtype", "fp8_e4m3")
    assert found["conversion"] is None
    assert found["bytes"] == plain["bytes"] // 4
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    scaled = explain(model, "--kv-dtype", "fp8_e4m3", "--kv-scales", "token_head")
    # Two float32 beside the head's k and v.
    assert scaled["bytes"] * 2 * config["head_dim"] == found["bytes"] * (2 * config["head_dim"] + 8)
    mixed = explain(model, "--kv-dtype", "fp8_e4m3", "--decode-kv-scales", "token_head")
    assert mixed["conversion"]["consumer_formats"] == ["fp8_e4m3_token_head"]


def test_reads_say_what_they_cost_and_what_would_be_chosen(model: Path):
    small = explain(model, *SMALL_RUNS)["reads"]
    assert all(r["staged_us"] < r["direct_us"] and r["way"] == "staged" for r in small)
    alike = explain(model, "--prefill-layout", "BHLNC", "--decode-layout", "BHLNC")["reads"]
    assert all(r["direct_us"] < r["staged_us"] and r["way"] == "direct" for r in alike)
    for staging, way in (("never", "direct"), ("always", "staged")):
        reads = explain(model, "--staging", staging, *SMALL_RUNS)["reads"]
        assert {r["way"] for r in reads} == {way}
        costs = [[(r["direct_us"], r["staged_us"]) for r in of] for of in (reads, small)]
        assert costs[0] == costs[1], "what it costs does not depend on what is asked for"


def test_reads_are_a_line_each_where_there_is_no_terminal(model: Path):
    told = invoke("--model", model, *SMALL_RUNS).stdout
    reads = explain(model, *SMALL_RUNS)["reads"]
    lines = told[told.index("\nreads\n") :].splitlines()[3 : 3 + len(reads)]
    assert [line.split()[:2] for line in lines] == [
        [str(read["consumer_rank"]), str(read["producer_rank"])] for read in reads
    ]


def test_pushes_say_how_many_layers_a_write_brings(model: Path):
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    found = explain(model, "--transfer-mode", "push", *SMALL_RUNS)
    layers = [p["layers"] for p in found["transfer"]["push_layers"]]
    starts = [p["from_layer_us"] for p in found["transfer"]["push_layers"]]
    assert layers[0] == config["num_hidden_layers"], "where nothing overlaps, one write is best"
    assert layers[-1] == 1, "where computing takes long, only the last layer's write is waited for"
    assert starts == sorted(set(starts))
    assert {(r["staged_us"], r["way"]) for r in found["reads"]} == {(None, "direct")}
    text = invoke("--model", model, "--transfer-mode", "push").stdout
    assert f"push, {layers[0]} layers per write" in text
    assert explain(model)["transfer"]["push_layers"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--byte", "1", "--find", "layer=0,block=1,head=0,token=0"), "--byte and --find"),
        (("--transfer-mode", "shove"), "'pull' or 'push'"),
        (("--staging", "perhaps"), "'auto', 'never' or 'always'"),
        (("--kv-dtype", "int3"), "'fp8_e4m3' or 'nvfp4'"),
        (("--kv-scales", "row"), "'tensor' or 'token_head'"),
        (("--transfer-mode", "push", "--staging", "always"), "only reads are staged"),
    ],
)
def test_bad_input_exits_2(model: Path, arguments: tuple[str, ...], message: str):
    result = invoke("--model", model, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_notes_say_what_becomes_of_weights_in_fp8(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [24, 40]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")

    def said(*arguments: str) -> str:
        (note,) = (n for n in explain(file, *arguments)["notes"] if "weights are stored" in n)
        return str(note)

    kept = ("--prefill-weights", "kept")
    assert "(fp8 is kept where a GPU multiplies it" in said()
    assert "(fp8 is kept, but for" in said(*kept, "--decode-weights", "kept")
    unlike = said(*kept, "--decode-weights", "dequantised")
    assert "(prefill: fp8 is kept, but for" in unlike
    assert "decode: fp8 too: engine.weights)" in unlike


def test_drafters_are_named_and_move_nothing(model: Path) -> None:
    plain = explain(model)
    found = explain(model, "--speculative", "method=ngram,num_tokens=4")
    (note,) = set(found["notes"]) - set(plain["notes"])
    assert note.startswith("both engines: up to 4 tokens are proposed at once")
    assert (found["reads"], found["sides"]) == (plain["reads"], plain["sides"])
    own = explain(model, "--decode-speculative", "method=ngram,prompt_lookup_max=3")
    (note,) = set(own["notes"]) - set(plain["notes"])
    assert note.startswith("decode: up to 3 tokens")
    assert "last 3 to 2 tokens" in note
    for wrong, code, told in (
        (("--speculative", "method=mtp"), 2, "no multi-token prediction layers"),
        (("--speculative", "method=n-gram"), 2, "did you mean 'ngram'?"),
        (("--engine", "vllm", "--decode-speculative", "method=ngram"), 2, "no place in the proof"),
    ):
        result = invoke("--model", model, *wrong)
        assert (result.exit_code, told in " ".join(result.output.split())) == (code, True), result.output
