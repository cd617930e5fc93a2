"""Answers of an engine's ranks, kept on rank 0 until every rank has answered."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class RankAnswers(Generic[T]):
    """Keeps each rank's answer to one question; a rank that answers again replaces its answer."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._answers: dict[int, T] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every rank has answered."""
        return len(self._answers) == self._num_ranks

    def add(self, rank: int, answer: T) -> bool:
        """Keep a rank's answer; returns `is_complete`."""
        self._answers[rank] = answer
        return self.is_complete

    def in_order(self) -> list[T]:
        """Return the answers by rank, when every rank has answered."""
        return [self._answers[rank] for rank in range(self._num_ranks)]
