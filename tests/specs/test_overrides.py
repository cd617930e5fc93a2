"""`--set` and `exclude`: how values are read, what they replace, and the exclude rules that match nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayk.specs import load_spec
from rayk.specs.cells import expand_matrix
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec


def overridden(*overrides: str, **changes: Any) -> Any:
    return load_spec(spec(**changes), overrides).spec


@pytest.mark.parametrize(
    ("text", "matrix"),
    [
        ("matrix.prefill.tp=[1,2]", [{"prefill.tp": [1, 2]}]),
        ("matrix.prefill.tp=2", [{"prefill.tp": [2]}]),
        ("prefill.tp=[1, 2]", [{"prefill.tp": [1, 2]}]),
        ("matrix={prefill.tp: [1, 2], mode: aggregated}", [{"prefill.tp": [1, 2], "mode": ["aggregated"]}]),
        ("matrix=[{prefill.tp: 1}, {decode.tp: [2]}]", [{"prefill.tp": [1]}, {"decode.tp": [2]}]),
        ("matrix.sampling.stop_token_ids=[[1], [2, 3]]", [{"sampling.stop_token_ids": [[1], [2, 3]]}]),
    ],
)
def test_axes_are_made_and_replaced(text: str, matrix: list[dict[str, list[Any]]]) -> None:
    assert overridden(text).matrix == matrix


def test_an_axis_of_every_matrix_is_replaced() -> None:
    both = [{"prefill.tp": [1, 2]}, {"decode.tp": 4}]
    assert overridden("decode.tp=[1, 2]", matrix=both).matrix == [
        {"prefill.tp": [1, 2], "decode.tp": [1, 2]},
        {"decode.tp": [1, 2]},
    ]


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("engine.num_blocks=64", "engine.num_blocks", 64),
        ("engine.prefix_caching=true", "engine.prefix_caching", True),
        ("deadlines.cell_s=5", "deadlines.cell_s", 5.0),
        ("sampling.temperature=1e-1", "sampling.temperature", 0.1),
        ("prefill.kv_dtype=null", "prefill.kv_dtype", None),
        ("prompts.random.input_tokens=7", "prompts.random.input_tokens", [7]),
        ("checks=tokens", "checks", ["tokens"]),
        ("checks=[tokens, kv_values]", "checks", ["tokens", "kv_values"]),
        ("exclude={prefill.tp: 4}", "exclude", [{"prefill.tp": 4}]),
        ("exclude=[{prefill.tp: [2, 4]}]", "exclude", [{"prefill.tp": [2, 4]}]),
        ("name='5'", "name", "5"),
        ("repeat=3", "repeat", 3),
    ],
)
def test_values_are_read_as_yaml(text: str, key: str, value: Any) -> None:
    found: Any = overridden(text)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_a_section_is_replaced_as_a_whole() -> None:
    found = overridden("engine={max_seqs: 2}", engine={"num_blocks": 64})
    assert (found.engine.max_seqs, found.engine.num_blocks) == (2, 256)


def test_a_prompts_file_replaces_random_prompts() -> None:
    assert overridden("prompts.file=p.jsonl").prompts.random is None
    with pytest.raises(SpecError, match="exactly one of"):
        overridden("prompts.random.count=2", prompts={"file": "p.jsonl"})


def test_later_overrides_win() -> None:
    found = overridden("prefill.tp=[1, 2]", "prefill.tp=4", "engine.num_blocks=8", "engine.num_blocks=9")
    assert found.matrix == [{"prefill.tp": [4]}]
    assert found.engine.num_blocks == 9


@pytest.mark.parametrize(
    ("text", "problem", "mend"),
    [
        ("matrix.prefill.pt=[1]", "unknown axis 'prefill.pt'", "'prefill.tp'"),
        ("matrix.repeat=2", "repeat cannot be an axis", "`repeat:`"),
        ("matrix.prefill.tp=[]", "axis prefill.tp is empty", ""),
        ("matrix.prefill.tp=[1, 0]", "must be greater than", ""),
        ("exclude=[{prefil.tp: 4}]", "unknown axis 'prefil.tp'", "'prefill.tp'"),
        ("exclude=[{prefill.layout: LBHN}]", "got 'LBHN'", "'LBHNC'"),
        ("exclude=[{prefill.tp: '4'}]", "must be a valid integer, got '4'", ""),
        ("engine={max_seq: 2}", "unknown key 'max_seq' in 'engine'", "'max_seqs'"),
        ("prefill.tp.x=2", "unknown key 'prefill.tp.x'", "'prefill.tp'"),
        ("prefill.tp=", "got None", ""),
        ("engine.num_blocks='64'", "must be a valid integer, got '64'", ""),
        ("dtype=bfloat1", "got 'bfloat1'", "'bfloat16'"),
        ("repeat=0", "repeat must be greater than", ""),
        ("=3", "KEY=VALUE", ""),
    ],
)
def test_bad_overrides_name_themselves_and_the_nearest_key(text: str, problem: str, mend: str) -> None:
    with pytest.raises(SpecError) as caught:
        overridden(text)
    assert caught.value.where == f"--set {text}"
    assert problem in caught.value.problem
    assert mend in caught.value.mend


# --- exclude --------------------------------------------------------------------------------------

MATRIX = {
    "mode": ["aggregated", "disaggregated"],
    "prefill.tp": [1, 2],
    "decode.tp": [1, 2],
    "prefill.layout": ["BHLNC", "LBHNC"],
}


def brute(rules: list[dict[str, Any]]) -> tuple[set[tuple[Any, ...]], list[int]]:
    """Points left and rules without effect, by nested loops; decode.tp is None in aggregated cells."""
    left, hit = set(), set()
    for mode in MATRIX["mode"]:
        for prefill in MATRIX["prefill.tp"]:
            for decode in MATRIX["decode.tp"] if mode == "disaggregated" else [None]:
                for layout in MATRIX["prefill.layout"]:
                    values = dict(zip(MATRIX, (mode, prefill, decode, layout), strict=True))
                    hits = [
                        i
                        for i, rule in enumerate(rules)
                        if rule
                        and all(values[k] in (v if isinstance(v, list) else [v]) for k, v in rule.items())
                    ]
                    hit.update(hits)
                    if not hits:
                        left.add((mode, prefill, decode, layout))
    return left, [i for i in range(len(rules)) if i not in hit]


@pytest.mark.parametrize(
    "rules",
    [
        [{"prefill.tp": 2, "decode.tp": 2}],
        [{"prefill.tp": [1, 2], "decode.tp": [2]}, {"mode": "aggregated", "prefill.layout": "LBHNC"}],
        [{"mode": "aggregated", "decode.tp": 1}],
        [{"prefill.tp": 4}, {"prefill.layout": ["LBNHC", "BHLNC"]}, {}],
        [{"prefill.tp": []}],
    ],
)
def test_exclude_and_rules_without_effect_against_brute_force(rules: list[dict[str, Any]]) -> None:
    loaded = load_spec(spec(matrix=MATRIX, exclude=rules)).spec
    left, idle = brute(rules)
    expansion = expand_matrix(loaded, decoder(), device="cpu")
    assert {tuple(cell.axes[key] for key in MATRIX) for cell in expansion.cells} == left
    assert list(expansion.idle_rules) == idle


def test_a_rule_without_effect_is_a_warning_that_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("model: m\nprompts: {random: {}}\nexclude:\n  - prefill.tp: 1\n  - prefill.tp: 7\n")
    loaded = load_spec(path, ["matrix.prefill.tp=[1, 2]"])
    assert expand_matrix(loaded.spec, decoder()).idle_rules == (1,)
    assert loaded.marks.where(("exclude", 1)) == f"{path}:5"
