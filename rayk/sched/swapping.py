"""Preempted requests whose KV is copied out, to be copied back later, instead of being computed again.

A request that a swapper took is *away*: it holds no row, its blocks are the swapper's. First they are being
copied out (it is *leaving*), then they come free, then other blocks get its KV again and it comes back.
"""

from __future__ import annotations

from typing import Protocol

from rayk.sched.request_state import RequestState


class Swapper(Protocol):
    """Keeps the KV of preempted requests elsewhere.

    For each request it took it calls the scheduler's `blocks_left` once the blocks are free, asks
    `may_return` before it takes blocks for the return, calls `make_room` where these are short, and ends with
    `come_back` or `start_over`, unless it was told to `forget` it. It keeps a deadline of its own: while a
    request is away, later ones wait. What comes back should find a block per group free beside its own, or it
    may be the next victim.
    """

    def swap_out(self, state: RequestState) -> bool:
        """Take over the blocks of a preempted request: they are copied out and come free soon. False: nothing
        was taken, and the request is computed again."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that was removed (aborted) while it is away."""


class AwayRequests:
    def __init__(self) -> None:
        self.num_swaps = 0  # times a request was taken, ever
        self._states: dict[str, RequestState] = {}
        self._leaving: set[str] = set()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def any_leaving(self) -> bool:
        return bool(self._leaving)

    def is_leaving(self, request_id: str) -> bool:
        return request_id in self._leaving

    def send(self, state: RequestState, swapper: Swapper | None) -> bool:
        """Offer a request to a swapper; returns whether it took it."""
        if swapper is None:
            return False
        # Before the call: a swapper that has nothing to copy may answer within it.
        self._states[state.request_id] = state
        self._leaving.add(state.request_id)
        if not swapper.swap_out(state):
            self.take(state.request_id)
            return False
        state.num_swaps += 1
        self.num_swaps += 1
        return True

    def blocks_left(self, request_id: str) -> None:
        """Note that a request's blocks are free; unknown requests have none."""
        self._leaving.discard(request_id)

    def take(self, request_id: str) -> RequestState | None:
        self._leaving.discard(request_id)
        return self._states.pop(request_id, None)

    def precedes(self, state: RequestState) -> bool:
        """Tell whether a request is away that came before `state`."""
        return any(other.arrival < state.arrival for other in self._states.values())

    def first(self) -> RequestState | None:
        return min(self._states.values(), key=lambda state: state.arrival, default=None)
