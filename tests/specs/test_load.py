"""Spec files: defaults, overrides, and every mistake named by its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rayk.specs import dump_spec, load_spec
from rayk.types.errors import SpecError
from tests.specs.models import spec

GOOD = """\
name: t
model: m
prompts:
  random: {count: 3, input_tokens: [5, 37]}
matrix:
  prefill.tp: [1, 2]
  decode.tp: 2
engine:
  num_blocks: 64
checks: [kv_bytes]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "e.yaml"
    path.write_text(text)
    return path


def test_reads_a_file_and_fills_in_defaults(tmp_path: Path) -> None:
    loaded = load_spec(write(tmp_path, GOOD)).spec
    assert loaded.matrix == [{"prefill.tp": [1, 2], "decode.tp": [2]}]
    assert loaded.engine.num_blocks == 64
    assert loaded.engine.max_batch_tokens == 512
    assert loaded.sampling.max_tokens == 24
    assert loaded.deadlines.request_s == 120
    assert loaded.checks == ["kv_bytes"]


def test_the_name_defaults_to_the_files(tmp_path: Path) -> None:
    assert load_spec(write(tmp_path, GOOD.replace("name: t\n", ""))).spec.name == "e"


def test_results_go_to_a_folder_of_that_name_and_the_time(tmp_path: Path) -> None:
    folder = load_spec(write(tmp_path, GOOD)).default_folder()
    assert re.fullmatch(r"runs/t-\d{8}-\d{6}", str(folder))


@pytest.mark.parametrize(
    ("old", "new", "line", "problem", "mend"),
    [
        ("checks:", "cheks:", 10, "unknown key 'cheks'", "'checks'"),
        ("num_blocks: 64", "num_block: 64", 9, "unknown key 'num_block' in 'engine'", "'num_blocks'"),
        ("count: 3", "cout: 3", 4, "unknown key 'cout' in 'prompts.random'", "'count'"),
        ("prefill.tp: [1, 2]", "prefil.tp: [1, 2]", 6, "unknown axis 'prefil.tp'", "'prefill.tp'"),
        ("decode.tp: 2", "tp: 2", 7, "unknown axis 'tp'", "'prefill.tp'"),
        ("decode.tp: 2", "decode: {tp: 2}", 7, "'decode' is a section", "decode.tp"),
        ("decode.tp: 2", "decode.tp: []", 7, "axis decode.tp is empty", ""),
        ("decode.tp: 2", "decode.tp:", 7, "axis decode.tp is empty", ""),
        ("decode.tp: 2", "decode.tp: [2,\n    zwei]", 8, "decode.tp must be a valid integer", ""),
        ("decode.tp: 2", "decode.tp: 0", 7, "must be greater than or equal to 1, got 0", ""),
        ("decode.tp: 2", "decode.layout: LBHN", 7, "got 'LBHN'", "'LBHNC'"),
        ("decode.tp: 2", "prefill.tp: 4", 7, "'prefill.tp' is given twice", ""),
        ("decode.tp: 2", "policy: fastest", 7, "policy must be one of 'round_robin'", ""),
        ("num_blocks: 64", "num_blocks: '64'", 9, "engine.num_blocks must be a valid integer", ""),
        ("num_blocks: 64", "num_blocks: true", 9, "engine.num_blocks must be a valid integer", ""),
        ("num_blocks: 64", "num_blocks: 64.5", 9, "engine.num_blocks must be a valid integer", ""),
        ("[kv_bytes]", "[kv_byte]", 10, "got 'kv_byte'", "'kv_bytes'"),
        ("[kv_bytes]", "[]", 10, "checks must have at least 1 item, got []", ""),
        ("decode.tp: 2", "repeat: [1, 2]", 7, "repeat cannot be an axis", "`repeat:`"),
        ("name: t", "decode.tp: 1", 1, "dotted key 'decode.tp' outside `matrix`", "`decode: {tp: ...}`"),
        ("name: t", "gpus_per_worker: 0", 1, "gpus_per_worker must be greater than 0", ""),
        ("count: 3", "count: 0", 4, "prompts.random.count", ""),
        ("random: {count: 3, input_tokens: [5, 37]}", "{}", 3, "exactly one of", ""),
        ("input_tokens: [5, 37]}", "input_tokens: [5, 37]", 5, "not valid YAML", ""),
        ("name: t", "name: t/../x", 1, "name", ""),
    ],
)
def test_mistakes_name_the_line_and_the_nearest_key(
    tmp_path: Path, old: str, new: str, line: int, problem: str, mend: str
) -> None:
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert caught.value.where == f"{path}:{line}"
    assert problem in caught.value.problem
    assert mend in caught.value.mend


@pytest.mark.parametrize("key", ["engine", "kv_dtype", "repeat", "matrix", "sampling.stop"])
def test_a_refused_value_is_shown_in_part(key: str) -> None:
    values = {"matrix": [["x" * 9000]], "sampling.stop": {str(i): i for i in range(2000)}}
    data: dict[str, Any] = {"model": "m", "prompts": {"random": {}}}
    section, _, leaf = key.partition(".")
    value = values.get(key, ["x" * 9000] if key == "repeat" else "x" * 9000)
    with pytest.raises(SpecError, match=rf"{key}.* got .*\[[\d,]+ characters\]") as caught:
        load_spec(data | {section: {leaf: value} if leaf else value})
    assert len(str(caught.value)) < 500


def test_mistakes_in_a_list_of_matrices_name_the_line(tmp_path: Path) -> None:
    matrices = "matrix:\n  - prefill.tp: 1\n  - prefill.tp: 2\n    decode.layuot: BHLNC\n"
    path = write(tmp_path, "model: m\nprompts: {random: {}}\n" + matrices)
    with pytest.raises(SpecError, match=r"e\.yaml:6: unknown axis 'decode\.layuot'") as caught:
        load_spec(path)
    assert "'decode.layout'" in caught.value.mend


def test_mistakes_in_exclude_and_faults_name_the_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"e\.yaml:11: unknown axis 'prefill\.pt'"):
        load_spec(write(tmp_path, GOOD + "exclude: [{prefill.pt: 2}]\n"))
    with pytest.raises(SpecError, match=r"e\.yaml:12: unknown key 'rnk'"):
        load_spec(write(tmp_path, GOOD + "faults:\n  - {kind: kill, rnk: 2}\n"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "empty"), ("- 1\n", "mapping"), ("a: [", "not valid YAML"), ("1.5: 2\n", "not a text")],
)
def test_files_that_are_no_mapping(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        load_spec(write(tmp_path, text))


def test_missing_file_and_missing_keys(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such spec file"):
        load_spec(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="prompts is missing"):
        load_spec({"model": "m"})


def test_set_replaces_an_axis_where_there_is_one(tmp_path: Path) -> None:
    loaded = load_spec(write(tmp_path, GOOD), ["prefill.tp=4", "engine.num_blocks=9", "mode=aggregated"]).spec
    assert loaded.matrix == [{"prefill.tp": [4], "decode.tp": [2]}]
    assert loaded.engine.num_blocks == 9
    assert loaded.mode == "aggregated"


def test_set_with_a_list_makes_an_axis_and_sets_lists() -> None:
    loaded = load_spec(
        spec(), ["decode.tp=[1, 2]", "checks=[tokens]", "prompts.random.input_tokens=[4]"]
    ).spec
    assert loaded.matrix == [{"decode.tp": [1, 2]}]
    assert loaded.checks == ["tokens"]
    assert loaded.prompts.random is not None
    assert loaded.prompts.random.input_tokens == [4]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engine.num_block=3", "unknown key 'engine.num_block'"),
        ("engine.num_blocks=x", "must be a valid integer"),
        ("engine.num_blocks", "KEY=VALUE"),
        ("matrix.decode.pt=1", "unknown axis 'decode.pt'"),
        ("decode.tp=[1", "not valid YAML"),
    ],
)
def test_bad_overrides_name_themselves(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(spec(), [text])
    assert caught.value.where == f"--set {text}"
    assert problem in caught.value.problem


def test_a_bad_override_of_a_files_axis_names_the_override(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(write(tmp_path, GOOD), ["prefill.tp=0"])
    assert caught.value.where == "--set prefill.tp=0"


def test_overrides_do_not_change_the_callers_mapping() -> None:
    data = spec(matrix={"prefill.tp": [1]})
    load_spec(data, ["prefill.tp=2"])
    assert data["matrix"] == {"prefill.tp": [1]}


def test_where_names_the_axis_before_the_base(tmp_path: Path) -> None:
    loaded = load_spec(write(tmp_path, GOOD), ["decode.layout=BHLNC"])
    assert loaded.where("decode.tp").endswith("e.yaml:7")
    assert loaded.where("engine.num_blocks").endswith("e.yaml:9")
    assert loaded.where("decode.layout") == "--set decode.layout=BHLNC"


def test_a_dumped_spec_loads_to_an_equal_one(tmp_path: Path) -> None:
    text = GOOD + "exclude: [{prefill.tp: 2}]\nfaults: [{kind: kill, point: decode}]\n"
    loaded = load_spec(write(tmp_path, text)).spec
    again = tmp_path / "again.yaml"
    again.write_text(dump_spec(loaded))
    assert load_spec(again).spec == loaded


def test_numbers_without_a_point_are_floats_too() -> None:
    assert load_spec(spec(), ["deadlines.cell_s=1e-3"]).spec.deadlines.cell_s == 1e-3
