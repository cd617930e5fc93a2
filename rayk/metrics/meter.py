"""The meter of a process: it gathers values on their way to a sink whose calls cost microseconds."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rayk.metrics.registry import METRICS

FLUSH_S = 0.5  # counters and gauges go on so often: Ray forgets gauges that nobody has set for two seconds
OBSERVED_PER_TICK = 4
"""Observations that go on at a tick: more than a step makes, and few enough to delay no token."""
MAX_OBSERVED = 1 << 16  # observations that wait; beyond these the oldest are lost

_Key = tuple[str, tuple[tuple[str, str], ...]]


class MetricsSink(Protocol):
    """Takes values of the metrics in `METRICS`; `labels`: those that it does not know."""

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter; 0 makes it exist."""

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""

    def observe_folded(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """Add observations to a folded histogram: the number in each bucket (the last one is unbounded) and
        their sum."""

    def relabel(self, **labels: str) -> None:
        """Give labels that it knows other values, for what follows."""


class _NullSink:
    def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    add = set = observe = observe_folded = relabel = _ignore


@dataclass(slots=True)
class _Folded:
    """Counts what a histogram observed since it was last passed on."""

    borders: tuple[float, ...]
    counts: list[int]
    total: float = 0.0
    is_told: bool = False  # whether the sink has it

    def add(self, values: Iterable[float]) -> None:
        borders, counts, total = self.borders, self.counts, 0.0
        for value in values:
            counts[bisect_left(borders, value)] += 1  # a border belongs to what is below it
            total += value
        self.total += total


class Meter:
    """Takes what one process reports, adds counters and folded histograms up, keeps the last value of gauges,
    and passes all on every `FLUSH_S`.

    It is for one thread, which calls `tick` about as often as it reports.
    """

    def __init__(self, sink: MetricsSink | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a sink all values are dropped."""
        self._sink: MetricsSink = sink or _NullSink()
        self._clock = clock
        self._due = clock() + FLUSH_S
        self._sums: dict[_Key, float] = {}
        self._totals: dict[_Key, float] = {}  # what was passed on of counters that are counted elsewhere
        self._told: set[_Key] = set()  # counters that the sink has
        self._gauges: dict[_Key, float] = {}
        self._folded: dict[_Key, _Folded] = {}
        self._observed: deque[tuple[_Key, float]] = deque(maxlen=MAX_OBSERVED)
        self._samplers: list[Callable[[], None]] = []

    def on_flush(self, sample: Callable[[], None]) -> None:
        """Call `sample` before every flush, to report what is counted elsewhere."""
        self._samplers.append(sample)

    def relabel(self, **labels: str) -> None:
        """Give labels that the sink knows other values, for what follows. From any thread."""
        self._sink.relabel(**labels)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter. 0 makes it exist: without that, rates miss the first event."""
        key = (name, tuple(labels.items()))
        self._sums[key] = self._sums.get(key, 0.0) + value

    def total(self, name: str, value: float, **labels: str) -> None:
        """Report that a counter, which is counted elsewhere, stands at `value` now."""
        key = (name, tuple(labels.items()))
        self._sums[key] = self._sums.get(key, 0.0) + value - self._totals.get(key, 0.0)
        self._totals[key] = value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; every flush repeats it."""
        self._gauges[name, tuple(labels.items())] = value

    def forget(self, name: str, **labels: str) -> None:
        """Repeat a gauge no more: Ray forgets it soon."""
        self._gauges.pop((name, tuple(labels.items())), None)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        if METRICS[name].is_folded:
            self.observe_all(name, (value,), **labels)
        else:
            self._observed.append(((name, tuple(labels.items())), value))

    def observe_all(self, name: str, values: Iterable[float], **labels: str) -> None:
        """Add observations to a folded histogram; none of them make it exist."""
        key = (name, tuple(labels.items()))
        folded = self._folded.get(key)
        if folded is None:
            borders = METRICS[name].buckets
            folded = self._folded[key] = _Folded(borders, [0] * (len(borders) + 1))
        folded.add(values)

    def tick(self) -> None:
        """Pass on a few observations, and all the rest when that is due."""
        if self._observed:
            for _ in range(min(OBSERVED_PER_TICK, len(self._observed))):
                self._pass_observation()
        now = self._clock()
        if now >= self._due:
            self._due = now + FLUSH_S
            self._flush()

    def pass_observations(self) -> None:
        """Pass on all observations at once."""
        while self._observed:
            self._pass_observation()

    def flush(self) -> None:
        """Pass everything on."""
        self.pass_observations()
        self._flush()

    def _flush(self) -> None:
        for sample in self._samplers:
            sample()
        sums, self._sums = self._sums, {}
        for (name, labels), value in sums.items():
            if value > 0 or (name, labels) not in self._told:
                self._told.add((name, labels))
                self._sink.add(name, value, **dict(labels))
        for (name, labels), folded in self._folded.items():
            if any(folded.counts) or not folded.is_told:
                self._sink.observe_folded(name, folded.counts, folded.total, **dict(labels))
                folded.counts, folded.total, folded.is_told = [0] * len(folded.counts), 0.0, True
        for (name, labels), value in self._gauges.items():
            self._sink.set(name, value, **dict(labels))

    def _pass_observation(self) -> None:
        (name, labels), value = self._observed.popleft()
        self._sink.observe(name, value, **dict(labels))
