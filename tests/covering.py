"""`covering`: few of many cases, in which every two values meet that meet in any of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Case = tuple[object, ...]
"""One value of each axis."""


def covering(cases: Sequence[Case]) -> list[Case]:
    """Choose cases so that any values of two axes that stand in one of `cases` stand in one that is chosen.
    Each step takes the first of those with most pairs that are new."""
    axes = [sorted(set(column), key=str) for column in zip(*cases, strict=True)]
    starts = np.cumsum([0, *map(len, axes)])[:-1]
    places = [
        {value: start + i for i, value in enumerate(axis)} for axis, start in zip(axes, starts, strict=True)
    ]
    rows = np.array([[place[v] for place, v in zip(places, case, strict=True)] for case in cases])
    has = np.zeros((len(cases), sum(map(len, axes))), dtype=np.float32)
    np.put_along_axis(has, rows, 1, axis=1)
    is_new = (has.T @ has > 0).astype(np.float32)
    for start, axis in zip(starts, axes, strict=True):
        is_new[start : start + len(axis), start : start + len(axis)] = 0
    chosen = []
    while is_new.any():
        best = int(((has @ is_new) * has).sum(axis=1).argmax())
        chosen.append(cases[best])
        is_new[np.ix_(rows[best], rows[best])] = 0
    return chosen
