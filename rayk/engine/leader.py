"""Rank 0's side of an engine: requests in, turns out, tokens to their sinks.

All state belongs to the loop's thread. Other threads `post` a closure, which runs at the next turn; that is
how requests, aborts and commands come in. What happens to a request beyond this engine (a hand-over to
another one) is a Handover's business.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rayk.engine.event_info import EventInfo
from rayk.engine.loop import Turn, TurnResult
from rayk.engine.sampling import PendingTokens, sample_step
from rayk.engine.stopping import LazyDecoder, StopStrings
from rayk.grammars import Grammars, OutputGrammar
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.sched.request_state import RequestState
from rayk.types.admission import bad_sampling, no_prompt_logprobs, outside_vocabulary, seeded
from rayk.types.batch import ScheduledBatch, StepTokens
from rayk.types.bugs import bug, may_be_the_machine
from rayk.types.clock import Clock, host_clock
from rayk.types.drafting import DraftPlan
from rayk.types.errors import EngineDied, InternalError, NotFiniteError, RaykError, UserError
from rayk.types.request import FinishReason, Request, SamplingParams, TokenLogprobs
from rayk.types.waiting import get_within

if TYPE_CHECKING:
    import torch

HEARTBEAT_S = 0.05  # an idle engine turns this often
BUSY_POLL_S = 0.0003  # how often an engine with transfers or leases, but no step to run, turns
QUICK_S = 0.1  # after this long without news of them it turns only every `SLOW_POLL_S`
SLOW_POLL_S = 0.003


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestEvent:
    """News of one request for its sink. The last event of a request has a reason, error or payload."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token of `token_ids`, if asked for
    # once, at the end of prefill, if asked for: one per prompt token; the first has none
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    # the stop string or token id behind finish_reason stop; None for the model's own EOS
    stop_reason: str | int | None = None
    error: RaykError | None = None
    payload: object = None  # a transfer ticket
    info: EventInfo | None = None  # None: no more than the tokens, as of most
    time_ns: int = field(default_factory=host_clock)

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.payload is not None


Sink = Callable[[RequestEvent], None]


class Handover(Protocol):
    """Moves requests between engines. Every method runs on the loop's thread."""

    def attach(self, leader: Leader) -> None:
        """Called once, before the first turn."""

    def wants_next(self, request_id: str) -> bool:
        """Tell whether a request may leave, or is looked at, when it has sampled its next token: nothing is
        computed of it until then."""

    def takes(self, state: RequestState) -> bool:
        """Tell whether this unfinished request, which just sampled a token, leaves the engine now; its blocks
        are then taken over."""

    def commands(self) -> tuple[object, ...]:
        """List commands for the next turn; their results come to `absorb` in the same order."""

    def step_commands(self, batch: ScheduledBatch) -> tuple[object, ...]:
        """List what ranks must know before they compute this step, which they execute just before; without
        results."""

    @property
    def has_commands(self) -> bool:
        """Whether `commands` has something for the ranks, so that the next turn should come at once."""
        ...

    def needs_gather(self) -> bool:
        """Tell whether polls of all ranks matter now."""

    def absorb(self, results: tuple[tuple[object, ...], ...], polls: tuple[object, ...]) -> None:
        """Take, per rank, results of the last `commands()`, and the poll."""

    def inspect(self, error: NotFiniteError, num_tokens: int) -> None:
        """Find out more about a request that left the scheduler with KV of `num_tokens` tokens in its blocks,
        give these back, and tell its sink."""

    def abort(self, request_id: str) -> bool:
        """Stop a hand-over in progress; False if there is none."""

    def holds(self, request_id: str) -> bool:
        """Tell whether anything of a request of this id is still here."""

    def fail_all(self, error: RaykError) -> None: ...


class Leader:
    """Implements loop.TurnSource over a Scheduler and a KVCacheManager."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: KVCacheManager,
        handover: Handover | None = None,
        *,
        vocab_size: int | None = None,
        positions_text: str | None = None,
        decoder: LazyDecoder | None = None,
        grammars: Grammars | None = None,
        fast_prefill: bool = False,
        rejects: bool = False,
        clock: Clock = host_clock,
        poll_s: float = BUSY_POLL_S,
    ) -> None:
        """`vocab_size`: prompts with other ids are refused; None takes all. `positions_text`: the
        scheduler's limit in words. `decoder`: for stop strings. `grammars`: for structured outputs.
        `fast_prefill`: there are no logits of prompt tokens. `rejects`: drafts are verified by rejection.
        `clock`: what the hand-over and stamps of requests go by. `poll_s`: how often it turns while transfers
        are under way and no step can run."""
        self.scheduler = scheduler
        self.manager = manager
        self.clock = clock
        self._poll_s = poll_s
        self._handover = handover
        self._vocab_size = vocab_size
        self._positions_text = positions_text or f"the model's {scheduler.max_positions} positions"
        self._decoder = decoder or LazyDecoder(None)
        self._grammars = grammars or Grammars(None, vocab_size or 0)
        self._fast_prefill = fast_prefill
        self._rejects = rejects
        self._last_sampling: SamplingParams | None = None
        """The last that were found to be in range."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._calls: list[tuple[object, Future[list[object]]]] = []
        self._calls_of_turn: list[tuple[object, Future[list[object]]]] = []
        self._num_handover_commands = 0
        self._stopping = False
        self._stalled = False
        self._dead: RaykError | None = None
        self._death = threading.RLock()  # held while it dies, and by what comes after, on any thread
        self._last_news_s = 0.0
        self.num_ended: Counter[str] = Counter()  # by finish reason, error or handed_over
        self.num_not_finite = 0  # requests that failed because logits or KV were not finite
        if handover is not None:
            handover.attach(self)

    # Any thread.

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread at its next turn; once that has ended, here and now."""
        with self._death:
            if self._dead is None:
                self._inbox.put(action)
            else:
                action()

    def submit(self, request: Request, sink: Sink) -> None:
        """Run a request here from its first token. Problems reach the sink as an error event."""
        self.prepare(request)
        self.post(lambda: self._admit(request, sink))

    def prepare(self, request: Request) -> None:
        """Do what takes long for a request that comes, on the caller's thread, not the loop's."""
        if self._bad_sampling(request.sampling) is None:  # `open` says what is wrong to the sink
            with contextlib.suppress(UserError):
                self._make_ready(request.sampling)

    def _bad_sampling(self, sampling: SamplingParams) -> UserError | None:
        """Find the first parameter that is out of its range. Many requests may share those of the last."""
        if sampling is self._last_sampling:
            return None
        error = bad_sampling(sampling)
        if error is None:
            self._last_sampling = sampling
        return error

    def _make_ready(self, sampling: SamplingParams) -> None:
        """Load what the request's output is watched with. Raises UserError."""
        if sampling.stop:
            self._decoder.get()
        if sampling.structured_outputs is not None:
            self._grammars.compile(sampling.structured_outputs)

    def abort(self, request_id: str) -> None:
        """Stop a request; its sink gets finish_reason abort. Unknown ids are over already."""
        self.post(lambda: self._abort(request_id))

    def call(self, command: object) -> Future[list[object]]:
        """Run a command on every rank; the future holds each rank's result (or raises its RaykError)."""
        future: Future[list[object]] = Future()

        def submit() -> None:
            if self._dead is not None:
                future.set_exception(self._dead)
            else:
                self._calls.append((command, future))

        self.post(submit)
        return future

    def stop(self) -> None:
        """Let the loop end after its current turn."""

        def stop() -> None:
            self._stopping = True

        self.post(stop)

    def fail(self, error: RaykError) -> None:
        """The loop ended with `error`: tell every sink and every waiting call. From the loop's thread."""
        with self._death:
            self._dead = error
            if self._handover is not None:
                self._handover.fail_all(error)
            for request_id in list(self._sinks):
                self.emit(RequestEvent(request_id=request_id, error=error))
            for _, future in self._calls + self._calls_of_turn:
                if not future.done():
                    future.set_exception(error)
            while not self._inbox.empty():
                self._inbox.get_nowait()()  # they see _dead

    # The loop's thread.

    def wait(self) -> None:
        """Run what was posted; when there is nothing to do, wait a heartbeat for it."""
        patience_s = self._patience()
        if not patience_s and self._inbox.empty():
            return
        try:
            action = get_within(self._inbox, patience_s)
        except queue.Empty:
            return
        self._last_news_s = time.monotonic()
        action()
        self.run_posted()

    def run_posted(self) -> None:
        """Run what was posted, and wait for nothing."""
        while not self._inbox.empty():
            self._inbox.get_nowait()()

    def plan(self) -> Turn:
        """Plan the next turn: posted commands, the hand-over's commands, and the scheduler's batch."""
        own = self._handover.commands() if self._handover is not None else ()
        batch = self.scheduler.schedule()
        for state in self.scheduler.take_admitted():
            state.first_step_ns = state.first_step_ns or self.clock()
        step_commands: tuple[object, ...] = ()
        if self._handover is not None and batch is not None:
            step_commands = self._handover.step_commands(batch)
        self._num_handover_commands = len(own)
        self._calls_of_turn, self._calls = self._calls, []
        commands = (*own, *(command for command, _ in self._calls_of_turn))
        drafting = self.scheduler.drafting
        self._stalled = batch is None and self.scheduler.has_work
        return Turn(
            batch=batch,
            rollbacks=() if drafting is None else drafting.take_rollbacks(),
            commands=commands,
            step_commands=step_commands,
            gather=bool(commands) or self._watching(),
            stop=self._stopping,
        )

    def sample(
        self, batch: ScheduledBatch, logits: torch.Tensor, prompt_logits: Iterable[torch.Tensor]
    ) -> PendingTokens:
        """Choose the step's tokens by each request's sampling parameters."""
        states = self.scheduler.scheduled(batch)
        return sample_step(batch, states, logits, prompt_logits, rejects=self._rejects)

    def absorb(self, turn: Turn, result: TurnResult) -> None:
        """Hand results to whoever asked."""
        if turn.gather:
            # Before a step's tokens: its commands ran first, and a finished request's sink is closed.
            self._absorb_gathered(result)
        if any(news is not None for news in result.polls):
            self._note_news()

    def settle(self, batch: ScheduledBatch, tokens: StepTokens) -> None:
        """Hand a step's tokens to sinks and finished requests out."""
        if tokens.not_finite:
            self._fail_not_finite(batch, tokens)
        sampled = tokens.token_ids, tokens.prompt_logprobs, tokens.accepted
        for state in self.scheduler.update(batch, *sampled):
            if isinstance(state.form, OutputGrammar) and state.form.error is not None:
                self._fail_form(state, state.form.error)
            else:
                self._deliver(state, tokens.logprobs.get(state.request_id))
        self._note_news()

    def plan_drafts(self, batch: ScheduledBatch) -> DraftPlan:
        """Say what the drafter on ranks does after this step, of which all was told."""
        return self.scheduler.plan_drafts(batch)

    def take_proposals(
        self, proposals: Sequence[Sequence[int]], drawn_from: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Keep what it proposed for the next steps."""
        assert self.scheduler.drafting is not None
        self.scheduler.drafting.take(proposals, drawn_from)

    def must_settle(self) -> bool:
        """Tell whether the tokens of the steps so far must be known before the next one is planned."""
        return self.scheduler.needs_settling or any(map(needs_last_token, self.scheduler.sampling))

    def _note_news(self) -> None:
        self._last_news_s = time.monotonic()
        self._stalled = False

    def emit(self, event: RequestEvent, *, ends: bool = True) -> None:
        """Give an event to its request's sink; the last one closes it. It also ends what was asked of the
        request unless `ends` is false."""
        sink = self._sinks.get(event.request_id)
        if sink is None:
            return
        if event.is_last:
            del self._sinks[event.request_id]
            self.num_not_finite += isinstance(event.error, NotFiniteError)
            if ends:
                self.num_ended[_how_ended(event)] += 1
        sink(event)

    def open(
        self, request: Request, sink: Sink, max_tokens: int | None = None, *, prefilled: bool = False
    ) -> bool:
        """Register a sink, or refuse: engine dead, id in use, or a request that can never run here.

        `max_tokens`: how many are generated here, if not all that the request asks for. `prefilled`: all
        that is told of its prompt was told elsewhere.
        """
        error: RaykError | None = self._dead
        if error is None and self._is_in_use(request.request_id):
            error = UserError(f"request id {request.request_id} is in use")
        if error is None:
            error = self._bad_input(request)
        if error is None and self._fast_prefill and not prefilled:
            error = no_prompt_logprobs(request)
        if error is None:
            error = self._too_long(request, max_tokens or request.sampling.max_tokens)
        if error is not None:
            self.num_ended["error"] += 1
            sink(RequestEvent(request_id=request.request_id, error=error))
            return False
        self._sinks[request.request_id] = sink
        return True

    def start(
        self,
        request: Request,
        output_token_ids: Sequence[int] | None = None,
        num_computed: int | None = None,
        *,
        submitted_ns: int | None = None,
        first_info: dict[str, Any] | None = None,
    ) -> None:
        """Queue an opened request; with the tokens chosen elsewhere so far, when its KV is in its blocks:
        all of the prompt's, or that of its first `num_computed` tokens. Without such tokens, these are a part
        of the prompt that a cache had. `submitted_ns`: when it came to this
        engine, if its first token is to tell; `first_info`: what else that is to tell."""
        request = seeded(request)
        if output_token_ids is None and num_computed is not None:
            state = self.scheduler.add_cached(request, num_computed)
            self.manager.remember(request.request_id, state.tokens, state.num_computed, request.cache_salt)
        elif output_token_ids is None:
            state = self.scheduler.add(request)
        else:
            state = self.scheduler.add_prefilled(request, output_token_ids, num_computed)
            self.manager.remember(request.request_id, state.tokens, state.num_computed, request.cache_salt)
        state.submitted_ns, state.first_info = submitted_ns, first_info or {}
        state.waits_for_token = self._handover is not None and self._handover.wants_next(request.request_id)
        if request.sampling.stop:
            state.stop_text = StopStrings(self._decoder.get(), request.sampling.stop)
            for token in state.output_token_ids:
                state.stop_text.feed(token)  # a stop string may have begun in them
        if request.sampling.structured_outputs is not None:
            state.form = self._grammars.begin(request.sampling.structured_outputs, state.output_token_ids)

    def forget(self, state: RequestState) -> None:
        """Forget the blocks of a request's tokens, whoever computed them, and whether or not the request has
        them still."""
        if self.manager.prefixes is not None:
            keys = self.manager.prefixes.make_keys(state.request.cache_salt)
            keys.extend(state.tokens, len(state.tokens))
            self.manager.forget(self.manager.prefixes.holding(keys))

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and rows add up."""
        self.scheduler.check_integrity()

    def _admit(self, request: Request, sink: Sink) -> None:
        if self.open(request, sink):
            self.start(request)

    def _abort(self, request_id: str) -> None:
        self._drop(request_id)
        self.emit(RequestEvent(request_id=request_id, finish_reason=FinishReason.ABORT))

    def _drop(self, request_id: str) -> None:
        handed = self._handover is not None and self._handover.abort(request_id)
        if not handed:
            self.scheduler.remove(request_id)

    def _deliver(self, state: RequestState, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Tell of the tokens that a request just got."""
        is_handed_over = self._handover is not None and self._handover.takes(state)
        state.waits_for_token = False
        info = begin_times(state)
        if state.finish_reason is not None or is_handed_over:
            info["num_preemptions"] = state.num_preemptions
            info["num_swaps"] = state.num_swaps
            info["num_recomputed_tokens"] = state.num_recomputed_tokens
            if state.num_cached_tokens is not None:
                info["num_cached_tokens"] = state.num_cached_tokens
            if state.request.sampling.temperature:
                info["seed"] = state.request.sampling.seed
            if state.drafts is not None:
                info["drafted_at"] = tuple(state.drafts.drafted_at)
                info["accepted_at"] = tuple(state.drafts.accepted_at)
            if self.scheduler.drafting is not None:
                info |= self.scheduler.drafting.told(state)
        prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, None
        self.emit(
            RequestEvent(
                request_id=state.request_id,
                token_ids=tuple(state.tokens[-state.num_new :]),
                logprobs=None if logprobs is None else tuple(logprobs[: state.num_new]),
                prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
                finish_reason=state.finish_reason,
                stop_reason=state.stop_reason,
                info=EventInfo(**info) if info else None,
            )
        )

    def _fail_not_finite(self, batch: ScheduledBatch, tokens: StepTokens) -> None:
        """End the requests whose logits are not finite, and keep nothing of them."""
        for share, state in zip(batch.requests, self.scheduler.scheduled(batch), strict=True):
            request_id = share.request_id
            num_tokens = share.num_computed_tokens + len(share.token_ids) - share.num_drafts
            if request_id not in tokens.not_finite or state.row is None:
                continue  # aborted while the step ran
            if self.scheduler.drafting is not None:
                self.scheduler.drafting.reject(state, share)  # its states are looked at
            self.forget(state)
            error = NotFiniteError(request_id, f"logits at token {num_tokens - 1} are")
            # Of a prompt whose logits are told, stages may still compute the tokens behind this one.
            self.scheduler.remove(request_id, then=partial(self._end_not_finite, error, num_tokens))

    def _end_not_finite(self, error: NotFiniteError, num_tokens: int) -> None:
        """Give back the blocks of a request that left the scheduler, and tell its sink."""
        if self._handover is not None:
            self._handover.inspect(error, num_tokens)
            return
        self.manager.free(error.request_id)
        self.emit(RequestEvent(request_id=error.request_id, error=error))

    def _fail_form(self, state: RequestState, problem: str) -> None:
        """End a request whose output cannot be held to its form: the last token may not fit."""
        self._drop(state.request_id)
        mend = "a simpler schema, expression or grammar"
        error = UserError(f"request {state.request_id}: structured output: {problem}", mend=mend)
        self.emit(RequestEvent(request_id=state.request_id, error=error))

    def _absorb_gathered(self, result: TurnResult) -> None:
        n = self._num_handover_commands
        if self._handover is not None:
            self._handover.absorb(tuple(r[:n] for r in result.results), result.polls)
        for i, (_, future) in enumerate(self._calls_of_turn):
            answers = [per_rank[n + i] for per_rank in result.results]
            error = next((a for a in answers if isinstance(a, RaykError)), None)
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(answers)
        self._calls_of_turn = []

    def _is_in_use(self, request_id: str) -> bool:
        # An aborted request's sink is gone before its blocks and reads are.
        held = self.scheduler.holds(request_id)
        held = held or (self._handover is not None and self._handover.holds(request_id))
        return held or request_id in self._sinks

    def _bad_input(self, request: Request) -> UserError | None:
        """Find what would otherwise end the engine, or be ignored."""
        if not request.prompt_token_ids:
            return UserError(f"request {request.request_id} has an empty prompt")
        error = self._bad_sampling(request.sampling)
        if error is None:
            try:
                self._make_ready(request.sampling)
            except UserError as missing:
                error = missing
        if error is not None or self._vocab_size is None:
            return error
        return self._outside_vocabulary(request.prompt_token_ids, self._vocab_size)

    def _outside_vocabulary(self, prompt: Sequence[int], vocab_size: int) -> UserError | None:
        return outside_vocabulary(prompt, vocab_size)

    def _too_long(self, request: Request, max_tokens: int) -> UserError | None:
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        if num_tokens > self.scheduler.max_positions:
            return UserError(
                f"prompt of {len(request.prompt_token_ids)} + max_tokens {request.sampling.max_tokens} "
                f"exceeds {self._positions_text}"
            )
        # The last token is never fed back: it needs no place.
        num_tokens = len(request.prompt_token_ids) + max_tokens - 1
        needed = self.manager.max_request_blocks(num_tokens, self.scheduler.max_batch_tokens)
        available = self.manager.pool.num_blocks - 1
        if needed > available:
            return UserError(
                f"{num_tokens} tokens need {needed} KV blocks; the engine's pool has {available}",
                mend="raise engine.num_blocks",
            )
        return None

    def _busy(self) -> bool:
        drafting = self.scheduler.drafting
        runnable = self.scheduler.has_work and not self._stalled
        runnable = runnable or (drafting is not None and drafting.has_rollbacks)
        asked = self._calls or self._stopping or (self._handover is not None and self._handover.has_commands)
        return bool(runnable or self.scheduler.num_in_flight or asked)

    def _patience(self) -> float:
        """Choose the seconds to wait for something to do."""
        if self._busy():
            return 0.0
        if not self._watching():
            return HEARTBEAT_S
        is_quick = time.monotonic() - self._last_news_s < QUICK_S
        return self._poll_s if is_quick else max(self._poll_s, SLOW_POLL_S)

    def _watching(self) -> bool:
        return self._handover is not None and self._handover.needs_gather()


def needs_last_token(state: RequestState) -> bool:
    """Tell whether a request's last token must be known before its engine's next step is planned: where the
    host scores or counts tokens, or says which may follow. One that draws, or that stop strings may end,
    needs it a step later."""
    sampling = state.request.sampling
    is_formed = sampling.structured_outputs is not None
    return sampling.logprobs is not None or sampling.has_penalty or is_formed


def begin_times(state: RequestState) -> dict[str, Any]:
    """Give, once with a request's first news, when it came, what it waited for, and when a step first took
    it."""
    times = {"submitted_ns": state.submitted_ns, "first_step_ns": state.first_step_ns}
    info = {} if state.is_reported else {name: ns for name, ns in times.items() if ns is not None}
    if not state.is_reported:
        info |= state.first_info
    state.is_reported = True
    return info


def _how_ended(event: RequestEvent) -> str:
    if event.error is not None:
        return "error"
    return "handed_over" if event.finish_reason is None else str(event.finish_reason)


def dead_engine(engine: str, error: BaseException, rank: int) -> EngineDied | InternalError:
    """Turn an exception that ended the loop of `rank` into what clients see. A bug is logged here, and stays
    one: its requests would meet it again elsewhere."""
    if isinstance(error, EngineDied | InternalError):
        return error
    if isinstance(error, RaykError) or may_be_the_machine(error):
        return EngineDied(engine=engine, cause=f"{type(error).__name__}: {error}", rank=rank)
    return bug(f"the loop of {engine} rank {rank}", error)
