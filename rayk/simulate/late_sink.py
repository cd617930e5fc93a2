"""Hand on what a simulated engine tells of a request when its clock says so, and mere tokens in bulk."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from rayk.engine.leader import RequestEvent, Sink
from rayk.types.clock import Clock

TookTokens = Callable[[list[int], list[int]], None]
"""Takes tokens, and when each was there (ns): the same as an event of each that says nothing else."""


class LateSink:
    """Receives one request's events on an engine whose clock runs ahead of the world's.

    Tokens of which there is nothing else to say wait here for the event behind them, since nobody acts on
    them: most are told so, and tens of steps may be taken at once. Who looks at a request between its events
    calls `catch_up` first.
    """

    __slots__ = ("_clock", "_queue", "_request_id", "_sink", "_times_ns", "_tokens", "_took")

    def __init__(
        self,
        sink: Sink,
        took: TookTokens | None,
        queue: Callable[[tuple[LateSink, RequestEvent]], None],
        clock: Clock,
    ) -> None:
        """`took`: gets such tokens; None: the sink gets an event of each. `queue`: keeps an event until its
        time has come; `hand_on` is called then. `clock`: the engine's, by which events are stamped."""
        self._sink, self._took, self._queue, self._clock = sink, took, queue, clock
        self._request_id = ""
        self._tokens: list[int] = []
        self._times_ns: list[int] = []

    def __call__(self, event: RequestEvent) -> None:
        object.__setattr__(event, "time_ns", self._clock())  # nobody has seen it yet
        self._request_id = event.request_id
        self._queue((self, event))

    def note(self, token: int, at_ns: int) -> None:
        """Keep a token of which there is no more to say."""
        self._tokens.append(token)
        self._times_ns.append(at_ns)

    def note_all(self, tokens: list[int], times_ns: list[int]) -> None:
        """Keep such tokens, in order."""
        self._tokens += tokens
        self._times_ns += times_ns

    def hand_on(self, event: RequestEvent) -> None:
        """The event's time has come. Tokens of a later time will never be: the request ended before."""
        if self._times_ns:
            self._take(bisect_right(self._times_ns, event.time_ns))
            self._tokens.clear()
            self._times_ns.clear()
        self._sink(event)

    def catch_up(self, now_ns: int) -> None:
        """Hand on the tokens that were there before `now_ns`."""
        self._take(bisect_left(self._times_ns, now_ns))

    def _take(self, num: int) -> None:
        if not num:
            return
        tokens, times_ns = self._tokens[:num], self._times_ns[:num]
        del self._tokens[:num], self._times_ns[:num]
        if self._took is not None:
            self._took(tokens, times_ns)
            return
        for token, at_ns in zip(tokens, times_ns, strict=True):
            self._sink(RequestEvent(request_id=self._request_id, token_ids=(token,), time_ns=at_ns))
