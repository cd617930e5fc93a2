"""A prefill and a decode engine in this process, without Ray: two ThreadEngines, agents, a hand-over.

with Pair.open(model, tp=(1, 2), layouts=("BHLNC", "LBNHC")) as pair:
    outputs = pair.generate(prompts, max_tokens=8)
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rayk.actors.diagnosis import blocks_of, first_of, locate_command, name_holder
from rayk.engine.build import RequestResult, ThreadEngine
from rayk.engine.leader import RequestEvent
from rayk.engine.rank import EngineRank
from rayk.engine.stats import rank_stats
from rayk.engine.stopping import Decode
from rayk.handover.commands import Capture, Connect, Describe, Diagnose
from rayk.handover.extension import TransferExtension
from rayk.handover.handover import TransferHandover
from rayk.handover.transfer_metrics import watch_handover
from rayk.metrics import Meter
from rayk.models.families import read_config
from rayk.parallel.shard import EngineShape, engine_shape
from rayk.transfer.agent import TransferAgent
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.rank import TransferRank
from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.transfer.token_classes import ONE_CLASS, common_classes
from rayk.types.config import EngineConfig
from rayk.types.errors import KVMismatch
from rayk.types.request import Request, SamplingParams

MakeAgent = Callable[[str], TransferAgent]
MakeMeter = Callable[[str, int], Meter]
_PAIRS = itertools.count()

POISON = 0x7F
"""The byte caches are filled with: as float32 a huge number, so that reading it shows."""
HANG_S = 600.0
"""Longer than pytest lets a test take: what never comes ends with the stacks of all threads, and a machine
that stands still for a minute ends nothing."""
NAN_POISON = -1
"""As float32 a NaN: also what is multiplied by zero shows."""


def shape_of(config: EngineConfig) -> EngineShape:
    """How an engine divides its model."""
    return engine_shape(config, read_config(Path(config.model)).num_layers)


def local_agents(delay_polls: int = 0) -> MakeAgent:
    """Agents of one new network."""
    network = LocalNetwork()
    return lambda name: LocalAgent(name, network, delay_polls)


def make_request(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int = 24,
    *,
    ignore_eos: bool = True,
    **sampling: object,
) -> Request:
    """A greedy request."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling),  # type: ignore[arg-type]
    )


@dataclass(eq=False)
class Side:
    """One engine with its hand-over."""

    engine: ThreadEngine
    handover: TransferHandover
    only: Sequence[TransferExtension] | None = None
    """Some of the ranks; None for all."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds now."""
        return self.engine.leader.manager.pool.num_free_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out at all."""
        return self.engine.leader.manager.pool.num_blocks - 1

    def has_all_blocks(self) -> bool:
        """Whether nobody holds any. Raises what the engine died of."""
        if self.engine.error is not None:
            raise self.engine.error
        return self.num_free_blocks == self.num_blocks

    @property
    def extensions(self) -> list[TransferExtension]:
        """Each rank's."""
        if self.only is not None:
            return list(self.only)
        return [e for e in self.engine.extensions if isinstance(e, TransferExtension)]

    def call(self, command: object) -> list[object]:
        """Run a command on every rank."""
        return self.engine.leader.call(command).result(HANG_S)

    def run(self, action: Callable[[], object]) -> object:
        """Run something on the loop's thread and wait for it."""
        answer: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.engine.leader.post(lambda: answer.put(action()))
        return answer.get(timeout=HANG_S)


@dataclass(eq=False)
class Pair:
    """Two connected engines; `prefill` makes tickets, `decode` takes them."""

    p: Side
    d: Side
    is_push: bool = False
    _ids: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    @contextmanager
    def open(
        cls,
        model: Path | tuple[Path, Path],
        *,
        tp: tuple[int, int] = (1, 1),
        layouts: tuple[str, str] = ("auto", "auto"),
        make_agent: MakeAgent | None = None,
        lease_s: float = 60.0,
        renewed_lease_s: float | None = None,
        connect: bool = True,
        poison: int = NAN_POISON,
        load_decoder: Callable[[], Decode] | None = None,
        load_vocabulary: Callable[[], str] | None = None,
        push: bool = False,
        push_layers: int | None = None,
        make_meter: MakeMeter | None = None,
        changes: tuple[dict[str, object], dict[str, object]] = ({}, {}),
        **common: object,
    ) -> Iterator[Pair]:
        """`common` and, per side, `changes` go to the EngineConfigs. `push`: P writes, `push_layers` layers
        at a time. `make_meter`: by engine and rank, where they report."""
        make_agent = make_agent or local_agents()
        models = model if isinstance(model, tuple) else (model, model)
        number = next(_PAIRS)
        with ExitStack() as stack:
            configs = [
                EngineConfig(
                    model=str(models[i]),
                    tp=tp[i],
                    layout=layouts[i],
                    **({"num_blocks": 64} | common | changes[i]),  # type: ignore[arg-type]
                )
                for i in (0, 1)
            ]
            token_classes = common_classes(map(shape_of, configs))
            sides = []
            for name, config in zip(("p", "d"), configs, strict=True):
                options = {"poison": poison, "load_decoder": load_decoder, "load_vocabulary": load_vocabulary}
                options |= {"push": push, "push_layers": push_layers, "renewed_lease_s": renewed_lease_s}
                options |= {"make_meter": make_meter, "token_classes": token_classes}
                sides.append(_make_side(stack, f"{name}{number}", config, make_agent, lease_s, options))
            pair = cls(*sides, push)
            if connect:
                pair.connect()
            yield pair

    def connect(self) -> None:
        """The handshake, as the coordinator does it."""
        producers, consumers = self.p.call(Describe()), self.d.call(Describe())
        sides: Any = tuple(producers), tuple(consumers)
        landings: Any = self.d.call(Connect(*sides))
        self.p.call(Connect(*sides, tuple(landings) if self.is_push else ()))

    def start_reserve(
        self, request: Request, reserve_s: float = 20.0, hold_s: float = 60.0
    ) -> queue.SimpleQueue[RequestEvent]:
        """Ask D for blocks that P may write into (`payload`: a Reservation)."""
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        times = {"reserve_s": reserve_s, "hold_s": hold_s}
        self.d.handover.submit_reserve(request, events.put, producer=self.p.engine.name, **times)
        return events

    def reserve(self, request: Request) -> Reservation:
        """The same, to its end."""
        done = self.d.engine.collect(self.start_reserve(request))
        assert isinstance(done.payload, Reservation), done
        return done.payload

    def prefill(self, request: Request, *, capture: bool = False) -> RequestResult:
        """Run a request at P, to its ticket (`payload`)."""
        return self.p.engine.collect(self.start_prefill(request, capture=capture))

    def start_prefill(
        self, request: Request, *, capture: bool = False, reservation: Reservation | None = None
    ) -> queue.SimpleQueue[RequestEvent]:
        """The same, without waiting."""
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        more = {"capture": capture, "reservation": reservation}
        self.p.handover.submit(request, events.put, hand_over=True, **more)  # type: ignore[arg-type]
        return events

    def start_decode(
        self,
        request: Request,
        prefilled: RequestResult,
        transfer_s: float = 20.0,
        reserve_s: float = 20.0,
    ) -> queue.SimpleQueue[RequestEvent]:
        """Hand a prefilled request to D; it may wait `reserve_s` for blocks."""
        ticket = prefilled.payload
        assert isinstance(ticket, TransferTicket), prefilled
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        tokens = tuple(prefilled.token_ids)
        self.d.handover.submit_decode(request, ticket, tokens, transfer_s, events.put, reserve_s=reserve_s)
        return events

    def decode(self, request: Request, prefilled: RequestResult, transfer_s: float = 20.0) -> RequestResult:
        """Run the rest of a request at D."""
        return self.d.engine.collect(self.start_decode(request, prefilled, transfer_s))

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 24) -> list[list[int]]:
        """Output tokens of prompts that run together. Raises the first error."""
        requests = [make_request(f"r{next(self._ids)}", prompt, max_tokens) for prompt in prompts]
        return [done.token_ids for done in self.complete(requests)]

    def complete(self, requests: Sequence[Request]) -> list[RequestResult]:
        """Run requests together, to their ends, at P where they end there. Raises the first error.

        All are prefilled before the first decodes: P's pool must hold them.
        """
        reserved = [self.reserve(r) if self.is_push else None for r in requests]
        streams = [self.start_prefill(r, reservation=w) for r, w in zip(requests, reserved, strict=True)]
        found = [self.p.engine.collect(s) for s in streams]
        for request, completion in zip(requests, found, strict=True):
            if completion.payload is None:
                self.d.handover.settle(request.request_id)  # its blocks there are for nobody
        handed = [(r, c) for r, c in zip(requests, found, strict=True) if c.payload is not None]
        decoding = [(self.start_decode(r, c), c) for r, c in handed]
        for stream, completion in decoding:
            self.d.engine.collect(stream, into=completion)
        for completion in found:
            if completion.error is not None:
                raise completion.error
        return found

    def diagnose(self, request_id: str, ticket: TransferTicket) -> list[KVMismatch]:
        """After a KVMismatch, what the coordinator asks: every wrong layer's first wrong byte, in order."""
        capture = Capture(ticket.request_id, ticket.num_tokens, ticket.block_tables)
        fetched = tuple(part.rows for part in self.p.call(capture))  # type: ignore[attr-defined]
        found = self.d.call(Diagnose(request_id, fetched))
        exact = [mismatch for per_rank in found for mismatch in per_rank]  # type: ignore[attr-defined]
        return sorted(exact, key=lambda m: (m.group, m.layer, m.field, m.head, m.token))

    def explain(self, request_id: str, ticket: TransferTicket) -> KVMismatch:
        """The first wrong byte and what it is, as the coordinator tells it: the producer was asked, too."""
        first = first_of([self.diagnose(request_id, ticket)])
        assert first is not None, "both sides are equal"
        if first.found_rows:
            places = self.p.call(locate_command(first))
            holders = self.p.run(lambda: self.p.handover.holders(blocks_of(places)))  # type: ignore[arg-type]
            name_holder(first, ticket, places, holders)  # type: ignore[arg-type]
        return first

    def check_all_free(self) -> None:
        """Every block of both engines comes back, and nothing is left of any request. Raises what an engine
        died of: it gives nothing back."""
        for side in (self.p, self.d):
            wait_until(
                side.has_all_blocks,
                what=lambda side=side: (
                    f"{side.num_free_blocks} of {side.num_blocks} free in {side.engine.name}"
                ),  # type: ignore[misc]
            )
            side.run(side.engine.leader.check_integrity)
            assert side.engine.leader.manager.leases == ()
            assert not side.handover.needs_gather(), "the hand-over still waits for something"


def _make_side(
    stack: ExitStack,
    name: str,
    config: EngineConfig,
    make_agent: MakeAgent,
    lease_s: float,
    options: dict[str, Any],
) -> Side:
    handover = TransferHandover(engine=name, epoch=1, shape=shape_of(config))
    push, push_layers = options.pop("push"), options.pop("push_layers")
    renewed_lease_s = options.pop("renewed_lease_s")
    token_classes = options.pop("token_classes", ONE_CLASS)
    make_meter: MakeMeter | None = options.pop("make_meter", None)
    meters = [None if make_meter is None else make_meter(name, rank) for rank in range(config.num_ranks)]
    if make_meter is not None:
        options["make_stats"] = lambda rank, leader: rank_stats(meters[rank.comm.rank], rank, leader)
        watch_handover(meters[0], handover)

    def extension(rank: EngineRank) -> TransferExtension:
        agent = make_agent(f"{name}.{rank.comm.rank}")
        more = {"make_push_agent": lambda: make_agent(f"{name}.{rank.comm.rank}-push")} if push else {}
        made = TransferExtension(
            rank,
            agent,
            engine=name,
            epoch=1,
            lease_s=lease_s,
            renewed_lease_s=renewed_lease_s,
            push_layers=push_layers,
            meter=meters[rank.comm.rank],
            token_classes=token_classes,
            **more,
        )
        stack.callback(made.close)
        return made

    engine = ThreadEngine(
        config, name=name, make_extension=extension, handover=handover, timeout_s=HANG_S, **options
    )
    return Side(stack.enter_context(engine), handover)


class Clock:
    """What `time.monotonic_ns` tells meanwhile: a test may set it forward, so that a lease or a deadline of
    minutes is over when the test says so, and on no machine before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real, self._ahead_ns = time.monotonic_ns, 0
        monkeypatch.setattr(time, "monotonic_ns", self.monotonic_ns)
        monkeypatch.setitem(TransferRank.__init__.__kwdefaults__, "clock", self.monotonic_ns)  # type: ignore[index]

    def monotonic_ns(self) -> int:
        """Now."""
        return self._real() + self._ahead_ns

    def go_on(self, seconds: float) -> None:
        """So much later."""
        self._ahead_ns += int(seconds * 1e9)


def wait_until(
    condition: Callable[[], bool], timeout_s: float = HANG_S, what: Callable[[], str] = lambda: "a condition"
) -> None:
    """Poll until it holds. AssertionError after the timeout."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"not within {timeout_s} s: {what()}"
        time.sleep(0.001)
