"""What planted faults must end in, when the spec does not say."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.actors.planted_state import SPOILS
from rayk.specs import expand, load_spec, plan_cells
from rayk.specs.faults import STATE_POINTS
from rayk.types.errors import SpecError
from tests.specs.models import decoder, spec


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([], "PASS"),
        ([{"kind": "kill", "point": "prefill"}], "ENGINE_ERROR"),
        ([{"kind": "kill", "point": "transfer"}], "ENGINE_ERROR"),
        ([{"kind": "early_reuse"}], "TRANSFER_ERROR"),
        ([{"kind": "kill", "point": "decode"}, {"kind": "flip_bit"}], "KV_MISMATCH"),
        ([{"kind": "flip_bit", "expect": "PASS"}], "PASS"),
    ],
)
def test_the_gravest_expected_verdict_wins(faults: list[dict[str, Any]], expected: str) -> None:
    (cell,) = expand(load_spec(spec(faults=faults)).spec, decoder(), device="cpu")
    assert cell.expected_verdict == expected


def test_a_fault_of_a_request_that_is_not_there_is_refused() -> None:
    loaded = load_spec(spec(faults=[{"kind": "flip_bit", "request": 99}]))
    with pytest.raises(SpecError, match=r"fault flip_bit: request 99 of \d+ prompts"):
        plan_cells(loaded, decoder(), device="cpu")


def test_every_point_of_a_state_can_be_planted():
    assert {*SPOILS, "stale_state"} == set(STATE_POINTS)
