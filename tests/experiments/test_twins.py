"""Which aggregated engines cells are compared with, and how long their runs are known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.experiments.twins import Twins, draft_twin_of, token_twin_of
from rayk.specs import load_spec, plan_cells
from tests.models.tiny import write_checkpoint
from tests.specs.models import decoder, spec

PROMPTS = [[1, 2, 3], [4, 5]]


def cell_of(**changes: Any) -> Any:
    ((cell, _),) = plan_cells(load_spec(spec(**changes)), decoder(), device="cpu")
    return cell


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of a spec whose engines have a drafter."""
    folder = tmp_path_factory.mktemp("drafter") / "model"
    saved = write_checkpoint(folder, "llama", vocab_size=decoder().vocab_size)
    return {"checks": ["tokens", "drafts"], "speculative": {"method": "draft", "model": str(saved.path)}}


def outcome() -> Any:
    """Of two requests; one failed."""
    rows = [SimpleNamespace(prompt_index=i, output_token_ids=[7, 8 + i], error=None) for i in range(2)]
    rows[1].error = "lost"
    return SimpleNamespace(requests=rows)


def test_tokens_of_quantised_cells_are_those_of_the_prefill_sides_engine() -> None:
    cell = cell_of(dtype="float32", kv_dtype="nvfp4", prefill={"tp": 2}, decode={"tp": 4, "layout": "LBNHC"})
    twin = token_twin_of(cell)
    assert twin is not None
    assert (twin.mode, twin.decode, twin.prefill) == ("aggregated", None, cell.prefill)
    assert (twin.num_workers, twin.repeat, twin.faults) == (2, 1, ())
    assert token_twin_of(twin) is None
    assert token_twin_of(cell_of(dtype="float32")) is None, "transformers says what those should be"
    converted = cell_of(dtype="float32", decode={"kv_dtype": "nvfp4"})
    assert token_twin_of(converted) is None, "no engine keeps both formats"
    assert token_twin_of(replace(cell, checks=("kv_bytes",))) is None


def test_proposals_are_those_of_the_decode_sides_engine(drafts: dict[str, Any]) -> None:
    cell = cell_of(**drafts, prefill={"tp": 1}, decode={"tp": 2})
    twin = draft_twin_of(cell)
    assert twin is not None
    assert (twin.prefill, twin.decode, twin.prefill.tp) == (cell.decode, None, 2)
    assert draft_twin_of(replace(cell, checks=("tokens",))) is None
    assert draft_twin_of(twin) is None
    assert draft_twin_of(cell_of(**drafts | {"speculative": {"method": "ngram"}})) is None


def test_they_are_run_once_and_kept_by_what_they_depend_on() -> None:
    twins = Twins()
    settings: dict[str, Any] = {"dtype": "float32", "kv_dtype": "nvfp4", "prefill": {"tp": 2}}
    cell = cell_of(**settings)
    (twin,) = twins.missing(cell, PROMPTS)
    assert twins.rows(twin, PROMPTS) == {}
    twins.keep(twin, PROMPTS, outcome())
    assert twins.missing(cell, PROMPTS) == []
    assert list(twins.rows(twin, PROMPTS)) == [0], "of a request that failed nothing is known"
    assert list(twins.rows(token_twin_of(cell_of(**settings, decode={"tp": 4})), PROMPTS)) == [0]
    for changed in ({"prefill": {"tp": 1}}, {"kv_dtype": "fp8_e4m3"}, {"sampling": {"max_tokens": 3}}):
        assert twins.missing(cell_of(**settings | changed), PROMPTS) != []
    assert twins.missing(cell, PROMPTS[:1]) != []
    twins.keep(cell, PROMPTS[:1], outcome())
    assert twins.missing(cell, PROMPTS[:1]) != [], "the cell itself is no twin"


def test_a_cell_may_have_two_and_they_may_be_one(drafts: dict[str, Any]) -> None:
    quantised = drafts | {"dtype": "float32", "kv_dtype": "nvfp4"}
    twins = Twins()
    unlike = cell_of(**quantised, prefill={"tp": 1}, decode={"tp": 2})
    assert [twin.cell_id for twin in twins.missing(unlike, PROMPTS)] == [
        f"{unlike.cell_id}~aggregated",
        f"{unlike.cell_id}~drafted",
    ]
    alike = cell_of(**quantised, prefill={"tp": 1}, decode={"tp": 1})
    (twin,) = twins.missing(alike, PROMPTS)
    twins.keep(twin, PROMPTS, outcome())
    assert list(twins.rows(token_twin_of(alike), PROMPTS)) == [0]
    assert list(twins.rows(draft_twin_of(alike), PROMPTS)) == [0]
