"""Send requests of one session to the same engines as long as these live."""

from __future__ import annotations

import math
from hashlib import blake2b
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from rayk.sched.policies.least_loaded import LeastLoaded
from rayk.sched.policy import EngineSet, Placement, PlacementRequest, PolicySettings

MASK = (1 << 64) - 1


class SessionAffinity:
    """Rendezvous hashing: each session has every engine drawn lots for it, and the best one has it.

    An engine that is gone loses its own sessions and no others, each to the next in that session's order;
    one that comes takes its share from all. Shares are in proportion to TP sizes (Thaler and Ravishankar,
    1998, with logarithmic weights). Requests without a session go to the least loaded engines.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._least_loaded = LeastLoaded(settings)
        self._lots: WeakKeyDictionary[EngineSet, _Lots] = WeakKeyDictionary()

    def place(self, request: PlacementRequest, prefill: EngineSet, decode: EngineSet) -> Placement:
        if request.session is None:
            return self._least_loaded.place(request, prefill, decode)
        session = _seed(request.session)
        return Placement(
            prefill=self._of(session, prefill), decode=self._of(session, decode) if decode else None
        )

    def ended(self, request: PlacementRequest, placed: Placement) -> None: ...

    def lost(self, engine: str) -> None:
        self._least_loaded.lost(engine)

    def _of(self, session: int, engines: EngineSet) -> str:
        lots = self._lots.get(engines)
        if lots is None:
            lots = self._lots[engines] = _Lots(engines)
        return lots.winner(session)


class _Lots:
    """Draws lots for the engines of one set, all at once."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = [(engine.name, _seed(engine.name), engine.num_ranks) for engine in engines]
        self._seeds = np.array([seed for _, seed, _ in self._engines], np.uint64)
        self._num_ranks = np.array([num for _, _, num in self._engines], np.float64)

    def winner(self, session: int) -> str:
        """Find the engine whose lot is least; of equal lots the first by name."""
        uniform = (_mix_all(self._seeds ^ np.uint64(session)).astype(np.float64) + 1) / (MASK + 2)
        lots = -np.log(uniform) / self._num_ranks
        # Rounded otherwise than one by one: those that may be least are drawn again.
        near = np.flatnonzero(lots <= lots.min() * (1 + 1e-9) + 1e-12).tolist()
        drawn = ((name, _lot(session, seed, num)) for name, seed, num in map(self._engines.__getitem__, near))
        return min(drawn, key=lambda named: (named[1], named[0]))[0]


def _lot(session: int, seed: int, num_ranks: int) -> float:
    """Draw an engine's lot, exponential with rate TP size: the chance to be least is in proportion to it."""
    uniform = (_mix(session ^ seed) + 1) / (MASK + 2)
    return -math.log(uniform) / num_ranks


def _seed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _mix(value: int) -> int:
    """Mix 64 bits with the finaliser of splitmix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _mix_all(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix as `_mix` does; products of uint64 wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
