"""Tables that a report makes of a run's, each made once per Result, however many sections ask for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pandas as pd

from rayk.reports.moves import moves
from rayk.reports.result import Result


def once_per_result(make: Callable[[Result], pd.DataFrame]) -> Callable[[Result], pd.DataFrame]:
    """Keep what a function makes of a Result with that Result, whose tables do not change. Callers may change
    what they are given: each gets a copy, which pandas makes when it is written to."""
    name = f"{make.__module__}.{make.__name__}"

    @functools.wraps(make)
    def made(result: Result) -> pd.DataFrame:
        if name not in result.derived:
            result.derived[name] = make(result)
        return result.derived[name].copy(deep=False)

    return made


@once_per_result
def moves_of(result: Result) -> pd.DataFrame:
    """Say what moving each request's KV took: `moves` of the run's tables."""
    return moves(result.requests, result.transfers)
