"""Measure what engines have to do, in prompt tokens computed on one rank, and choose who has least.

A request adds as much to any engine of as many ranks, a cached prefix aside. So engines are kept in order per
number of ranks, and only the first of each, and those that hold something of the prompt, are compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from rayk.sched.policy import EngineLoad, EngineSet

NOTHING: Mapping[str, float] = {}
_Key = tuple[float, int, int, int]
"""(work, requests, last pick, place in the set): less goes first."""


def work(engine: EngineLoad, output_cost: float) -> float:
    """Compute prompt tokens to compute + output_cost * output tokens to generate."""
    return engine.num_prompt_tokens + output_cost * engine.num_output_tokens


class Chooser:
    """Picks the engine that would be through first, then the one with fewest requests, then the one picked
    longest ago."""

    def __init__(self, output_cost: float) -> None:
        self._output_cost = output_cost
        self._picks = 0
        self._picked: dict[str, int] = {}
        """Engine -> its last pick."""
        self._orders: WeakKeyDictionary[EngineSet, WorkOrder] = WeakKeyDictionary()

    def least(self, engines: EngineSet, own: float, spared: Mapping[str, float] = NOTHING) -> EngineLoad:
        """Pick the engine of least (work + own - spared) / ranks. `own` is what the request adds; `spared`,
        by engine name, is what it does not add there, never less than 0."""
        order = self._orders.get(engines)
        if order is None:
            order = self._orders[engines] = WorkOrder(engines, self._output_cost, self._picked)
        best = order.least(own, spared)
        self._picks += 1
        self._picked[best.name] = self._picks
        engines.changes.note(best.name)
        return best

    def lost(self, engine: str) -> None:
        self._picked.pop(engine, None)
        self._orders.clear()


class WorkOrder:
    """Engines of one set in order of what they have to do, then of requests, then of their last pick."""

    def __init__(self, engines: EngineSet, output_cost: float, picked: Mapping[str, int]) -> None:
        """`picked`: engine -> the number of its last pick; a change of it is noted like one of its load."""
        self._engines = tuple(engines)
        self._places = engines.places
        self._changes = engines.changes
        self._output_cost = output_cost
        self._picked = picked
        self._epoch = self._num_seen = 0
        """Up to where changes were sorted in."""
        self._keys: list[_Key] = []  # by place
        self._sorted: dict[int, list[_Key]] = {}
        """Number of ranks -> the keys of its engines, in order."""
        self._begin()

    def least(self, own: float, spared: Mapping[str, float]) -> EngineLoad:
        """Find the engine of least (work + own - spared) / ranks; among equals the first by the rest of its
        key."""
        self._catch_up()
        best = min(self._first(ranks, keys, own) for ranks, keys in self._sorted.items())
        for name, tokens in spared.items():
            place = self._places.get(name)
            if place is None:
                continue
            key = self._keys[place]
            cost = (key[0] + own - tokens) / self._engines[place].num_ranks
            if cost <= best[0]:
                best = min(best, (cost, *key[1:]))
        return self._engines[best[-1]]

    def _first(self, ranks: int, keys: list[_Key], own: float) -> _Key:
        """Find the best of the engines of as many ranks; its key has the cost in place of the work. One that
        is spared something counts as if it were not, so never too little."""
        cost = (keys[0][0] + own) / ranks
        ties, index = keys[0][1:], 0
        # Different work may come to the same cost, rounded.
        while (index := bisect_right(keys, (keys[index][0], math.inf))) < len(keys):
            if (keys[index][0] + own) / ranks != cost:
                break
            ties = min(ties, keys[index][1:])
        return (cost, *ties)

    def _catch_up(self) -> None:
        """Sort in what has changed."""
        names = self._changes.names
        if self._epoch != self._changes.epoch:
            self._begin()
        elif self._num_seen < len(names):
            for name in dict.fromkeys(names[self._num_seen :]):
                self._sort_in(self._places.get(name))
            self._num_seen = len(names)

    def _sort_in(self, place: int | None) -> None:
        if place is None:
            return  # an engine of another set
        before, now = self._keys[place], self._key(place)
        if before != now:
            keys = self._sorted[self._engines[place].num_ranks]
            del keys[bisect_left(keys, before)]
            insort(keys, now)
            self._keys[place] = now

    def _begin(self) -> None:
        self._epoch, self._num_seen = self._changes.epoch, len(self._changes.names)
        self._keys = [self._key(place) for place in range(len(self._engines))]
        self._sorted = {}
        for engine, key in zip(self._engines, self._keys, strict=True):
            self._sorted.setdefault(engine.num_ranks, []).append(key)
        for keys in self._sorted.values():
            keys.sort()

    def _key(self, place: int) -> _Key:
        engine = self._engines[place]
        last_pick = self._picked.get(engine.name, 0)
        return (work(engine, self._output_cost), engine.num_requests, last_pick, place)
