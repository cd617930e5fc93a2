"""Drafts in specs and servers' options: what cells they make, what of them is refused, and vLLM's names."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.speculation import check_speculative
from rayk.models.families import read_config
from rayk.specs import dump_spec, load_spec, plan_cells
from rayk.specs.cells import expand_matrix
from rayk.specs.server_plan import ServerOptions, plan_server
from rayk.specs.speculative import KEYS, axis_value
from rayk.specs.speculative_checks import idle_drafts
from rayk.types.errors import SpecError, Unsupported
from rayk.types.speculative import METHODS, SpeculativeConfig
from tests.specs.models import decoder, spec

NGRAM = {"method": "ngram", "num_tokens": 4}


def plan(*overrides: str, **changes: Any) -> Any:
    loaded = load_spec(spec(**changes), overrides)
    return [cell for cell, _ in plan_cells(loaded, decoder(), device="cpu")]


def drafts(cell: Any) -> list[tuple[str, int] | None]:
    return [None if (d := e.speculative) is None else (d.method, d.num_tokens) for e in cell.engines]


def test_the_section_has_the_fields_of_an_engines_settings() -> None:
    assert {*KEYS} == {field.name for field in fields(SpeculativeConfig)}
    (cell,) = plan(speculative={"method": "ngram"})
    assert cell.prefill.speculative == cell.decode.speculative == SpeculativeConfig(method="ngram")
    assert (cell.unsupported, drafts(plan()[0])) == (None, [None, None])


def test_drafted_and_undrafted_are_cells_of_one_run() -> None:
    matrix = {"speculative.method": [None, "ngram"], "speculative.num_tokens": [2, 4]}
    found = plan(matrix=matrix, mode="aggregated")
    assert [drafts(cell) for cell in found] == [[None], [("ngram", 2)], [("ngram", 4)]], "undrafted once"
    assert [cell.cell_id for cell in found] == [
        "agg-tp1",
        "agg-tp1-speculative.method=ngram-speculative.num_tokens=2",
        "agg-tp1-speculative.method=ngram-speculative.num_tokens=4",
    ]
    assert [cell.axes["speculative.method"] for cell in found] == ["none", "ngram", "ngram"]
    assert [cell.axes["speculative.num_tokens"] for cell in found] == [None, 2, 4]
    by_number = plan(matrix={"speculative.num_tokens": [None, 2]}, speculative=NGRAM, mode="aggregated")
    assert [drafts(cell) for cell in by_number] == [[None], [("ngram", 2)]]
    assert plan(speculative=None)[0].axes == plan()[0].axes, (
        "nothing, and null, are as before there were drafts"
    )


def test_a_side_may_draft_otherwise_or_not_at_all() -> None:
    (cell,) = plan(speculative=NGRAM, prefill={"speculative": {"method": "none"}})
    assert drafts(cell) == [None, ("ngram", 4)]
    (cell,) = plan(decode={"speculative": {"method": "ngram"}})
    assert drafts(cell) == [None, ("ngram", 3)]
    (cell,) = plan(speculative=NGRAM, decode={"speculative": {"num_tokens": 2}})
    assert drafts(cell) == [("ngram", 4), ("ngram", 2)]
    both = plan(speculative=NGRAM, matrix={"decode.speculative.method": ["none", "ngram"]})
    assert [drafts(cell) for cell in both] == [[("ngram", 4), None], [("ngram", 4)] * 2]
    assert len({cell.cell_id for cell in both}) == 2


def test_a_side_with_another_method_takes_none_of_the_others_settings() -> None:
    given = {"method": "draft", "model": "m2", "num_tokens": 5, "tp": 2}
    loaded = load_spec(spec(speculative=given, prefill={"speculative": {"method": "ngram"}}))
    (cell,) = expand_matrix(loaded.spec, decoder(), device="cpu").cells
    assert cell.prefill.speculative == SpeculativeConfig(method="ngram", num_tokens=5)
    assert (cell.decode.speculative.model, cell.decode.speculative.tp) == ("m2", 2)
    assert axis_value(cell.spec, "speculative.model") == "m2"
    assert axis_value(cell.spec, "prefill.speculative.model") is None


def test_a_resolved_spec_is_read_back_and_means_the_same() -> None:
    loaded = load_spec(spec(speculative=NGRAM, decode={"speculative": {"num_tokens": 2}}))
    again = load_spec(json.loads(json.dumps(loaded.spec.model_dump(mode="json", exclude_none=True))))
    assert again.spec.speculative == loaded.spec.speculative
    assert "num_tokens: 4" in dump_spec(loaded.spec)


def test_rules_exclude_by_method() -> None:
    matrix = {"speculative.method": [None, "ngram"]}
    for rule, left in (({"speculative.method": None}, "ngram"), ({"speculative.method": "ngram"}, "none")):
        (cell,) = plan(matrix=matrix, exclude=[rule])
        assert cell.axes["speculative.method"] == left


def test_overrides_make_axes_and_sections() -> None:
    assert [drafts(c)[0] for c in plan("speculative.method=[null, ngram]", mode="aggregated")] == [
        None,
        ("ngram", 3),
    ]
    (cell,) = plan("speculative={method: ngram, num_tokens: 7}", mode="aggregated")
    assert drafts(cell) == [("ngram", 7)]
    (cell,) = plan("speculative.method=null", speculative=NGRAM, mode="aggregated")
    assert drafts(cell) == [None]


@pytest.mark.parametrize(
    ("changes", "problem", "mend"),
    [
        ({"speculative": {"method": "n-gram"}}, "speculative.method must be one of", "'ngram'"),
        ({"speculative": NGRAM | {"numtokens": 3}}, "unknown key 'numtokens'", "'num_tokens'"),
        ({"speculative": NGRAM | {"num_tokens": 33}}, "num_tokens must be less than or equal to 32", ""),
        ({"speculative": NGRAM | {"num_tokens": 0}}, "num_tokens must be greater than or equal to 1", ""),
        ({"speculative": NGRAM | {"model": "m2"}}, "method ngram have no such setting", "draft or eagle3"),
        (
            {"speculative": {"num_tokens": 4}},
            "speculative.num_tokens is given, and no engine drafts",
            "ngram",
        ),
        ({"decode": {"speculative": {"tp": 2}}}, "decode.speculative.tp is given", "draft"),
        ({"speculative": {"method": "draft"}}, "method: draft without a model", "a smaller model's folder"),
        ({"speculative": {"method": "eagle3"}}, "method: eagle3 without a model", "EAGLE-3"),
        (
            {"speculative": NGRAM | {"prompt_lookup_min": 5}},
            "prompt_lookup_min 5 is more than prompt_lookup_max 4",
            "prompt_lookup_min: at most 4",
        ),
        (
            {"speculative": NGRAM, "engine": {"kind": "vllm"}, "mode": "aggregated"},
            "speculative.method is a setting of rayk's own engines",
            "leave it out",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], problem: str, mend: str) -> None:
    with pytest.raises(SpecError, match=problem) as raised:
        plan(**changes)
    assert mend in raised.value.mend


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_that_is_not_there_is_refused(method: str) -> None:
    given = {"method": method} | ({"model": "m2"} if method in ("draft", "eagle3") else {})
    if method == "ngram":
        undrafted, drafted = plan(matrix={"speculative.method": [None, method]}, speculative=given)
        assert undrafted.unsupported is None
        assert drafted.unsupported is None
        return
    problem = "no multi-token prediction layers" if method == "mtp" else "speculative.model m2: "
    with pytest.raises(SpecError, match=problem) as raised:
        plan(matrix={"speculative.method": [None, method]}, speculative=given)
    assert raised.value.mend


def test_engines_that_compute_nothing_take_no_drafts() -> None:
    (paced,) = plan(speculative=NGRAM, engine={"compute": "paced", "costs": "c"}, mode="aggregated")
    assert "no logits to verify drafts by" in str(paced.unsupported)
    with pytest.raises(Unsupported) as raised:
        check_speculative(paced.prefill, decoder())
    assert str(paced.unsupported).endswith(raised.value.reason), "specs and engines say the same"


def test_models_with_states_take_drafts(checkpoint: Any) -> None:
    config = read_config(checkpoint("mamba2"))
    (drafted,) = expand_matrix(load_spec(spec(speculative=NGRAM)).spec, config, device="cpu").cells
    assert drafted.unsupported is None


def test_what_changes_nothing_is_said_once() -> None:
    sampling = {"max_tokens": 2}
    found = idle_drafts(
        plan(
            prefill={"speculative": {"method": "ngram", "accept": "rejection"}},
            sampling=sampling,
            matrix={"decode.tp": [1, 2]},
        )
    )
    assert [text.partition(":")[0].partition(",")[0] for text in found] == [
        "prefill.speculative",
        "speculative.accept",
        "speculative.method",
    ]
    assert idle_drafts(plan(speculative=NGRAM)) == idle_drafts(plan()) == []


# --- servers --------------------------------------------------------------------------------------


def served(model: Path, given: Any, **options: Any) -> list[SpeculativeConfig | None]:
    planned = plan_server(ServerOptions(model=str(model), speculative_config=given, **options), device="cpu")
    return [entry.config.speculative for entry in planned.settings.engines]


def test_vllms_option_is_read_by_its_names(checkpoint: Any) -> None:
    model = checkpoint("qwen3")
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    want = SpeculativeConfig(method="ngram", num_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1)
    assert served(model, json.dumps(given)) == served(model, given) == [want]
    assert served(model, given, num_prefill=1) == [want, want]
    own = ("decode.speculative.method=none",)
    assert served(model, given, num_prefill=1, overrides=own) == [want, None]
    alone = served(model, {"method": "ngram", "prompt_lookup_max": 2})
    assert [(d.prompt_lookup_min, d.prompt_lookup_max) for d in alone if d] == [(2, 2)], "as in vLLM"
    assert served(model, None) == [None]
    assert served(model, None, overrides=("speculative.method=ngram",)) == [SpeculativeConfig(method="ngram")]


@pytest.mark.parametrize(
    ("given", "problem", "mend"),
    [
        ("{", "not JSON", "num_speculative_tokens"),
        ("[1]", "not an object", "num_speculative_tokens"),
        ({"num_speculative_tokens": 3}, "no method is named", "ngram"),
        ({"method": "medusa"}, "no method 'medusa'", "draft_model, ngram, eagle3, mtp"),
        ({"method": "ngram", "num_tokens": 3}, "no key 'num_tokens'", "num_speculative_tokens"),
        ({"method": "ngram", "quantization": "fp8"}, "quantization is not taken", "leave it out"),
        ({"method": "ngram", "num_speculative_tokens": 99}, "less than or equal to 32", ""),
        ({"method": "ngram", "model": "m2"}, "no such setting", "leave it out"),
    ],
)
def test_what_is_wrong_in_vllms_option_is_named(checkpoint: Any, given: Any, problem: str, mend: str) -> None:
    with pytest.raises(SpecError, match=problem) as raised:
        served(checkpoint("qwen3"), given)
    assert mend in raised.value.mend


def test_a_server_with_a_drafter_that_is_not_there_is_refused(checkpoint: Any) -> None:
    model = checkpoint("qwen3")
    for given, problem in (
        ({"method": "draft_model", "model": "m2"}, "speculative.model m2: "),
        ({"method": "deepseek_mtp"}, "no multi-token prediction layers"),
    ):
        with pytest.raises(SpecError, match=problem):
            served(model, given)
    with pytest.raises(SpecError, match="speculative.method is given twice"):
        served(model, {"method": "ngram"}, overrides=("speculative.method=ngram",))
