"""What a spec may ask for at most, and that a hostile one is refused by a line, soon and in little memory."""

from __future__ import annotations

import pytest

from rayk.specs.experiment import RandomPrompts
from rayk.specs.marks import parse_yaml
from rayk.specs.prompts import random_prompts
from rayk.types.errors import SpecError

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


def test_a_vocabulary_is_not_listed_to_draw_from() -> None:
    """Ids are those that a list of the allowed ones gives; of a vocabulary of any size."""
    spec = RandomPrompts(count=3, input_tokens=[7, 50], prefix_tokens=4, num_prefixes=2, seed=5)
    small = random_prompts(spec, 11, [0, 3, 4, 10, 11, 99])
    assert {i for prompt in small for i in prompt} == {1, 2, 5, 6, 7, 8, 9}
    assert random_prompts(spec, 10**12, [5])[0] != small[0]
