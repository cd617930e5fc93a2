"""Values gathered on their way to a sink whose calls cost microseconds."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rayk.metrics.registry import METRICS
from rayk.metrics.sink import MetricsSink

FLUSH_S = 0.5
"""Counters and gauges go on so often: Ray forgets gauges that nobody has set for two seconds."""
OBSERVED_PER_TICK = 4
"""Observations that go on at a tick: more than a step makes, and few enough to delay no token."""
MAX_OBSERVED = 1 << 16
"""Observations that wait; beyond these the oldest are lost."""

_Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(slots=True)
class _Folded:
    """What a histogram observed since it was passed on."""

    borders: tuple[float, ...]
    counts: list[int]
    total: float = 0.0
    is_told: bool = False
    """Whether it is there."""

    def add(self, values: Iterable[float]) -> None:
        borders, counts, total = self.borders, self.counts, 0.0
        for value in values:
            counts[bisect_left(borders, value)] += 1  # a border belongs to what is below it
            total += value
        self.total += total


class BufferedSink:
    """Adds counters up and counts what folded histograms observe, keeps the last value of gauges, and passes
    all on every `FLUSH_S`.

    For one thread. Implements MetricsSink. Whoever reports calls `tick` about as often as it reports.
    """

    def __init__(self, sink: MetricsSink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink = sink
        self._clock = clock
        self._due = clock() + FLUSH_S
        self._sums: dict[_Key, float] = {}
        self._totals: dict[_Key, float] = {}
        """Of counters that are counted elsewhere: what was passed on."""
        self._told: set[_Key] = set()
        """Counters that are there."""
        self._gauges: dict[_Key, float] = {}
        self._folded: dict[_Key, _Folded] = {}
        self._observed: deque[tuple[_Key, float]] = deque(maxlen=MAX_OBSERVED)
        self._samplers: list[Callable[[], None]] = []

    def on_flush(self, sample: Callable[[], None]) -> None:
        """Call `sample` before every flush, which may report what need not be told of each change."""
        self._samplers.append(sample)

    def relabel(self, **labels: str) -> None:
        """What is passed on from now on has these values of labels that the sink knows. From any thread."""
        self._sink.relabel(**labels)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter. 0 has it be there: rates miss the first of what it counts where it is not."""
        key = (name, tuple(labels.items()))
        self._sums[key] = self._sums.get(key, 0.0) + value

    def total(self, name: str, value: float, **labels: str) -> None:
        """A counter stands at `value` now: somebody else counts."""
        key = (name, tuple(labels.items()))
        self._sums[key] = self._sums.get(key, 0.0) + value - self._totals.get(key, 0.0)
        self._totals[key] = value

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; it is told again at every flush."""
        self._gauges[name, tuple(labels.items())] = value

    def forget(self, name: str, **labels: str) -> None:
        """Tell a gauge no more: Ray forgets it soon."""
        self._gauges.pop((name, tuple(labels.items())), None)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        if METRICS[name].is_folded:
            self.observe_all(name, (value,), **labels)
        else:
            self._observed.append(((name, tuple(labels.items())), value))

    def observe_all(self, name: str, values: Iterable[float], **labels: str) -> None:
        """Add observations to a folded histogram; none has it be there."""
        key = (name, tuple(labels.items()))
        folded = self._folded.get(key)
        if folded is None:
            borders = METRICS[name].buckets
            folded = self._folded[key] = _Folded(borders, [0] * (len(borders) + 1))
        folded.add(values)

    def observe_folded(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """Add what was folded elsewhere."""
        self.observe_all(name, (), **labels)
        folded = self._folded[name, tuple(labels.items())]
        folded.counts = [a + b for a, b in zip(folded.counts, counts, strict=True)]
        folded.total += total

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
