"""What planted faults must end in, when the spec does not say."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.specs import expand, load_spec
from tests.specs.models import decoder, spec


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([], "PASS"),
        ([{"kind": "kill", "point": "prefill"}], "ENGINE_ERROR"),
        ([{"kind": "kill", "point": "transfer"}], "TRANSFER_ERROR"),
        ([{"kind": "early_reuse"}], "TRANSFER_ERROR"),
        ([{"kind": "kill", "point": "decode"}, {"kind": "flip_bit"}], "KV_MISMATCH"),
        ([{"kind": "flip_bit", "expect": "PASS"}], "PASS"),
    ],
)
def test_the_gravest_expected_verdict_wins(faults: list[dict[str, Any]], expected: str) -> None:
    (cell,) = expand(load_spec(spec(faults=faults)).spec, decoder(), device="cpu")
    assert cell.expected_verdict == expected
