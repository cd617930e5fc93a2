"""What stripes.py says of the cost model's choice, and that its dealt tokens arrive over NIXL."""

from __future__ import annotations

import pytest

from jobs.benchmarks import stripes
from jobs.benchmarks.harness import second_process
from jobs.benchmarks.staging import DENSE, Seen
from jobs.benchmarks.transfer_rate import produce
from rayk.types.rows import TransferRow
from tests.markers import thorough

CASES = list(stripes.make_cases())


def row(*, staged: bool) -> TransferRow:
    common = {"cell_id": "", "repeat": 0, "request_id": "r", "producer_rank": 0, "consumer_rank": 0}
    counts = {"group": 0, "bytes": 1024, "num_descriptors": 8, "transport": "", "costs": ""}
    return TransferRow(**common, **counts, staged=staged, direct_cost_us=2000.0, staged_cost_us=1000.0)


@pytest.mark.parametrize(("staged", "loss"), [(True, 1.25), (False, 1.0)])
def test_the_choice_is_held_against_the_other_way_of_the_same_round(staged: bool, loss: float) -> None:
    """A slow round hits both ways; the first one, which warms up, does not count."""
    seen = {
        "never": Seen([9.0, 1.0, 4.0, 1.0], (row(staged=False),)),
        "always": Seen([1.0, 1.25, 5.0, 1.25], (row(staged=True),)),
        "auto": Seen([1.0, 1.0, 4.0, 1.0], (row(staged=staged),)),
        DENSE: Seen([1.0, 0.5, 2.0, 0.5]),
    }
    cells, found = stripes.line(*CASES[0], 16, seen)
    assert found == pytest.approx(loss)
    told = dict(zip(stripes.TITLES, cells, strict=True))
    assert told["auto chose"] == ("staged" if staged else "direct")
    assert told["right"] == ("no, 1.25 x" if staged else "yes")
    assert (told["staged over direct"], told["of bare NIXL"]) == ("1.25", "50%")


@thorough
def test_dealt_tokens_arrive_in_whichever_way() -> None:
    """Every byte is compared, or the measurement fails; the ways differ in descriptors as they must."""
    name, case = next((n, c) for n, c in CASES if c.deals[1] == (4, 16))
    with second_process(produce) as pipe:
        seen = stripes.run_case(pipe, case, 4, 1, 0)
    num_tokens = case.num_tokens(4)
    direct, staged = (sum(row.num_descriptors for row in seen[mode].rows) for mode in ("never", "always"))
    assert direct == num_tokens * 32, "a run per token and layer"
    assert staged < direct / 8
    assert stripes.line(name, case, 4, seen)[0][0] == "MLA"
