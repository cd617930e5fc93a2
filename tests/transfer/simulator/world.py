"""A whole world: prefill engines, a decode engine, a coordinator, and a verdict on how it went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from rayk.handover.fault_injection import exchanged_blocks
from rayk.sched.recovery import Cause, Failure, Migrate, Recompute, Recovery, attempt_id, cause_of
from rayk.transfer.plan import plan_transfer
from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.types.errors import (
    EngineDied,
    HandshakeMismatch,
    RaykError,
    TransferError,
)
from rayk.types.fault_table import FailurePolicy, Fault
from rayk.types.verdicts import verdict_of
from tests.transfer.simulator.consumer import Consumer
from tests.transfer.simulator.core import Clock, Engine
from tests.transfer.simulator.memory import Memory
from tests.transfer.simulator.network import Network
from tests.transfer.simulator.producer import Producer
from tests.transfer.simulator.ranks import descriptions
from tests.transfer.simulator.request_state import GRAVEST, RequestState
from tests.transfer.simulator.requests import Job, Model, right_token

NUM_PRODUCERS = 2
HEALTH = 40
"""An engine that says nothing for so long is ended."""
FORM_AGAIN = 30
"""An engine that is to be restarted is there again after so long."""
CONTROL = 60
"""A call that has no answer by then is lost."""
STAGE = 380
"""A request that makes no step for so long has failed there."""
REQUEST_DEADLINE = 2000
HANDSHAKE_TRIES = 3
Message = TypeVar("Message", Reservation, TransferTicket)
LAYOUT_PAIRS = (("BHLNC", "BHLNC"), ("LBNHC", "BHLNC"))
"""Of the prefill engines and the decode engine."""


class World(Clock):
    """`abort`: a user gives up the first request at a random time."""

    def __init__(
        self,
        seed: int,
        faults: Sequence[Fault] = (),
        *,
        mode: str = "pull",
        policy: FailurePolicy = "fail",
        abort: bool = False,
        tracing: bool = False,
    ) -> None:
        super().__init__(seed, faults, tracing=tracing)
        draw = self.random.random
        self.mode = mode
        self.policy: FailurePolicy = policy
        self.model = Model(self.random.choice(("full", "window", "state")))
        self.blocks_free_at = int(draw() * 70) if draw() < 0.5 else 0
        """When the decode engine begins to have blocks."""
        self.network = Network(self)
        self.lives: dict[tuple[str, int], Engine] = {}
        self._tp = 1 + int(draw() * 2), 1 + int(draw() * 2)
        self._layouts = self.random.choice(LAYOUT_PAIRS)
        self.producers = [self._form_producer(i, 0) for i in range(NUM_PRODUCERS)]
        self.consumer = self._form_consumer(0)
        self._forming: set[str] = set()
        """Names of engines that are to be there again."""
        self._shaken: dict[tuple[Engine, Engine], int] = {}
        """(producer, consumer) -> tries of their handshake, still without an answer."""
        self._met: set[tuple[Engine, Engine]] = set()
        """Those of which the decode engine knows the prefill engine."""
        self._connected: set[tuple[Engine, Engine]] = set()
        self._begun = False
        self.deaths: list[EngineDied] = []
        self.num_preempted = 0
        self.refusal: RaykError | None = None
        """The handshake's."""
        num = 1 if draw() < 0.6 else 2
        self.requests = [
            RequestState(i, 3 + int(draw() * 10), Recovery(policy, NUM_PRODUCERS)) for i in range(num)
        ]
        self._abort_at = int(draw() * 120) if abort else None
        for pending in self.faults:
            if pending.fault.point in ("post", "mid_transfer"):
                # A world with one read or write has no second one to strike.
                pending.nth = min(pending.nth, num * self._num_reads() - 1)

    # The world's end.

    def run(self) -> World:
        """Until all is over."""
        for producer in self.producers:
            self._shake_hands(producer)
        if self._abort_at is not None:
            self.at(self._abort_at, self._abort, self.requests[0])
        self.go()
        return self

    def _num_reads(self) -> int:
        """Reads, or writes, that a request takes at least."""
        producers, consumers = (
            [caches.geometry for caches in engine.memory.caches]
            for engine in (self.producers[0], self.consumer)
        )
        return sum(len(plan_transfer(producers, consumer).reads) for consumer in consumers)

    @property
    def engines(self) -> list[Engine]:
        """All lives of all engines."""
        return list(self.lives.values())

    @property
    def all_faults_hit(self) -> bool:
        """Whether every fault has struck."""
        return all(fault.has_hit for fault in self.faults)

    @property
    def is_recovered(self) -> bool:
        """Whether any request was saved."""
        return any(r.is_recovered and r.error is None for r in self.requests)

    def verdict(self) -> str:
        """As of a cell: the gravest finding. A transfer that failed because an engine died is that death's
        consequence; and under a policy that recovers, a death is a finding only if a request was lost."""
        errors = [r.error for r in self.requests if r.error is not None]
        errors += [self.refusal] if self.refusal is not None else []
        dead = bool(self.deaths) and (self.policy == "fail" or bool(errors))
        found = ["ENGINE_ERROR"] if dead else []
        causes = [cause_of(error, producer="", consumer="") for error in errors]
        consequences = (Cause.TRANSFER,) if dead else ()
        found += [verdict_of(e) for e, c in zip(errors, causes, strict=True) if c not in consequences]
        return min(found, key=GRAVEST.index, default="PASS")

    def producer_of(self, ticket: TransferTicket) -> Producer:
        """The life of a producer engine that a ticket is of."""
        producer = self.lives[ticket.engine, ticket.epoch]
        assert isinstance(producer, Producer)
        return producer

    # Handshakes.

    def _shake_hands(self, producer: Producer) -> None:
        pair = producer, self.consumer
        self._shaken[pair] = self._shaken.get(pair, 0) + 1
        kind = self.strike("handshake", *pair)
        delay = {"delay": 25, "reorder": 9}.get(kind or "", 0)
        if kind != "drop" and producer.runs:
            self.at(delay + 1, self.call, "", self.consumer, self._connect, pair, kind == "corrupt")
        if kind == "duplicate":
            self.at(delay + 5, self.call, "", self.consumer, self._connect, pair, False)
        self.at(CONTROL, self._shake_again, pair, self._shaken[pair])

    def _connect(self, pair: tuple[Producer, Consumer], is_corrupt: bool) -> None:
        """At the decode engine, which compares what it is told with its own."""
        producer, consumer = pair
        if pair in self._met:
            return
        told = descriptions(producer.ranks)
        if is_corrupt:
            told = [replace(d, fingerprint={"weights": "others"}) for d in told]
        try:
            consumer.connect(told)
        except HandshakeMismatch as error:
            self.call(consumer.name, None, self._on_refused, error)
            return
        self._met.add(pair)
        self.call(consumer.name, producer, self._connect_back, pair)

    def _connect_back(self, pair: tuple[Producer, Consumer]) -> None:
        """At the prefill engine."""
        pair[0].connect(descriptions(pair[1].ranks))
        self.call(pair[0].name, None, self._on_connected, pair)

    def _on_refused(self, error: RaykError) -> None:
        self.refusal = error
        self._give_up_all(error)

    def _on_connected(self, pair: tuple[Producer, Consumer]) -> None:
        self.log(f"{pair[0].name} and {pair[1].name} have shaken hands")
        self._connected.add(pair)
        if not self._begun and all((p, self.consumer) in self._connected for p in self.producers):
            self._begun = True
            for request in self.requests:
                self.at(int(self.random.random() * 8), self._start, request)
        else:
            for request in self.requests:
                if request.stage == "waiting" and self._begun:
                    self._start(request)

    def _shake_again(self, pair: tuple[Producer, Consumer], tries: int) -> None:
        if pair in self._connected or self._shaken[pair] != tries or self.refusal is not None:
            return
        if not (pair[0].alive and pair[1].alive):
            return
        if tries < HANDSHAKE_TRIES:
            self._shake_hands(pair[0])
        else:
            self._give_up_all(TransferError("", "no handshake"))

    def _give_up_all(self, error: RaykError) -> None:
        for request in self.requests:
            if request.stage != "over":
                self._end(request, error)

    # Requests.

    def _start(self, request: RequestState) -> None:
        """Place it, first or again, at the producer that is its own or else the next that lives."""
        if request.stage != "waiting":
            return
        producer = request.producer or self.producers[request.index % NUM_PRODUCERS]
        self._place(request, self.producers[self.producers_index(producer)])

    def producers_index(self, producer: Engine) -> int:
        """Which prefill engine a life is of."""
        return int(producer.name[1:])

    def _place(self, request: RequestState, producer: Producer) -> None:
        if (producer, self.consumer) not in self._connected:
            request.producer, request.stage = producer, "waiting"
            return
        job_id = attempt_id(f"r{request.index}", request.stream.attempt)
        job = Job(job_id, request.index, request.num_tokens, request.stream.attempt)
        request.job, request.producer, request.consumer = job, producer, self.consumer
        self.log(f"coordinator: {job.job_id} ({job.num_tokens} tokens) on {producer.name}")
        if self.mode == "push":
            self._go_to(request, "reserving")
            self.call("", self.consumer, self.consumer.reserve, job, producer)
        else:
            self._go_to(request, "prefilling")
            self.call("", producer, producer.prefill, job, None)

    def _go_to(self, request: RequestState, stage: str) -> None:
        request.stage = stage
        request.step += 1
        self.at(STAGE, self._late, request, request.step)

    def _late(self, request: RequestState, step: int) -> None:
        if request.step == step and request.stage not in ("over", "waiting"):
            assert request.job is not None
            self._fail(request, TransferError(request.job.job_id, f"no answer while {request.stage}"))

    def _of(self, job: Job, *stages: str) -> RequestState | None:
        """The request, if this attempt is the one that is followed, at one of these stages."""
        request = self.requests[job.prompt]
        return request if request.job is job and request.stage in stages else None

    def on_reserved(self, job: Job, reservation: Reservation) -> None:
        """A consumer has blocks: now its prompt can be computed."""
        request = self._of(job, "reserving")
        if request is None:
            return
        producer = request.producer
        assert producer is not None
        self._go_to(request, "prefilling")
        self._send(reservation, request, producer, lambda arrived: producer.prefill(job, arrived))

    def on_prefilled(self, job: Job, token: int, ticket: TransferTicket) -> None:
        """A producer has computed a prompt."""
        request = self._of(job, "prefilling")
        if request is None:
            return
        self._deliver_tokens(request, job, 0, (token,))
        consumer = request.consumer
        assert consumer is not None
        self._go_to(request, "decoding")
        delivered = len(request.stream.token_ids)
        if self.mode == "push":
            self.call("", consumer, consumer.decode, job, ticket, delivered)
        else:
            self._send(ticket, request, consumer, lambda arrived: consumer.decode(job, arrived, delivered))

    def _send(
        self, message: Message, request: RequestState, to: Engine, act: Callable[[Message], None]
    ) -> None:
        """A call that carries block tables: the point `reserve`."""
        assert request.producer is not None
        assert request.consumer is not None
        kind = self.strike("reserve", request.producer, request.consumer)
        if kind == "drop":
            return
        if kind in ("delay", "reorder"):
            self.at(25 if kind == "delay" else 9, self.call, "", to, act, message)
            return
        if kind == "corrupt":
            message = replace(message, block_tables=exchanged_blocks(message.block_tables))
        self.call("", to, act, message)
        if kind == "duplicate":
            self.at(12, self.call, "", to, act, message)

    def on_tokens(self, job: Job, first: int, tokens: tuple[int, ...]) -> None:
        """A consumer has sampled."""
        request = self._of(job, "decoding", "computing")
        if request is not None:
            self._deliver_tokens(request, job, first, tokens)

    def _deliver_tokens(self, request: RequestState, job: Job, first: int, tokens: tuple[int, ...]) -> None:
        for token in request.stream.take(job.attempt, first, tokens):
            index = len(request.stream.token_ids) - 1
            self.log(f"user: token {index} of r{request.index} is {token}")
            if token != right_token(request.index, index):
                self.violate(f"a wrong token was delivered: {index} of r{request.index} is {token}")

    def on_finished(self, job: Job) -> None:
        """A consumer is through."""
        request = self._of(job, "decoding", "computing")
        if request is not None:
            self._end(request, None)

    def on_failed(self, job: Job, error: RaykError) -> None:
        """An engine cannot go on with a job."""
        request = self._of(job, "reserving", "prefilling", "decoding", "computing")
        if request is not None:
            self._fail(request, error)

    def note_recovery(self, job: Job) -> None:
        """A consumer goes on by itself after a failure."""
        self.requests[job.prompt].is_recovered = True

    def note_valid(self, job: Job, num_valid: int) -> None:
        """A consumer goes on after so many tokens of KV."""
        self.requests[job.prompt].num_valid = num_valid

    # Failures.

    def _fail(self, request: RequestState, error: RaykError) -> None:
        job, producer, consumer = request.job, request.producer, request.consumer
        assert job is not None
        assert producer is not None
        assert consumer is not None
        self.log(f"coordinator: {job.job_id} failed: {error}")
        for engine in (producer, consumer):
            self.call("", engine, engine.abort, job.job_id)
        cause = cause_of(error, producer=producer.name, consumer=consumer.name)
        lost = consumer if cause is Cause.CONSUMER_LOST else None
        if lost is not None and lost.name in self._forming:
            request.stage, request.job = "waiting for the decode engine", None
            request.error = error
            return
        self._decide(request, error, cause)

    def _decide(self, request: RequestState, error: RaykError, cause: Cause) -> None:
        producer = request.producer
        assert producer is not None
        failure = Failure(cause, self.producers_index(producer))
        decision = request.recovery.decide(
            failure,
            producers_live=[p.alive or p.name in self._forming for p in self.producers],
            consumer_lives=self.consumer.alive,
        )
        match decision:
            case Recompute(_):
                self._begin_again(request)
                job_id = attempt_id(f"r{request.index}", request.stream.attempt)
                request.job = Job(job_id, request.index, request.num_tokens, request.stream.attempt)
                request.consumer = self.consumer
                self._go_to(request, "computing")
                delivered = len(request.stream.token_ids)
                self.call("", self.consumer, self.consumer.compute, request.job, delivered)
            case Migrate(index):
                self._begin_again(request)
                self._place(request, self.producers[index])
            case _:
                self._end(request, error)

    def _begin_again(self, request: RequestState) -> None:
        request.stream.begin_again()
        request.is_recovered = True
        request.error = None

    def _end(self, request: RequestState, error: RaykError | None) -> None:
        request.stage, request.error = "over", error
        request.ended += 1
        request.ended_at = self.now
        self.log(f"coordinator: r{request.index} is over: {error or 'finished'}")

    def _abort(self, request: RequestState) -> None:
        if request.stage == "over":
            return
        request.is_aborted = True
        if request.job is not None:
            for engine in (request.producer, request.consumer):
                assert isinstance(engine, Producer | Consumer)
                self.call("", engine, engine.abort, request.job.job_id)
        self._end(request, None)

    # Lives.

    def lose(self, engine: Engine, kind: str) -> None:
        if not engine.runs:
            return
        if kind == "restart":
            self._forming.add(engine.name)
        if kind == "stop":
            engine.stopped = True
            self.at(HEALTH, self._on_gone, engine)
        else:
            self.end_engine(engine)
            self.at(4 + int(self.random.random() * 7), self._on_gone, engine)

    def _on_gone(self, engine: Engine) -> None:
        """The coordinator is certain: it hears of the end, or ends what is silent."""
        self.end_engine(engine)
        engine.stopped = False
        again = engine.name in self._forming
        if self._begun or not again:
            self.deaths.append(EngineDied(engine.name, "a rank is gone"))
        if again:
            self.at(FORM_AGAIN, self._form_again, engine)
        if isinstance(engine, Producer):
            self.call("", self.consumer, self.consumer.on_producer_gone, engine)
        if not self._begun and not again:
            self._give_up_all(self.deaths[-1])
        error = EngineDied(engine.name, "a rank is gone")
        for request in self.requests:
            if self._needs(request, engine):
                self._fail(request, error)
            elif request.stage == "waiting" and request.producer is engine and not again:
                self._decide(request, error, Cause.PRODUCER_LOST)

    def _needs(self, request: RequestState, engine: Engine) -> bool:
        if request.stage in ("over", "waiting") or request.job is None:
            return False
        # From the ticket on, the consumer finds out by itself what it has.
        at_work = request.stage in ("reserving", "prefilling") and request.producer is engine
        return at_work or request.consumer is engine

    def _form_again(self, lost: Engine) -> None:
        self._forming.discard(lost.name)
        self.log(f"{lost.name} is formed again")
        if isinstance(lost, Producer):
            index = self.producers_index(lost)
            self.producers[index] = self._form_producer(index, lost.epoch + 1)
            self._shake_hands(self.producers[index])
            for request in self.requests:
                if request.producer is lost and request.stage == "waiting":
                    request.producer = self.producers[index]
            return
        self.consumer = self._form_consumer(lost.epoch + 1)
        for producer in self.producers:
            if producer.alive:
                self._shake_hands(producer)
        for request in self.requests:
            if request.stage == "waiting for the decode engine":
                assert request.error is not None
                self._decide(request, request.error, Cause.CONSUMER_LOST)

    def _form_producer(self, index: int, epoch: int) -> Producer:
        name, tp = f"p{index}", self._tp[0]
        memory = Memory(f"{name}/{epoch}", self.model, self._layouts[0], tp, self.violate)
        producer = Producer(self, name, epoch, tp, memory)
        self.lives[name, epoch] = producer
        return producer

    def _form_consumer(self, epoch: int) -> Consumer:
        memory = Memory(f"d/{epoch}", self.model, self._layouts[1], self._tp[1], self.violate)
        consumer = Consumer(self, "d", epoch, self._tp[1], memory)
        self.lives["d", epoch] = consumer
        return consumer
