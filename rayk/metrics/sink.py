"""Where metric values go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class MetricsSink(Protocol):
    """Takes values of the metrics in `METRICS`; `labels`: those that it does not know."""

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter; 0 has it be there."""
        ...

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        ...

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        ...

    def observe_folded(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """Add observations to a histogram `is_folded` of: how many lie in each bucket (the last has those
        above all borders) and what they add up to."""
        ...

    def relabel(self, **labels: str) -> None:
        """What follows has these values of labels that it knows."""
        ...


class NullSink:
    """Takes everything and keeps nothing."""

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Ignore."""

    def set(self, name: str, value: float, **labels: str) -> None:
        """Ignore."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Ignore."""

    def observe_folded(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """Ignore."""

    def relabel(self, **labels: str) -> None:
        """Ignore."""
