"""What a drafter is to do crosses to the peers unchanged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayk.engine.header import decode_plan, encode_plan
from rayk.types.drafting import NOTHING, DraftPlan, DraftShare, fresh_blocks

INT32 = st.integers(0, 2**31 - 1)
UPDATES = st.lists(st.tuples(INT32, st.lists(INT32, max_size=3).map(tuple)), max_size=3).map(tuple)
TEMPERATURES = st.floats(0, 1e30)
SEEDS = st.integers(-(2**63), 2**63 - 1)
TOKENS = st.lists(INT32, max_size=3).map(tuple)
SHARES = st.builds(
    DraftShare, INT32, INT32, st.integers(0, 32), UPDATES, TEMPERATURES, SEEDS, INT32, INT32, TOKENS
)


@given(st.lists(SHARES, max_size=5).map(tuple))
def test_plans_cross_unchanged(plan: DraftPlan) -> None:
    assert decode_plan(encode_plan(plan)) == plan


def test_fresh_blocks_are_those_of_all_requests() -> None:
    first, last = DraftShare(3, 7, 2, ((1, (9, 4)), (0, ()))), DraftShare(1, 5, 1, ((2, (8,)),))
    assert fresh_blocks((first, NOTHING, last)) == (9, 4, 8)
