"""Say what steps lose while other engines of the host compute: simulations and fits go by these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Crowding(NamedTuple):
    """What a step meets on its host at a moment."""

    over: float = 0.0
    """How many more ranks there are than cores, as a share of the cores: 0.5 of 3 on 2. An engine that has
    more ranks than cores itself was measured so: its own do not count."""
    prefill: float = 0.0  # of the other cores, the share that others' prefill steps keep busy
    decode: float = 0.0  # the same of their decode steps


def crowding(num_cores: int, num_ranks: int, *, prefill: int, decode: int) -> Crowding:
    """Tell what a step of `num_ranks` ranks meets on `num_cores` cores while so many ranks of other engines
    take prefill and decode steps; each rank keeps a core busy."""
    others = prefill + decode
    if not others:
        return Crowding()
    over = max(num_cores, num_ranks + others) / max(num_cores, num_ranks) - 1
    whole = max(num_cores - 1, others)
    return Crowding(over=over, prefill=prefill / whole, decode=decode / whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLosses:
    """How much more time a class of an engine's steps takes while steps of other engines keep all other cores
    busy, as shares of what it takes alone: 0.4 is 1.4 times as long.

    They share caches, memory, and the cores of whoever passes tokens on. So it depends on the engine, on what
    its step does, and on what theirs do.
    """

    prefill_beside_prefill: float = 0.0
    prefill_beside_decode: float = 0.0
    decode_beside_prefill: float = 0.0
    decode_beside_decode: float = 0.0

    def stretch(self, met: Crowding, *, is_decode: bool) -> float:
        """Tell how many times as long as alone such a step takes."""
        if is_decode:
            lost = self.decode_beside_prefill * met.prefill + self.decode_beside_decode * met.decode
        else:
            lost = self.prefill_beside_prefill * met.prefill + self.prefill_beside_decode * met.decode
        return 1 + met.over + lost


NO_LOSSES = StepLosses()
