"""Slow steps down that overlap on the cores of one machine."""

from __future__ import annotations

from dataclasses import dataclass

from rayk.costs.table import HostTable


@dataclass(slots=True)
class _BusyTime:
    """The last step of an engine."""

    begin_ns: float
    end_ns: float
    num_ranks: int  # each keeps a core busy


class SimHost:
    """Tells how long the steps of engines take beside each other.

    A step's length is told when it begins. It knows of the steps under way then; what those lose that are
    slowed down by it, they take longer in their next step. So every overlap counts once for each side, and
    the time that several steps take together is right but for the last one's share.
    """

    def __init__(self, table: HostTable) -> None:
        self._num_others = table.num_cores - 1
        self._slow = table.slow
        self._steps: dict[str, _BusyTime] = {}
        self._owed_ns: dict[str, float] = {}

    def slowed(self, engine: str, num_ranks: int, begin_ns: int, length_ns: int) -> int:
        """Tell how long a step of this length takes that begins now, or soon."""
        self._steps.pop(engine, None)
        # The order of a clock's events: what is over at the begin may still be under way for others' steps.
        others = [s for s in self._steps.values() if s.end_ns > begin_ns]
        left_ns = length_ns + self._owed_ns.pop(engine, 0.0)
        at_ns = float(begin_ns)
        for edge_ns in _edges(others, at_ns):
            done_ns = (edge_ns - at_ns) * self._pace(others, at_ns)
            if done_ns >= left_ns:
                break
            left_ns, at_ns = left_ns - done_ns, edge_ns
        end_ns = at_ns + left_ns / self._pace(others, at_ns)
        step = _BusyTime(begin_ns, end_ns, num_ranks)
        for name, other in self._steps.items():
            if (lost_ns := self._lost_ns(other, step)) > 0:
                self._owed_ns[name] = self._owed_ns.get(name, 0.0) + lost_ns
        self._steps[engine] = step
        return round(end_ns - begin_ns)

    def died(self, engine: str, now_ns: int) -> None:
        """An engine's step is over, and it owes nothing."""
        self._owed_ns.pop(engine, None)
        if (step := self._steps.get(engine)) is not None:
            step.end_ns = min(step.end_ns, now_ns)

    def _pace(self, steps: list[_BusyTime], at_ns: float, num_ranks: int = 0) -> float:
        """Tell what of a step is done in a ns, beside these steps and so many ranks more."""
        num_busy = num_ranks + sum(s.num_ranks for s in steps if s.begin_ns <= at_ns < s.end_ns)
        share = min(1.0, num_busy / self._num_others) if self._num_others else float(num_busy > 0)
        return 1 / (1 + self._slow * share)

    def _lost_ns(self, step: _BusyTime, new: _BusyTime) -> float:
        """Tell what a step under way gets done less because a new one runs beside it."""
        others = [s for s in self._steps.values() if s is not step]
        at_ns, end_ns = max(step.begin_ns, new.begin_ns), min(step.end_ns, new.end_ns)
        lost_ns = 0.0
        for edge_ns in (*(e for e in _edges(others, at_ns) if e < end_ns), end_ns):
            if edge_ns > at_ns:
                slower = self._pace(others, at_ns, new.num_ranks)
                lost_ns += (edge_ns - at_ns) * (self._pace(others, at_ns) - slower)
                at_ns = edge_ns
        return lost_ns


def _edges(steps: list[_BusyTime], after_ns: float) -> list[float]:
    """List the times at which any of these begins or ends."""
    return sorted(at for s in steps for at in (s.begin_ns, s.end_ns) if at > after_ns)
