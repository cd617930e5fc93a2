"""Requests go to the engines of each side in turn."""

from __future__ import annotations

from rayk.types.request import Request


class RoundRobin:
    """The n-th request takes prefill engine n mod num_prefill and decode engine n mod num_decode."""

    def __init__(self) -> None:
        self._count = 0

    def place(self, request: Request, num_prefill: int, num_decode: int) -> tuple[int, int]:
        """(prefill engine index, decode engine index)."""
        del request
        index = self._count
        self._count += 1
        return index % num_prefill, index % num_decode
