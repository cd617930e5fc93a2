"""Send requests of one session to the same engines as long as these live."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

from rayk.sched.policies.least_loaded import LeastLoaded
from rayk.sched.policy import EngineLoad, Placement, PlacementRequest, PolicySettings

MASK = (1 << 64) - 1


class SessionAffinity:
    """Rendezvous hashing: each session has every engine drawn lots for it, and the best one has it.

    An engine that is gone loses its own sessions and no others, each to the next in that session's order;
    one that comes takes its share from all. Shares are in proportion to TP sizes (Thaler and Ravishankar,
    1998, with logarithmic weights). Requests without a session go to the least loaded engines.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._least_loaded = LeastLoaded(settings)
        self._seeds: dict[str, int] = {}  # by engine

    def place(
        self, request: PlacementRequest, prefill: Sequence[EngineLoad], decode: Sequence[EngineLoad]
    ) -> Placement:
        if request.session is None:
            return self._least_loaded.place(request, prefill, decode)
        session = _seed(request.session)
        return Placement(
            prefill=self._of(session, prefill), decode=self._of(session, decode) if decode else None
        )

    def ended(self, request: PlacementRequest, placed: Placement) -> None: ...

    def lost(self, engine: str) -> None:
        self._seeds.pop(engine, None)
        self._least_loaded.lost(engine)

    def _of(self, session: int, engines: Sequence[EngineLoad]) -> str:
        return min(engines, key=lambda e: (self._lot(session, e), e.name)).name

    def _lot(self, session: int, engine: EngineLoad) -> float:
        """Draw a lot, exponential with rate TP size: the chance to be least is in proportion to it."""
        seed = self._seeds.get(engine.name)
        if seed is None:
            seed = self._seeds[engine.name] = _seed(engine.name)
        uniform = (_mix(session ^ seed) + 1) / (MASK + 2)
        return -math.log(uniform) / engine.num_ranks


def _seed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _mix(value: int) -> int:
    """Mix 64 bits with the finaliser of splitmix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
