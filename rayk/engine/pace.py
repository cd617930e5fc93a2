"""Keep an engine that computes nothing to the times of a cost table, and tell how well it kept to them."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayk.costs.features import step_features
from rayk.costs.table import EngineCosts
from rayk.types.batch import ScheduledBatch
from rayk.types.clock import Clock, host_clock

LOOK_NS = 200_000_000  # how often a pace looks at what the machine does
KEPT_STEPS = 1 << 16  # a pace tells of so many of its last steps
TOLD_STEPS = 1 << 11  # and of so many of the latest among them one by one
IDLE_SHARE = 0.5  # a gap of over this share of a step is idleness, where nobody tells of it
_STAT = Path("/proc/stat")


@dataclass(frozen=True, kw_only=True, slots=True)
class PaceReport:
    """How one rank kept pace."""

    factor: float  # engine.pace
    num_steps: int
    late_p50_share: float  # how late steps began, or ended where that is worse, of their length
    late_p99_share: float
    worst_shares: tuple[float, ...]  # how late the latest steps came, the worst first
    num_outside_hull: int  # steps unlike those that the tables were fitted to
    machine_busy_share: float | None  # of all cores, whoever used them, while steps ran; None: not known


class StepPace:
    """Waits until the time of a step is over. It sleeps, and never spins, so that many engines share a core.

    A step is due to begin as soon as the one before is due to end, or its engine has something to do again,
    and its host has taken what the table says of a turn. One that begins late, because of a late wake-up or a
    busy host, is shorter by as much: it ends when it is due, and the mean is the table's. Where it is late by
    more than its length the rest is forgiven. Steps are held on one thread.
    """

    def __init__(
        self,
        costs: EngineCosts,
        *,
        factor: float = 1.0,
        windows: Sequence[int] = (),
        is_told: bool = True,
        clock: Clock = host_clock,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`factor`: steps take so many times what the table says. `windows`: the model's. `is_told`: whether
        `resume` is called; else a longer gap between two steps is taken for idleness."""
        self._costs = costs
        self._factor = factor
        self._windows = windows
        self._is_told = is_told
        self._clock = clock
        self._sleep = sleep
        self._due_ns: float | None = None  # when the last step was due to end
        self._resumed_ns = 0
        self._shares = array("d")
        self._num_steps = 0
        self._num_outside = 0
        self._first_look: tuple[int, int] | None = None
        self._last_look: tuple[int, int] | None = None
        self._next_look_ns = 0

    def resume(self) -> None:
        """Tell that the engine had nothing to do until now."""
        self._resumed_ns = self._clock()

    def hold(self, batch: ScheduledBatch, parts: Sequence[Callable[[], object]] = ()) -> None:
        """Take a step's time. `parts` are called in order, evenly spaced in it, the last at its end."""
        begin_ns = self._clock()
        features = step_features(batch, self._windows)
        self._num_outside += not self._costs.is_inside(features)
        length_ns = max(1.0, self._factor * self._costs.step_ns(features, strict=False))
        ready_ns = self._ready_ns(begin_ns, length_ns) + self._costs.turn_ns(features)
        due_ns = max(begin_ns, ready_ns + length_ns)
        from_ns = max(begin_ns, ready_ns)
        for number, part in enumerate(parts, start=1):
            self._until(from_ns + (due_ns - from_ns) * number / len(parts))
            part()
        self._until(due_ns)
        now_ns = self._clock()
        self._due_ns = due_ns
        self._note(max(begin_ns - ready_ns, now_ns - due_ns, 0) / length_ns)
        if now_ns >= self._next_look_ns:
            self._look(now_ns)

    def _ready_ns(self, begin_ns: int, length_ns: float) -> float:
        """Say from when on the engine could turn to a step that begins now."""
        if self._due_ns is None:
            return begin_ns
        if not self._is_told and begin_ns - self._due_ns > IDLE_SHARE * length_ns:
            return begin_ns
        return max(self._due_ns, self._resumed_ns)

    def _note(self, late_share: float) -> None:
        self._num_steps += 1
        self._shares.append(late_share)
        if len(self._shares) >= 2 * KEPT_STEPS:
            self._shares = self._shares[-KEPT_STEPS:]

    def report(self) -> PaceReport:
        """Tell how the last steps kept their time. On any thread."""
        # A slice is a copy: an array whose buffer is in use cannot grow, and the loop's thread goes on.
        late = np.frombuffer(self._shares[-KEPT_STEPS:] or array("d", [0.0]), dtype=np.float64)
        p50, p99 = np.percentile(late, [50, 99], method="higher")
        worst = np.sort(late)[: -TOLD_STEPS - 1 : -1]
        return PaceReport(
            factor=self._factor,
            num_steps=self._num_steps,
            late_p50_share=float(p50),
            late_p99_share=float(p99),
            worst_shares=tuple(worst.tolist()),
            num_outside_hull=self._num_outside,
            machine_busy_share=busy_share(self._first_look, self._last_look),
        )

    def _until(self, due_ns: float) -> None:
        left_ns = due_ns - self._clock()
        if left_ns > 0:
            self._sleep(left_ns / 1e9)

    def _look(self, now_ns: int) -> None:
        self._next_look_ns = now_ns + LOOK_NS
        self._last_look = cpu_ticks()
        self._first_look = self._first_look or self._last_look


def cpu_ticks() -> tuple[int, int] | None:
    """Return how much time all cores have been busy, and had in all, since the machine began; None where the
    system does not tell (proc(5))."""
    try:
        words = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1:9]]  # what follows is counted in user and nice already
    except (OSError, ValueError):
        return None
    if words[0] != "cpu" or len(ticks) < 5:
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle, and waiting for a disk


def busy_share(first: tuple[int, int] | None, last: tuple[int, int] | None) -> float | None:
    """Tell how busy the cores were between two looks; None where too little passed."""
    if first is None or last is None or last[1] <= first[1]:
        return None
    return (last[0] - first[0]) / (last[1] - first[1])
