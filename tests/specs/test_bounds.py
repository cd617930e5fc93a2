"""What a spec may ask for at most, and that a hostile one is refused by a line, soon and in little memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayk.kv.groups import group_layers
from rayk.models import kv_specs
from rayk.specs import load_spec, plan_cells
from rayk.specs.experiment import RandomPrompts
from rayk.specs.host_tier import check_pools
from rayk.specs.marks import parse_yaml
from rayk.specs.prompts import random_prompts
from rayk.types.config import EngineConfig
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec

BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BOMB, "aliases written out"),
        (BOMB.replace("[", "{<<: [").replace("]", "]}"), "aliases written out|merges mappings"),
        ("a: &a [*a]", "nested deeper"),
        ("&a {<<: *a}", "nested deeper"),
        ("a: " + "[" * 100_000, "nested deeper"),
        ("".join(" " * i + "a:\n" for i in range(300)), "nested deeper"),
        ("? &a [*a]\n: 1", "key of several parts is not a text"),
        ("a: 2001-13-45", "not valid YAML: month"),
        ("a: " + "1" * 9999, "not valid YAML: Exceeds the limit"),
        ("a: !!bool foo", "e.yaml:1: not valid YAML: this is no bool"),
        ("a: !!int ''", "not valid YAML: this is no int"),
        ("a: !!float ''", "not valid YAML: this is no float"),
        ("a: !!timestamp x", "not valid YAML: this is no timestamp"),
        ("a: " + "9:" * 400 + "9.0", "not valid YAML: this is no float"),
        ("a: \x01", "not valid YAML: unacceptable character"),
        ("a: {<<: 1}", "`<<` merges mappings"),
        ("a: !!python/object:os.system x", "not valid YAML: could not determine"),
    ],
)
def test_yaml_is_bounded(text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        parse_yaml(text, "e.yaml")
    assert caught.value.where.startswith("e.yaml")


def test_merge_keys() -> None:
    text = "b: &b {x: 1, y: 2}\nc: &c {y: 3, z: 4}\nd: {<<: [*b, *c], x: 5}\ne:\n  <<: *c\n  y: 6\n"
    data, marks = parse_yaml(text, "e.yaml")
    assert data["d"] == {"x": 5, "y": 2, "z": 4}
    assert data["e"] == {"y": 6, "z": 4}
    assert marks.where(("e", "y")) == "e.yaml:6"
    assert marks.where(("e", "z")) == "e.yaml:2"
    assert marks.where(("d", "y")) == "e.yaml:1"


def test_what_replaces_a_merged_key_has_its_own_lines() -> None:
    text = "a: &a\n  x: [1,\n   2]\n  y: {p: 1}\nb:\n  <<: *a\n  x:\n   - 3\n   - 4\n  y:\n   q: 1\n"
    data, marks = parse_yaml(text, "e.yaml")
    assert data["b"] == {"x": [3, 4], "y": {"q": 1}}
    assert marks.where(("b", "x", 0)) == "e.yaml:8"
    assert marks.where(("b", "x", 1)) == "e.yaml:9"
    assert marks.where(("b", "y", "p")) == "e.yaml:10"


BIG = 10**20


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompts": {"random": {"count": BIG}}}, "prompts.random.count must be less than or equal to"),
        ({"prompts": {"random": {"input_tokens": [BIG]}}}, "input_tokens.0 must be less than"),
        ({"prompts": {"random": {"count": 10**6, "input_tokens": [999]}}}, "999,000,000 tokens in all"),
        ({"prompts": {"random": {"num_prefixes": 10**5, "prefix_tokens": 10**5}}}, "tokens in all"),
        ({"engine": {"num_blocks": 10**12}}, "engine.num_blocks must be less than"),
        ({"prefill": {"tp": 10**9}}, "prefill.tp must be less than"),
        ({"decode": {"num_engines": 10**9}}, "decode.num_engines must be less than"),
        ({"sampling": {"max_tokens": BIG}}, "sampling.max_tokens must be less than"),
        ({"arrival": {"rate": 1e-300}}, "arrival.rate must be greater than or equal to 0.000001"),
        ({"arrival": {"rate": 1e300}}, "arrival.rate must be less than"),
        ({"deadlines": {"cell_s": float("inf")}}, "deadlines.cell_s must be"),
        ({"repeat": 10**9}, "repeat must be less than"),
        ({"offload": {"host_gib": 1e300}}, "offload.host_gib must be less than"),
        ({"matrix": {"sampling.max_tokens": [*range(1, 3001)], "prefill.block_size": [*range(3000)]}},
         "the matrix has 9,000,000 cells, and at most 10,000"),
        ({"exclude": [{"mode": "x"}] * 2000}, "exclude must have at most 1000"),
        ({"name": "x" * 9999}, "name must have at most 100 characters"),
    ],
)  # fmt: skip
def test_amounts_are_bounded(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        load_spec(spec(**changes))
    assert len(str(caught.value)) < 8000


def test_cells_alike_are_grouped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs most of a plan is done for engines that differ in it, not for cells."""
    calls: list[object] = []
    monkeypatch.setattr(kv_specs, "group_layers", lambda *a, **k: calls.append(a) or group_layers(*a, **k))
    axes = {"sampling.max_tokens": [*range(1, 51)], "prefill.tp": [1, 2], "decode.tp": [1, 2]}
    loaded = load_spec(spec(matrix=axes | {"prefill.block_size": [8, 16, 24]}))
    # A model that no other test has.
    assert len(plan_cells(loaded, decoder(vocab_size=499), device="cpu")) == 600
    assert len(calls) == 3


def test_requests_of_all_cells_are_bounded() -> None:
    loaded = load_spec(spec(repeat=1000, matrix={"sampling.max_tokens": [*range(1, 5001)]}))
    with pytest.raises(SpecError, match="requests in all cells and repeats, and at most 10,000,000"):
        plan_cells(loaded, decoder(max_positions=9999), device="cpu")


def test_pools_are_held_against_the_memory_of_the_machine() -> None:
    small = EngineConfig(model="m", num_blocks=2, tp=2)
    large = EngineConfig(model="m", num_blocks=1 << 22)
    model = decoder(windows=(None,) * 64, head_size=4096)
    with pytest.raises(SpecError, match=r"KV pools of [\d,.]+ GiB on a machine of [\d.]+ GiB") as caught:
        check_pools([small, large], model, "e.yaml:3")
    assert caught.value.where == "e.yaml:3"
    check_pools([small, replace(large, device="cuda")], model, "e.yaml:3")


def test_a_vocabulary_is_not_listed_to_draw_from() -> None:
    """Ids are those that a list of the allowed ones gives; of a vocabulary of any size."""
    spec = RandomPrompts(count=3, input_tokens=[7, 50], prefix_tokens=4, num_prefixes=2, seed=5)
    small = random_prompts(spec, 11, [0, 3, 4, 10, 11, 99])
    assert {i for prompt in small for i in prompt} == {1, 2, 5, 6, 7, 8, 9}
    assert random_prompts(spec, 10**12, [5])[0] != small[0]
