"""Faults an experiment plants, as a rank commits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayk.transfer.faults import FlipBit


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedFault:
    """One fault of one rank; see specs.FaultSpec for the fields."""

    kind: str
    point: str | None = None
    step: int | None = None
    request: int | None = None
    seed: int = 0

    def hits(self, request_id: str) -> bool:
        """Whether this request is meant: the one of prompt `request`, or any."""
        return self.request is None or request_id.rpartition("/")[2] == str(self.request)

    def flipped_bit(self) -> FlipBit:
        """One bit of the first token's first bytes, chosen by the seed."""
        return FlipBit(read=0, descriptor=0, byte=self.seed // 8 % 16, bit=self.seed % 8)


class FaultBox:
    """A rank's faults of one kind each strike once."""

    def __init__(self, faults: Sequence[PlantedFault]) -> None:
        self._left = list(faults)

    def take(self, kind: str, request_id: str) -> PlantedFault | None:
        """The fault of this kind that hits this request, used up by asking; None if there is none."""
        for fault in self._left:
            if fault.kind == kind and fault.hits(request_id):
                self._left.remove(fault)
                return fault
        return None
