"""Put an engine together: leader from a rank, and a whole engine whose ranks are threads of this process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rayk.engine.leader import Handover, Leader, RequestEvent, dead_engine
from rayk.engine.loop import EngineLoop, NoExtension, RankExtension
from rayk.engine.paced import PacedLeader, PacedRank, paced_poll_s
from rayk.engine.rank import EngineRank
from rayk.engine.speculation import make_drafting
from rayk.engine.stats import StepStats
from rayk.engine.stopping import Decode, LazyDecoder
from rayk.engine.warm_up import WARM_UP_S
from rayk.grammars import Grammars
from rayk.kv.manager import KVCacheManager
from rayk.models.drafters.draft_kv import draft_kv_of
from rayk.models.weights import OpenWeights, WeightReader
from rayk.parallel.comm import Comm
from rayk.parallel.threads import ThreadComm
from rayk.parallel.timed import timed
from rayk.sched.batching import Scheduler
from rayk.types.config import EngineConfig
from rayk.types.errors import DeadlineExceeded, EngineDied, RaykError
from rayk.types.paced_tokens import PacedTokens
from rayk.types.request import FinishReason, Request, TokenLogprobs


def make_rank(config: EngineConfig, comm: Comm, **named: Any) -> EngineRank:
    """Make a rank that computes, or one that keeps the time of a cost table. Takes, and raises, what they
    do."""
    return (PacedRank if config.compute == "paced" else EngineRank)(config, comm, **named)


def make_leader(
    rank: EngineRank,
    handover: Handover | None = None,
    load_decoder: Callable[[], Decode] | None = None,
    load_vocabulary: Callable[[], str] | None = None,
) -> Leader:
    """Make rank 0's scheduler, block manager and leader. `load_decoder` makes the model's tokenizer,
    `load_vocabulary` reads it in the form of tokenizer.json."""
    config, model = rank.config, rank.model_config
    draft_kv = "none"
    if config.speculative is not None:
        draft_kv = draft_kv_of(config.speculative, rank.drafter_config, model, config.dtype)
    manager = KVCacheManager(
        rank.plan.groups,
        config.num_blocks,
        prefix_caching=config.prefix_caching,
        looks_ahead=rank.drafter_config is not None and rank.drafter_config.takes_hidden,
    )
    scheduler = Scheduler(
        manager,
        max_batch_tokens=config.max_batch_tokens,
        max_seqs=config.max_seqs,
        max_positions=model.max_positions,
        eos_token_ids=model.eos_token_ids,
        num_stages=config.pp,
        drafting=make_drafting(config, manager, draft_kv=draft_kv, most_positions=_most_positions(rank)),
    )
    make: Callable[..., Leader] = Leader
    if isinstance(rank, PacedRank):
        tokens = PacedTokens(model.vocab_size, model.eos_token_ids)
        make = partial(PacedLeader, tokens=tokens, pace=rank.pace)
    return make(
        scheduler,
        manager,
        handover,
        vocab_size=model.vocab_size,
        positions_text=model.positions_text,
        decoder=LazyDecoder(load_decoder),
        grammars=Grammars(load_vocabulary, model.vocab_size, model.eos_token_ids),
        fast_prefill=config.fast_prefill,
        rejects=config.speculative is not None and config.speculative.accept == "rejection",
        poll_s=paced_poll_s(config),
    )


def _most_positions(rank: EngineRank) -> int | None:
    """Return the positions of a smaller model that drafts, which may have fewer than the model."""
    drafter = rank.drafter_config
    return drafter.decoder.max_positions if drafter is not None and drafter.method == "draft" else None


@dataclass
class RequestResult:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, if asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RaykError | None = None
    payload: object = None
    info: dict[str, Any] = field(default_factory=dict)

    def take(self, event: RequestEvent) -> None:
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = event.finish_reason or self.finish_reason
        self.stop_reason = event.stop_reason if event.stop_reason is not None else self.stop_reason
        self.error = event.error or self.error
        self.payload = event.payload or self.payload
        self.info |= event.info.told() if event.info is not None else {}


class ThreadEngine:
    """Runs an engine in this process, one thread per rank: for tests and for machines without Ray. Leaving
    the context stops the threads and raises what ended one of them."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str = "engine",
        make_extension: Callable[[EngineRank], RankExtension] | None = None,
        handover: Handover | None = None,
        load_decoder: Callable[[], Decode] | None = None,
        load_vocabulary: Callable[[], str] | None = None,
        poison: int | None = None,
        timeout_s: float = 60.0,
        make_stats: Callable[[EngineRank, Leader | None], StepStats] | None = None,
        open_weights: OpenWeights = WeightReader,
    ) -> None:
        """`make_stats`: makes what counts a rank's turns; rank 0 has the leader. `open_weights` is as in
        load_decoder."""
        self.name = name
        self.timeout_s = timeout_s
        self.ranks: list[EngineRank] = [None] * config.num_ranks  # type: ignore[list-item]
        self.extensions: list[RankExtension] = [NoExtension()] * config.num_ranks
        self.loops: list[EngineLoop] = [None] * config.num_ranks  # type: ignore[list-item]
        self.error: RaykError | None = None
        self._failed_rank = 0  # the rank of `error`
        self._config = config
        self._make_extension = make_extension
        self._handover = handover
        self._load_decoder, self._load_vocabulary = load_decoder, load_vocabulary
        self._poison = poison
        self._make_stats = make_stats
        self._open_weights = open_weights
        self._ready = threading.Barrier(config.num_ranks + 1)
        self._failing = threading.Lock()
        start_s = self._start_s = timeout_s + (WARM_UP_S if config.device.startswith("cuda") else 0)
        comms = ThreadComm.make_group(config.num_ranks, timeout_s)
        self._threads = [
            threading.Thread(target=self._run, args=(comm,), name=f"{name}/r{comm.rank}", daemon=True)
            for comm in comms
        ]
        for thread in self._threads:
            thread.start()
        try:
            self._ready.wait(start_s)
        except threading.BrokenBarrierError:
            # A thread that still frees its tensors when the interpreter ends would abort the process.
            self._join()
            raise self.error or DeadlineExceeded(f"start of {name}", start_s) from None

    def __enter__(self) -> ThreadEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, request: Request) -> queue.SimpleQueue[RequestEvent]:
        """Start a request; its events come out of the queue."""
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self.leader.submit(request, events.put)
        return events

    def generate(self, requests: Iterable[Request]) -> list[RequestResult]:
        return [self.collect(events) for events in [self.submit(r) for r in requests]]

    def collect(
        self, events: queue.SimpleQueue[RequestEvent], into: RequestResult | None = None
    ) -> RequestResult:
        """Wait for a request's last event; `into` holds what it left elsewhere. Raises DeadlineExceeded."""
        done = into or RequestResult()
        while True:
            try:
                event = events.get(timeout=self.timeout_s)
            except queue.Empty:
                raise DeadlineExceeded(f"a request on {self.name}", self.timeout_s) from None
            done.take(event)
            if event.is_last:
                return done

    def close(self) -> None:
        """Stop the loops. Raises the error that ended one early, DeadlineExceeded when one does not end."""
        self.leader.stop()
        stuck = self._join()
        if self.error is not None:
            raise self.error
        if stuck:
            raise DeadlineExceeded(f"the end of {', '.join(stuck)}", self.timeout_s)

    def _join(self) -> list[str]:
        """Wait for the threads; returns the names of those that did not end within `timeout_s`."""
        until = time.monotonic() + self.timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _run(self, comm: Comm) -> None:
        leader: Leader | None = None
        try:
            watched = timed(comm) if self._make_stats is not None else comm
            rank = make_rank(self._config, watched, poison=self._poison, open_weights=self._open_weights)
            extension = self._make_extension(rank) if self._make_extension else NoExtension()
            if comm.rank == 0:
                tokenizer = (self._load_decoder, self._load_vocabulary)
                leader = self.leader = make_leader(rank, self._handover, *tokenizer)
            stats = self._make_stats(rank, leader) if self._make_stats is not None else None
            loop = EngineLoop(rank, extension, leader, stats=stats)
            self.ranks[comm.rank], self.extensions[comm.rank], self.loops[comm.rank] = rank, extension, loop
            self._ready.wait(self._start_s)
            loop.run()
            if leader is not None:
                leader.fail(EngineDied(engine=self.name, cause="stopped"))
        except threading.BrokenBarrierError:
            return
        except Exception as error:  # noqa: BLE001 - a thread must hand every error to its owner
            self._on_error(error, comm.rank, leader)
        finally:
            # Peers that wait for this rank must not wait out their timeout.
            comm.close()

    def _on_error(self, error: Exception, rank: int, leader: Leader | None) -> None:
        with self._failing:
            # The first error is the cause; those of peers that lost this rank follow from it.
            if self.error is None:
                self._failed_rank = rank
                self.error = error if isinstance(error, RaykError) else dead_engine(self.name, error, rank)
        self._ready.abort()
        if leader is not None:
            leader.fail(dead_engine(self.name, self.error, self._failed_rank))
