"""Share the cores of one machine among the steps of its engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rayk.costs.losses import NO_LOSSES, StepLosses, crowding

MOST_GIVEN_BACK = 0.5
"""A step gets shorter by at most so much of its time, where the one before it took longer than it had to."""


@dataclass(slots=True, eq=False)
class _BusyTime:
    """What an engine computes, or computed last."""

    begin_ns: float
    alone_ns: float  # what it takes where nothing runs beside it
    num_ranks: int  # each keeps a core busy
    is_decode: bool  # what others lose beside it is that of such a step
    losses: StepLosses  # what it loses itself
    end_ns: float = 0.0
    beside: list[_BusyTime] = field(default_factory=list)
    """What others do at some time between its begin and its end, as far as they have begun it."""

    def stretch(self, beside: Iterable[_BusyTime], num_cores: int) -> float:
        """Tell how many times as long it takes while all of these run."""
        ranks = {True: 0, False: 0}
        for other in beside:
            ranks[other.is_decode] += other.num_ranks
        met = crowding(num_cores, self.num_ranks, prefill=ranks[False], decode=ranks[True])
        return self.losses.stretch(met, is_decode=self.is_decode)

    def done_ns(self, num_cores: int) -> float:
        """Tell what of it, as it takes alone, is done from its begin to its end."""
        at_ns, done_ns = self.begin_ns, 0.0
        edges = sorted(at for s in self.beside for at in (s.begin_ns, s.end_ns) if at_ns < at < self.end_ns)
        for edge_ns in (*edges, self.end_ns):
            beside = (s for s in self.beside if s.begin_ns <= at_ns < s.end_ns)
            done_ns += (edge_ns - at_ns) / self.stretch(beside, num_cores)
            at_ns = edge_ns
        return done_ns


class SimHost:
    """Tells how long the steps of engines take beside each other.

    A step's length is told when it begins, as if others that compute then went on with such steps until its
    end. What they did is known when its engine begins the next one, which makes up for the difference. So
    every overlap counts once for each side, and the time that several steps take together is right but for
    the last one's share.
    """

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._last: dict[str, _BusyTime] = {}
        self._owed_ns: dict[str, float] = {}  # negative: it lost less than it was told

    def step(
        self,
        engine: str,
        num_ranks: int,
        begin_ns: int,
        length_ns: int,
        *,
        is_decode: bool,
        losses: StepLosses,
    ) -> int:
        """Tell how long a step takes that takes this long alone. It begins now, or soon. `losses`: those of
        the engine."""
        self._settle(engine)
        owed_ns = self._owed_ns.pop(engine, 0.0)
        alone_ns = max(length_ns + owed_ns, (1 - MOST_GIVEN_BACK) * length_ns)
        if (left_ns := length_ns + owed_ns - alone_ns) < 0:
            self._owed_ns[engine] = left_ns
        return self._begin(engine, _BusyTime(begin_ns, alone_ns, num_ranks, is_decode, losses))

    def work(self, engine: str, num_ranks: int, begin_ns: int, length_ns: int) -> int:
        """Tell the same of what an engine does beside its steps, which pays for none of them.

        It waits for a core as they do, and loses nothing else: fits of hand-overs have what it takes beside
        others. To others it is a part of the engine's last step, as it is to fits of what they lose.
        """
        last = self._last.get(engine)
        is_decode = last is not None and last.is_decode
        self._settle(engine)
        return self._begin(engine, _BusyTime(begin_ns, length_ns, num_ranks, is_decode, NO_LOSSES))

    def died(self, engine: str, now_ns: int) -> None:
        """An engine's step is over, and it owes nothing."""
        self._owed_ns.pop(engine, None)
        if (last := self._last.pop(engine, None)) is not None:
            last.end_ns = min(last.end_ns, now_ns)

    def _begin(self, engine: str, new: _BusyTime) -> int:
        """Let it last as long as it takes beside what is under way, and tell how long that is."""
        # The order of a clock's events: what is over at the begin may still be under way for others' steps.
        new.beside = [s for s in self._last.values() if s.end_ns > new.begin_ns]
        for other in new.beside:
            other.beside.append(new)
        length_ns = new.alone_ns * new.stretch(new.beside, self._num_cores)
        new.end_ns = new.begin_ns + length_ns
        self._last[engine] = new
        return round(length_ns)

    def _settle(self, engine: str) -> None:
        """Note what is left to do of an engine's last step, now that it is known what ran beside it."""
        if (last := self._last.pop(engine, None)) is not None:
            owed_ns = last.alone_ns - last.done_ns(self._num_cores)
            self._owed_ns[engine] = self._owed_ns.get(engine, 0.0) + owed_ns
            last.beside = []  # each would keep those before it


@dataclass(frozen=True, slots=True)
class HostShare:
    """What an engine asks its host. Implements simulate.rank.Slow."""

    host: SimHost
    engine: str
    num_ranks: int
    losses: StepLosses

    def step(self, begin_ns: int, length_ns: int, *, is_decode: bool) -> int:
        return self.host.step(
            self.engine, self.num_ranks, begin_ns, length_ns, is_decode=is_decode, losses=self.losses
        )

    def work(self, begin_ns: int, length_ns: int) -> int:
        return self.host.work(self.engine, self.num_ranks, begin_ns, length_ns)
