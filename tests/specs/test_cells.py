"""Expansion against cells written out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayk.specs import Cell, expand, load_spec
from rayk.specs.cells import STANDARD_AXES
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec

HETERO = Path(__file__).parents[2] / "jobs" / "hetero_tp.yaml"


def cells(**changes: Any) -> list[Cell]:
    return expand(load_spec(spec(**changes)).spec, decoder(), device="cpu")


def ids(**changes: Any) -> list[str]:
    return [c.cell_id for c in cells(**changes)]


def test_the_hetero_tp_job_is_the_issues_matrix() -> None:
    expected = {(p, d, "BHLNC", "BHLNC") for p in (1, 2, 4) for d in (1, 2, 4)}
    layouts = (("BLHNC", "LBHNC"), ("LBNHC", "BLNHC"), ("BHLNC", "LBNHC"), ("LBHNC", "BHLNC"))
    expected |= {(p, d, a, b) for p, d in ((1, 2), (2, 1)) for a, b in layouts}
    found = expand(load_spec(HETERO).spec, decoder(), device="cpu")
    pairs = [(c.prefill.tp, c.decode.tp, c.prefill.layout, c.decode.layout) for c in found if c.decode]
    assert len(pairs) == len(set(pairs)) == 17
    assert set(pairs) == expected
    assert [c.prefill.tp for c in found if c.mode == "aggregated"] == [1, 2, 4]
    assert len({c.cell_id for c in found}) == len(found) == 20
    assert not any(c.unsupported for c in found)


def test_the_cross_product_in_the_files_order() -> None:
    matrix = {"prefill.tp": [1, 2], "decode.tp": [4, 1]}
    assert ids(matrix=matrix) == ["p1-d4", "p1-d1", "p2-d4", "p2-d1"]


def test_no_matrix_is_one_cell_of_defaults() -> None:
    (cell,) = cells()
    assert cell.decode is not None
    assert (cell.mode, cell.prefill.tp, cell.decode.tp) == ("disaggregated", 1, 1)
    assert (cell.prefill.layout, cell.prefill.block_size, cell.prefill.kv_dtype) == ("auto", 16, "auto")
    assert (cell.num_prefill_engines, cell.num_decode_engines, cell.num_workers) == (1, 1, 2)
    assert set(STANDARD_AXES) == set(cell.axes)


def test_decode_and_transfer_axes_do_not_multiply_aggregated_cells() -> None:
    matrix = {
        "mode": ["aggregated", "disaggregated"],
        "prefill.tp": [1, 2],
        "decode.tp": [1, 2],
        "decode.layout": ["LBHNC", "BHLNC"],
        "transfer.staging": ["auto", "never"],
    }
    found = cells(matrix=matrix)
    aggregated = [c for c in found if c.mode == "aggregated"]
    assert [c.cell_id for c in aggregated] == ["agg-tp1", "agg-tp2"]
    assert len(found) == 2 + 2 * 2 * 2 * 2
    assert all(c.decode is None and c.num_decode_engines == 0 for c in aggregated)
    assert aggregated[0].axes["decode.tp"] is None
    assert aggregated[0].axes["transfer.mode"] is None


def test_what_a_transfer_mode_does_not_heed_does_not_multiply_its_cells() -> None:
    matrix = {
        "transfer.mode": ["pull", "push"],
        "transfer.staging": ["auto", "never", "always"],
        "transfer.staging_mib": [64, 8],
        "transfer.push_layers": ["auto", 1],
    }
    found = cells(matrix=matrix)
    by_mode = {
        mode: [c for c in found if c.axes["transfer.mode"] == mode] for mode in matrix["transfer.mode"]
    }
    assert len(by_mode["pull"]) == 3 * 2
    assert {c.spec.transfer.staging for c in by_mode["pull"]} == {"auto", "never", "always"}
    assert {c.axes["transfer.push_layers"] for c in by_mode["pull"]} == {None}
    assert [c.axes["transfer.push_layers"] for c in by_mode["push"]] == ["auto", 1]
    assert {(c.axes["transfer.staging"], c.axes["transfer.staging_mib"]) for c in by_mode["push"]} == {
        (None, None)
    }
    assert len({c.cell_id for c in found}) == len(found) == 8
    left = cells(matrix=matrix, exclude=[{"transfer.staging": ["never", "always"]}])
    assert [c.axes["transfer.mode"] for c in left] == ["pull", "pull", "push", "push"]


KILL = {"kind": "kill", "point": "post", "engine": 1}
LATE = {"kind": "delay", "point": "post", "delay_s": 1.0}


@pytest.mark.parametrize(
    ("excluded", "left"),
    [
        ([KILL], [[], [KILL, LATE]]),
        (KILL, [[], [KILL, LATE]]),
        ([KILL | {"seed": 0, "role": None}], [[], [KILL, LATE]]),
        ([], [[KILL], [KILL, LATE]]),
        ([KILL, LATE | {"delay_s": 1}], [[], [KILL]]),
        ([KILL | {"engine": 0}], [[], [KILL], [KILL, LATE]]),
        ([KILL | {"seed": 1}], [[], [KILL], [KILL, LATE]]),
    ],
)
def test_exclude_takes_faults_as_the_matrix_spells_them(excluded: Any, left: list[Any]) -> None:
    found = cells(
        matrix={"faults": [[], [KILL], [KILL, LATE]]},
        exclude=[{"faults": excluded}],
        prefill={"num_engines": 2},
    )
    told = [[f.model_dump(exclude_defaults=True) for f in c.faults] for c in found]
    assert told == left


def test_exclude_takes_points_lists_and_defaults() -> None:
    matrix = {"prefill.tp": [1, 2, 4], "decode.tp": [1, 2, 4]}
    left = ids(
        matrix=matrix, exclude=[{"prefill.tp": 2, "decode.tp": 2}, {"prefill.tp": 4, "decode.tp": [1, 4]}]
    )
    assert left == ["p1-d1", "p1-d2", "p1-d4", "p2-d1", "p2-d4", "p4-d2"]
    assert ids(matrix=matrix, exclude=[{"prefill.layout": "LBHNC"}])[0] == "p1-d1"
    # A key that is no axis has the value of the base.
    assert ids(matrix=matrix, exclude=[{"engine.comm": "auto", "prefill.tp": [2, 4]}])[-1] == "p1-d4"
    assert len(ids(matrix=matrix, exclude=[{"engine.comm": "gloo"}])) == 9
    with pytest.raises(SpecError, match="no cell is left"):
        cells(matrix=matrix, exclude=[{"mode": "disaggregated"}])


def test_a_list_of_matrices_is_united_without_duplicates() -> None:
    assert ids(matrix=[{"prefill.tp": [1, 2]}, {"prefill.tp": [2, 4]}]) == ["p1-d1", "p2-d1", "p4-d1"]


def test_any_dotted_key_may_be_an_axis() -> None:
    matrix = {
        "engine.attention_backend": ["cpu", "reference"],
        "decode.num_engines": [1, 2],
        "engine.max_batch_tokens": [7, 64],
        "prompts.random.seed": [0, 1],
        "sampling.max_tokens": [4],
        "gpus_per_worker": [0.5],
        "deadlines.cell_s": [10],
    }
    found = cells(matrix=matrix)
    assert len({c.cell_id for c in found}) == len(found) == 16
    last = found[-1]
    assert last.prefill.attention_backend == "reference"
    assert last.num_decode_engines == 2
    assert last.prefill.max_batch_tokens == 64
    assert last.sampling.max_tokens == 4
    assert last.gpus_per_worker == 0.5
    assert last.deadlines.cell_s == 10
    assert last.axes["engine.max_batch_tokens"] == 64


def test_sides_take_the_engines_settings_and_their_own() -> None:
    (cell,) = cells(engine={"num_blocks": 50}, decode={"num_blocks": 70, "max_seqs": 3})
    assert cell.decode is not None
    assert (cell.prefill.num_blocks, cell.decode.num_blocks) == (50, 70)
    assert (cell.prefill.max_seqs, cell.decode.max_seqs) == (16, 3)


def test_kv_dtype_sets_both_sides() -> None:
    (cell,) = cells(kv_dtype="nvfp4", decode={"kv_dtype": "fp8_e4m3"})
    assert cell.decode is not None
    assert (cell.prefill.kv_dtype, cell.decode.kv_dtype) == ("nvfp4", "fp8_e4m3")
    assert cell.axes["prefill.kv_dtype"] == "nvfp4"
    mixed = ids(matrix={"kv_dtype": ["auto", "nvfp4"], "prefill.kv_dtype": ["auto", "nvfp4"]})
    assert len(set(mixed)) == 4


def test_dtype_auto_is_the_checkpoints_and_decides_the_default_checks() -> None:
    (cell,) = cells(dtype="auto")
    assert cell.prefill.dtype == "bfloat16"
    assert cell.checks == ("logprobs", "kv_bytes")
    assert cells()[0].checks == ("tokens", "kv_bytes")


def test_a_tp_that_does_not_divide_the_query_heads_is_unsupported() -> None:
    by_id = {c.cell_id: c.unsupported for c in cells(matrix={"prefill.tp": [3, 8], "decode.tp": [1, 5]})}
    assert by_id["p8-d1"] is None
    assert by_id["p3-d1"] == "prefill: TP 3 does not divide the model's 8 query heads"
    assert by_id["p8-d5"] == "decode: TP 5 does not divide the model's 8 query heads"
    (aggregated,) = cells(mode="aggregated", prefill={"tp": 3})
    assert aggregated.unsupported == "TP 3 does not divide the model's 8 query heads"


def test_faults_as_an_axis_and_what_they_expect() -> None:
    faults = [[], [{"kind": "flip_bit"}], [{"kind": "kill", "point": "decode", "expect": "TIMEOUT"}]]
    found = cells(matrix={"faults": faults})
    assert [c.expected_verdict for c in found] == ["PASS", "KV_MISMATCH", "TIMEOUT"]
    assert [len(c.faults) for c in found] == [0, 1, 1]
    assert len({c.cell_id for c in found}) == 3


@pytest.mark.parametrize(
    "axis",
    [
        {"faults": [[{"kind": "flip_bit", "rank": 1}], [{"kind": "flip_bit", "request": 1}]]},
        {"faults": [[{"kind": "kill", "point": "decode", name: 2}] for name in ("rank", "step")]},
        {"prefill.node_labels": [{"rack": "a"}, {"zone": "a"}, {"rack": "!a"}, {"rack": "?a"}]},
        {"prompts.file": ["a/b.jsonl", "a_b.jsonl"]},
    ],
)
def test_values_that_look_alike_have_unlike_names(axis: dict[str, list[Any]]) -> None:
    found = ids(matrix=axis, prompts={"file": "p"})
    assert len(set(found)) == len(found) == sum(map(len, axis.values()))


def test_names_depend_on_the_cell_alone() -> None:
    alone = ids(matrix={"prefill.layout": ["BHLNC"], "decode.layout": ["LBHNC"]})
    among = ids(matrix={"prefill.layout": ["BHLNC", "BLHNC"], "decode.layout": ["LBHNC", "BHLNC"]})
    assert alone == ["p1-d1-BHLNC-LBHNC"]
    assert alone[0] in among
    assert all(len(name) <= 120 and "/" not in name for name in among)


def test_local_models_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cells()[0].prefill.model == str(tmp_path / "m")
