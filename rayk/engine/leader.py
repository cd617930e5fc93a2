"""Rank 0's side of an engine: requests in, turns out, tokens to their sinks.

All state belongs to the loop's thread. Other threads `post` a closure, which runs at the next turn; that is
how requests, aborts and commands come in. What happens to a request beyond this engine (a hand-over to
another one) is a Handover's business.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rayk.engine.loop import Turn, TurnResult
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import RequestState, Scheduler
from rayk.types.errors import EngineDied, RaykError, UserError
from rayk.types.request import FinishReason, Request

HEARTBEAT_S = 0.05
"""An idle engine turns this often."""
BUSY_POLL_S = 0.0003
"""How often an engine with transfers or leases, but no step to run, turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestEvent:
    """News of one request for its sink. The last event of a request has a reason, error or payload."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: RaykError | None = None
    payload: object = None
    """What a hand-over gives on (a transfer ticket)."""
    info: dict[str, Any] = field(default_factory=dict)
    time_ns: int = field(default_factory=time.monotonic_ns)
    """When it happened, on this host's monotonic clock."""

    @property
    def is_last(self) -> bool:
        """Whether no event follows."""
        return self.finish_reason is not None or self.error is not None or self.payload is not None


Sink = Callable[[RequestEvent], None]


class Handover(Protocol):
    """Moves requests between engines. Every method runs on the loop's thread."""

    def attach(self, leader: Leader) -> None:
        """Called once, before the first turn."""
        ...

    def takes(self, state: RequestState) -> bool:
        """Whether this request, which just sampled a token and is not finished, leaves the engine now.

        If so the hand-over has already taken its blocks over."""
        ...

    def commands(self) -> tuple[object, ...]:
        """Commands for the next turn; their results come to `absorb` in the same order."""
        ...

    def needs_gather(self) -> bool:
        """Whether polls of all ranks matter now."""
        ...

    def absorb(self, results: tuple[tuple[object, ...], ...], polls: tuple[object, ...]) -> None:
        """Per rank: results of the last `commands()`, and the poll."""
        ...

    def abort(self, request_id: str) -> bool:
        """Stop a hand-over in progress; False if there is none."""
        ...

    def fail_all(self, error: RaykError) -> None:
        """The engine is going down."""
        ...


class Leader:
    """Implements loop.TurnSource over a Scheduler and a KVCacheManager."""

    def __init__(
        self, scheduler: Scheduler, manager: KVCacheManager, handover: Handover | None = None
    ) -> None:
        self.scheduler = scheduler
        self.manager = manager
        self._handover = handover
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._calls: list[tuple[object, Future[list[object]]]] = []
        self._asked: list[tuple[object, Future[list[object]]]] = []
        self._num_handover_commands = 0
        self._stopping = False
        self._stalled = False
        self._dead: RaykError | None = None
        if handover is not None:
            handover.attach(self)

    # Any thread.

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread at its next turn."""
        self._inbox.put(action)

    def submit(self, request: Request, sink: Sink) -> None:
        """Run a request here from its first token. Problems reach the sink as an error event."""
        self.post(lambda: self._admit(request, sink))

    def abort(self, request_id: str) -> None:
        """Stop a request; its sink gets finish_reason abort. Unknown ids are over already."""
        self.post(lambda: self._abort(request_id))

    def call(self, command: object) -> Future[list[object]]:
        """Run a command on every rank; the future holds each rank's result (or raises its RaykError)."""
        future: Future[list[object]] = Future()
        self.post(lambda: self._calls.append((command, future)))
        return future

    def stop(self) -> None:
        """Let the loop end after its current turn."""

        def stop() -> None:
            self._stopping = True

        self.post(stop)

    def fail(self, error: RaykError) -> None:
        """The loop ended with `error`: tell every sink and every waiting call. From the loop's thread."""
        self._dead = error
        if self._handover is not None:
            self._handover.fail_all(error)
        for request_id in list(self._sinks):
            self.emit(RequestEvent(request_id=request_id, error=error))
        for _, future in self._calls + self._asked:
            future.set_exception(error)
        while not self._inbox.empty():
            self._inbox.get_nowait()()  # late submits see _dead

    # The loop's thread.

    def wait(self) -> None:
        """Run what was posted; when there is nothing to do, wait a heartbeat for it."""
        timeout = 0.0 if self._busy() else (BUSY_POLL_S if self._watching() else HEARTBEAT_S)
        try:
            action = self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
            action()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def plan(self) -> Turn:
        """The next turn: posted commands, the hand-over's commands, and the scheduler's batch."""
        own = self._handover.commands() if self._handover is not None else ()
        self._num_handover_commands = len(own)
        self._asked, self._calls = self._calls, []
        commands = (*own, *(command for command, _ in self._asked))
        batch = self.scheduler.schedule()
        self._stalled = batch is None
        return Turn(
            batch=batch,
            commands=commands,
            gather=bool(commands) or self._watching(),
            stop=self._stopping,
        )

    def absorb(self, turn: Turn, result: TurnResult) -> None:
        """Hand tokens to sinks, finished requests out, results to whoever asked."""
        if turn.batch is not None:
            for state in self.scheduler.update(turn.batch, result.sampled):
                self._deliver(state)
        if not turn.gather:
            return
        n = self._num_handover_commands
        if self._handover is not None:
            self._handover.absorb(tuple(r[:n] for r in result.results), result.polls)
        for i, (_, future) in enumerate(self._asked):
            answers = [per_rank[n + i] for per_rank in result.results]
            error = next((a for a in answers if isinstance(a, RaykError)), None)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answers)
        self._asked = []

    def emit(self, event: RequestEvent) -> None:
        """Give an event to its request's sink; the last one closes it."""
        sink = self._sinks.get(event.request_id)
        if sink is None:
            return
        if event.is_last:
            del self._sinks[event.request_id]
        sink(event)

    def open(self, request: Request, sink: Sink) -> bool:
        """Register a sink, or refuse: engine dead, id in use, or a request no pool could ever hold."""
        error: RaykError | None = self._dead
        if error is None and request.request_id in self._sinks:
            error = UserError(f"request id {request.request_id} is in use")
        if error is None:
            error = self._too_long(request)
        if error is not None:
            sink(RequestEvent(request_id=request.request_id, error=error))
            return False
        self._sinks[request.request_id] = sink
        return True

    def check_integrity(self) -> None:
        """Blocks and rows add up. AssertionError otherwise."""
        self.scheduler.check_integrity()

    def _admit(self, request: Request, sink: Sink) -> None:
        if self.open(request, sink):
            self.scheduler.add(request)

    def _abort(self, request_id: str) -> None:
        handed = self._handover is not None and self._handover.abort(request_id)
        if not handed:
            self.scheduler.remove(request_id)
        self.emit(RequestEvent(request_id=request_id, finish_reason=FinishReason.ABORT))

    def _deliver(self, state: RequestState) -> None:
        taken = state.finish_reason is None and self._handover is not None and self._handover.takes(state)
        info: dict[str, Any] = {}
        if state.finish_reason is not None or taken:
            info["num_preemptions"] = state.num_preemptions
        self.emit(
            RequestEvent(
                request_id=state.request_id,
                token_ids=(state.tokens[-1],),
                finish_reason=state.finish_reason,
                info=info,
            )
        )

    def _too_long(self, request: Request) -> RaykError | None:
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        if not request.prompt_token_ids:
            return UserError(f"request {request.request_id} has an empty prompt")
        if num_tokens > self.scheduler.max_positions:
            return UserError(
                f"prompt of {len(request.prompt_token_ids)} + max_tokens {request.sampling.max_tokens} "
                f"exceeds the model's {self.scheduler.max_positions} positions"
            )
        needed = self.manager.max_request_blocks(num_tokens, self.scheduler.max_batch_tokens)
        available = self.manager.pool.num_blocks - 1
        if needed > available:
            return UserError(
                f"{num_tokens} tokens need {needed} KV blocks; the engine's pool has {available}",
                mend="raise engine.num_blocks",
            )
        return None

    def _busy(self) -> bool:
        runnable = self.scheduler.has_work and not self._stalled
        return bool(runnable or self._calls or self._stopping)

    def _watching(self) -> bool:
        return self._handover is not None and self._handover.needs_gather()


def dead_engine(engine: str, error: BaseException) -> EngineDied:
    """What an exception that ended a loop looks like to clients."""
    if isinstance(error, EngineDied):
        return error
    return EngineDied(engine=engine, cause=f"{type(error).__name__}: {error}")
