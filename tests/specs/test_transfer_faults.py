"""Faults of a transfer in a spec: what is refused by name, what verdict they ask for, who commits them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayk.actors.cell_deployment import faults_of
from rayk.specs import Cell, load_spec
from rayk.specs.checks import plan_cells
from rayk.types.errors import SpecError
from rayk.types.fault_table import all_faults, expected
from tests.specs.models import decoder, spec


def cell_of(fault: dict[str, Any], **changes: Any) -> Cell:
    loaded = load_spec(spec(device="cpu", faults=[fault], **changes))
    ((cell, _),) = plan_cells(loaded, decoder(), device="cpu")
    return cell


@pytest.mark.parametrize(
    ("fault", "changes", "why"),
    [
        ({"kind": "drop"}, {}, "fault drop needs a point"),
        ({"kind": "drop", "point": "prefill"}, {}, "fault drop cannot strike at 'prefill'"),
        ({"kind": "lose", "point": "post"}, {}, "unknown fault kind 'lose'"),
        ({"kind": "drop", "point": "post", "delay_s": 1.0}, {}, "fault drop does not heed `delay_s`"),
        ({"kind": "drop", "point": "post", "role": "prefill"}, {}, "fault drop does not heed `role`"),
        ({"kind": "stop", "point": "post", "seed": 3}, {}, "fault stop does not heed `seed`"),
        ({"kind": "drop", "point": "free"}, {}, "fault drop at free: without transfer.lease_s"),
        ({"kind": "kill", "point": "lease_renewal"}, {}, "at lease_renewal: without transfer.lease_s"),
        ({"kind": "kill", "point": "notify"}, {"mode": "aggregated"}, "aggregated cells have none"),
        (
            {"kind": "drop", "point": "post", "rank": 2},
            {"decode": {"tp": 2}},
            "rank 2 of a decode engine of TP 2",
        ),
        (
            {"kind": "kill", "point": "post", "engine": 2},
            {"prefill": {"num_engines": 2}, "decode": {"num_engines": 3}},
            "fault kill: engine 2 of 2 prefill engines (cell p1-d1",
        ),
        (
            {"kind": "drop", "point": "post", "engine": 1},
            {"prefill": {"num_engines": 2}},
            "fault drop: engine 1 of 1 decode engines",
        ),
        (
            {"kind": "drop", "point": "post", "engine": 1},
            {"decode": {"num_engines": 2}, "transfer": {"mode": "push"}},
            "fault drop: engine 1 of 1 prefill engines",
        ),
        (
            {"kind": "kill", "point": "decode", "engine": 1},
            {"mode": "aggregated", "decode": {"num_engines": 2}},
            "fault kill: engine 1 of 1",
        ),
        ({"kind": "drop", "point": "post", "step": 0}, {}, "fault drop: step 0 never comes"),
        ({"kind": "kill", "point": "prefill", "step": 0}, {}, "fault kill: step 0 never comes"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    fault: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(SpecError) as caught:
        cell_of(fault, **changes)
    assert why in caught.value.problem


def test_an_engine_or_step_that_is_not_there_is_refused_with_its_line_and_what_would_do(
    tmp_path: Path,
) -> None:
    text = """\
model: m
device: cpu
prompts: {random: {count: 3, input_tokens: [5]}}
prefill: {num_engines: 2}
faults:
  - {kind: kill, point: post, GIVEN}
"""
    refused = {}
    for given in ("engine: 2", "step: 0"):
        (tmp_path / "s.yaml").write_text(text.replace("GIVEN", given))
        with pytest.raises(SpecError) as caught:
            plan_cells(load_spec(tmp_path / "s.yaml"), decoder(), device="cpu")
        assert caught.value.where == f"{tmp_path / 's.yaml'}:5"
        refused[given] = caught.value.mend
    assert refused == {
        "engine: 2": "engine: 0 to 1",
        "step: 0": "step: 1, or leave `step` out, which is the first as well",
    }
    for good in ("engine: 1", "step: 1"):
        (tmp_path / "s.yaml").write_text(text.replace("GIVEN", good))
        assert len(plan_cells(load_spec(tmp_path / "s.yaml"), decoder(), device="cpu")) == 1


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("policy", ["fail", "recompute", "migrate"])
def test_every_fault_of_the_table_expects_its_verdict(mode: str, policy: str) -> None:
    faults = [
        {"kind": f.kind, "point": f.point, **({"role": f.role} if f.role else {})} for f in all_faults()
    ]
    loaded = load_spec(
        spec(
            device="cpu",
            transfer={"mode": mode, "lease_s": 2.0},
            failure_policy=policy,
            prefill={"num_engines": 2},
            matrix={"faults": [[f] for f in faults]},
        )
    )
    cells = [cell for cell, _ in plan_cells(loaded, decoder(), device="cpu")]
    assert len(cells) == len(faults) == 5 * 7 + 3 * 7 * 2
    for cell, fault in zip(cells, all_faults(), strict=True):
        assert cell.expected_verdict == expected(fault, mode, policy).verdict
        committed = [
            (role, rank)
            for role, tp in (("prefill", 1), ("decode", 1))
            for rank in range(tp)
            if faults_of(cell, role, 0, rank, tp)
        ]
        assert committed, "some rank commits it"
        if fault.role is not None:
            assert (fault.role, 0) in committed, "the rank that is to die knows"


def test_another_decode_engine_saves_what_a_dead_one_held() -> None:
    fault = {"kind": "kill", "point": "notify", "role": "decode"}
    one, two = (cell_of(fault, failure_policy="migrate", decode={"num_engines": count}) for count in (1, 2))
    assert (one.expected_verdict, two.expected_verdict) == ("ENGINE_ERROR", "PASS")


def test_faults_name_one_engine_and_one_rank() -> None:
    cell = cell_of(
        {"kind": "corrupt", "point": "mid_transfer", "engine": 1, "rank": 0, "step": 3, "seed": 9},
        transfer={"mode": "push"},
        prefill={"tp": 2, "num_engines": 2},
    )
    found = {
        (role, index, rank): faults_of(cell, role, index, rank, 2)
        for role in ("prefill", "decode")
        for index in range(2)
        for rank in range(2)
    }
    (where,) = [place for place, faults in found.items() if faults]
    assert where == ("prefill", 1, 0)
    (planted,) = found[where]
    fault = planted.transfer_fault
    assert fault is not None
    assert (fault.step, fault.byte, fault.bit, fault.remote) == (3, 1, 1, None)
