"""Measure what engines have to do, in prompt tokens computed on one rank, and choose who has least.

A request adds as much to any engine of as many ranks, a cached prefix aside. So engines are kept in order per
number of ranks, and only the first of each, and those that hold something of the prompt, are compared.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Mapping, Sequence
from weakref import WeakKeyDictionary

from rayk.sched.policy import EngineLoad, EngineSet

Spared = Sequence[tuple[float, Collection[str]]]
"""What a request does not add (never less than 0), and the names of engines where it does not; no engine is
in two of them."""
_Key = tuple[float, int, int, int]
"""(work, requests, last pick, place in the set): less goes first."""
_NOBODY: _Key = (math.inf, 0, 0, -1)


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

    def least(self, engines: EngineSet, own: float, spared: Spared = ()) -> EngineLoad:
        """Pick the engine of least (work + own - spared) / ranks. `own` is what the request adds; names in
        `spared` may be of engines elsewhere."""
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
        """Number of ranks, the largest first, who cost least -> the keys of its engines, in order."""
        self._begin()

    def least(self, own: float, spared: Spared) -> EngineLoad:
        """Find the engine of least (work + own - spared) / ranks; among equals the first by the rest of its
        key."""
        self._catch_up()
        # One that is spared something counts as if it were not, so never too little.
        best = self._better(_NOBODY, own, 0.0, self._places)
        for tokens, engines in spared:
            best = self._better(best, own, tokens, engines)
        return self._engines[best[-1]]

    def _better(self, best: _Key, own: float, spared: float, engines: Collection[str]) -> _Key:
        """Find the best of engines that are spared as much, unless `best` is better; a key of either has the
        cost in place of the work. Engines are passed in order of their work for as long as these are not more
        than those to choose from. Where these are k of n, about n / k are passed before one of them is met:
        where that is more than k, each of them is looked at instead."""
        num_left = len(engines)
        if num_left * num_left < len(self._engines):
            return self._best_of(engines, own, spared, best)
        for ranks, keys in self._sorted.items():
            index = 0
            while index < len(keys) and (cost := (keys[index][0] + own - spared) / ranks) <= best[0]:
                if not num_left:
                    return self._best_of(engines, own, spared, best)
                num_left -= 1
                key = keys[index]
                index += 1
                if self._engines[key[-1]].name in engines:
                    best = min(best, (cost, *key[1:]))
                    # Different work may come to the same cost, rounded.
                    index = bisect_right(keys, (key[0], math.inf), index)
        return best

    def _best_of(self, engines: Collection[str], own: float, spared: float, best: _Key) -> _Key:
        """Find the same by a look at each."""
        for name in engines:
            place = self._places.get(name)
            if place is None:
                continue
            key = self._keys[place]
            cost = (key[0] + own - spared) / self._engines[place].num_ranks
            if cost <= best[0]:
                best = min(best, (cost, *key[1:]))
        return best

    def _catch_up(self) -> None:
        """Sort in what has changed."""
        names = self._changes.names
        if self._epoch != self._changes.epoch:
            self._begin()
        elif self._num_seen < len(names):
            for name in dict.fromkeys(names[self._num_seen :]):
                if (place := self._places.get(name)) is not None:  # else it is of another set
                    self._sort_in(place)
            self._num_seen = len(names)

    def _sort_in(self, place: int) -> None:
        before, now = self._keys[place], self._key(place)
        if before != now:
            keys = self._sorted[self._engines[place].num_ranks]
            del keys[bisect_left(keys, before)]
            insort(keys, now)
            self._keys[place] = now

    def _begin(self) -> None:
        self._epoch, self._num_seen = self._changes.epoch, len(self._changes.names)
        self._keys = [self._key(place) for place in range(len(self._engines))]
        sizes = sorted({engine.num_ranks for engine in self._engines}, reverse=True)
        self._sorted = {ranks: [] for ranks in sizes}
        for engine, key in zip(self._engines, self._keys, strict=True):
            self._sorted[engine.num_ranks].append(key)
        for keys in self._sorted.values():
            keys.sort()

    def _key(self, place: int) -> _Key:
        engine = self._engines[place]
        last_pick = self._picked.get(engine.name, 0)
        return (work(engine, self._output_cost), engine.num_requests, last_pick, place)
