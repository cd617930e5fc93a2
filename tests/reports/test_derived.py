"""Tables that a report makes of a run's: once per Result, and nobody changes another's."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from rayk.reports import Result
from rayk.reports.derived import once_per_result


def test_a_table_is_made_once_for_a_result_and_is_the_callers_own() -> None:
    empty = pd.DataFrame()
    result = Result(cells=pd.DataFrame({"x": [1, 2]}), requests=empty, transfers=empty)
    asked = []

    @once_per_result
    def doubled(result: Result) -> pd.DataFrame:
        asked.append(result)
        return result.cells * 2

    changed = doubled(result)
    changed.loc[0, "x"] = 7
    assert doubled(result)["x"].tolist() == [2, 4]
    assert len(asked) == 1
    other = replace(result, cells=pd.DataFrame({"x": [5]}))
    assert doubled(other)["x"].tolist() == [10], "another Result has other tables"
