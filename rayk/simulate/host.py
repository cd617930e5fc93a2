"""Share the cores of one machine among the steps of its engines."""

from __future__ import annotations

from dataclasses import dataclass

from rayk.costs.table import HostTable


@dataclass(slots=True)
class _BusyTime:
    """What an engine computes, or computed last."""

    begin_ns: float
    end_ns: float
    num_ranks: int  # each keeps a core busy
    demand: float  # cores that it asks for: of its ranks, and to pass its tokens on


class SimHost:
    """Tells how long the steps of engines take beside each other.

    A step's length is told when it begins. It knows of the steps under way then; what those lose that are
    slowed down by it, they take longer in their next step. So every overlap counts once for each side, and
    the time that several steps take together is right but for the last one's share.
    """

    def __init__(self, table: HostTable) -> None:
        self._table = table
        self._last: dict[str, _BusyTime] = {}
        self._owed_ns: dict[str, float] = {}

    def step(self, engine: str, num_ranks: int, begin_ns: int, length_ns: int, num_tokens: int) -> int:
        """Tell how long a step of this length takes, from which so many tokens are passed on. It begins now,
        or soon."""
        length_ns += round(self._owed_ns.pop(engine, 0.0))
        demand = num_ranks + num_tokens * self._table.token_ns / max(1, length_ns)
        return self._slowed(engine, _BusyTime(begin_ns, begin_ns + length_ns, num_ranks, demand))

    def work(self, engine: str, num_ranks: int, begin_ns: int, length_ns: int) -> int:
        """Tell the same of what an engine does beside its steps, which pays for none of them."""
        return self._slowed(engine, _BusyTime(begin_ns, begin_ns + length_ns, num_ranks, num_ranks))

    def died(self, engine: str, now_ns: int) -> None:
        """An engine's step is over, and it owes nothing."""
        self._owed_ns.pop(engine, None)
        if (last := self._last.get(engine)) is not None:
            last.end_ns = min(last.end_ns, now_ns)

    def _slowed(self, engine: str, new: _BusyTime) -> int:
        """Let it last as long as it takes, and tell how long that is; others under way lose by it."""
        self._last.pop(engine, None)
        # The order of a clock's events: what is over at the begin may still be under way for others' steps.
        others = [s for s in self._last.values() if s.end_ns > new.begin_ns]
        left_ns, at_ns = new.end_ns - new.begin_ns, new.begin_ns
        for edge_ns in _edges(others, at_ns):
            done_ns = (edge_ns - at_ns) * self._pace(new, others, at_ns)
            if done_ns >= left_ns:
                break
            left_ns, at_ns = left_ns - done_ns, edge_ns
        new.end_ns = at_ns + left_ns / self._pace(new, others, at_ns)
        for name, other in self._last.items():
            if (lost_ns := self._lost_ns(other, new)) > 0:
                self._owed_ns[name] = self._owed_ns.get(name, 0.0) + lost_ns
        self._last[engine] = new
        return round(new.end_ns - new.begin_ns)

    def _pace(self, step: _BusyTime, others: list[_BusyTime], at_ns: float) -> float:
        """Tell what of a step is done in a ns beside those of the others that are under way."""
        beside = [s for s in others if s.begin_ns <= at_ns < s.end_ns]
        if not beside:
            return 1.0  # what it takes alone was measured
        demand = step.demand + sum(s.demand for s in beside)
        return 1 / self._table.stretch(sum(s.num_ranks for s in beside), demand)

    def _lost_ns(self, step: _BusyTime, new: _BusyTime) -> float:
        """Tell what a step under way gets done less because a new one runs beside it."""
        others = [s for s in self._last.values() if s is not step]
        at_ns, end_ns = max(step.begin_ns, new.begin_ns), min(step.end_ns, new.end_ns)
        lost_ns = 0.0
        for edge_ns in (*(e for e in _edges(others, at_ns) if e < end_ns), end_ns):
            if edge_ns > at_ns:
                slower = self._pace(step, [*others, new], at_ns)
                lost_ns += (edge_ns - at_ns) * (self._pace(step, others, at_ns) - slower)
                at_ns = edge_ns
        return lost_ns


@dataclass(frozen=True, slots=True)
class HostShare:
    """What an engine asks its host. Implements simulate.rank.Slow."""

    host: SimHost
    engine: str
    num_ranks: int

    def step(self, begin_ns: int, length_ns: int, num_tokens: int) -> int:
        return self.host.step(self.engine, self.num_ranks, begin_ns, length_ns, num_tokens)

    def work(self, begin_ns: int, length_ns: int) -> int:
        return self.host.work(self.engine, self.num_ranks, begin_ns, length_ns)


def _edges(steps: list[_BusyTime], after_ns: float) -> list[float]:
    """List the times at which any of these begins or ends."""
    return sorted(at for s in steps for at in (s.begin_ns, s.end_ns) if at > after_ns)
