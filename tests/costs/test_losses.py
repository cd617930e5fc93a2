"""What a step meets on its host, and what it loses by that, worked out by hand."""

from __future__ import annotations

import pytest

from rayk.costs.losses import Crowding, StepLosses, crowding

LOSSES = StepLosses(
    prefill_beside_prefill=0.1,
    prefill_beside_decode=0.2,
    decode_beside_prefill=0.4,
    decode_beside_decode=0.8,
)


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "prefill", "decode", "met"),
    [
        (2, 1, 0, 0, (0, 0, 0)),
        (2, 1, 1, 0, (0, 1, 0)),
        (2, 1, 0, 1, (0, 0, 1)),
        (5, 1, 1, 2, (0, 1 / 4, 2 / 4)),  # four other cores
        (2, 1, 1, 2, (1, 1 / 3, 2 / 3)),  # 4 ranks on 2 cores: twice as long
        (2, 2, 1, 0, (0.5, 1, 0)),  # 3 on 2
        (1, 1, 0, 1, (1, 0, 1)),
        (2, 4, 0, 0, (0, 0, 0)),  # four ranks of its own: that is how it was measured
        (2, 4, 2, 0, (0.5, 1, 0)),  # 6 ranks in place of 4
    ],
)
def test_a_step_meets_ranks_that_keep_cores_busy(
    num_cores: int, num_ranks: int, prefill: int, decode: int, met: tuple[float, float, float]
) -> None:
    assert crowding(num_cores, num_ranks, prefill=prefill, decode=decode) == pytest.approx(met)


def test_a_step_loses_by_its_own_class_and_by_that_of_others() -> None:
    beside = {"prefill": Crowding(prefill=1.0), "decode": Crowding(decode=1.0)}
    found = {
        (kind, name): LOSSES.stretch(met, is_decode=kind)
        for kind in (False, True)
        for name, met in beside.items()
    }
    assert found == {
        (False, "prefill"): 1.1,
        (False, "decode"): 1.2,
        (True, "prefill"): 1.4,
        (True, "decode"): 1.8,
    }


def test_losses_add_up_over_the_others_and_over_cores_that_lack() -> None:
    met = Crowding(over=0.5, prefill=0.25, decode=0.5)
    assert LOSSES.stretch(met, is_decode=False) == pytest.approx(1 + 0.5 + 0.1 / 4 + 0.2 / 2)
    assert LOSSES.stretch(met, is_decode=True) == pytest.approx(1 + 0.5 + 0.4 / 4 + 0.8 / 2)
    assert LOSSES.stretch(Crowding(), is_decode=True) == 1
