"""Nodes whose host tiers and networks misbehave, and what must hold whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rayk.actors.tier_actor import open_tier
from rayk.engine.build import RequestResult
from rayk.offload.messages import TIER, LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.transfer.faulty_agent import FaultyAgent
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.ticket import TransferTicket
from rayk.types.request import Request
from tests.offload.node import Node, NodeEngine, TierThread
from tests.pd import make_request

NUM_TOKENS = 12


@dataclass(eq=False)
class Case:
    """A model, prompts of it that share nothing, and what transformers answers to each."""

    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]

    @classmethod
    def make(cls, path: Path, reference: Any, lengths: Sequence[int], num_tokens: int = NUM_TOKENS) -> Case:
        prompts = [[4 + (37 * i + 11 * n + n * n) % 480 for n in range(k)] for i, k in enumerate(lengths)]
        outputs = reference.generate(prompts, num_tokens, ignore_eos=True)
        return cls(path, prompts, [list(o.token_ids) for o in outputs])

    def request(self, name: str, index: int) -> Request:
        return make_request(name, self.prompts[index], len(self.expected[index]))

    def complete(self, engine: NodeEngine, name: str, *indices: int) -> list[RequestResult]:
        """Run prompts together; every answer is the reference's."""
        done = engine.complete([self.request(f"{name}{i}", i) for i in indices])
        assert [d.token_ids for d in done] == [self.expected[i] for i in indices]
        return done


@dataclass(eq=False)
class FaultyAgents:
    """Local agents that faults can be planted in, by name."""

    delay_polls: int = 0
    network: LocalNetwork = field(default_factory=LocalNetwork)
    made: dict[str, FaultyAgent] = field(default_factory=dict)

    def __call__(self, name: str) -> FaultyAgent:
        self.made[name] = FaultyAgent(LocalAgent(name, self.network, self.delay_polls))
        return self.made[name]


def kill(node: Node) -> None:
    """The tier's process ends: nothing is read from it or answered, and engines hear of it."""
    epoch = node.thread.tier.description.epoch
    node.thread.close()
    for engine in node.engines:
        engine.run(partial(engine.offloading.lost, "it was killed", epoch))


def reopen(node: Node, make_agent: Callable[[str], Any]) -> None:
    """An empty tier in a dead one's place, for all engines."""
    epoch = node.thread.tier.description.epoch + 1
    config = node.engines[0].engine._config
    like = node.thread.tier.description
    node.thread = TierThread(open_tier(make_agent(f"tier{epoch}"), config, node.settings, like, epoch))
    node.stack.callback(node.thread.close)
    for engine in node.engines:
        node.attach(engine)


@dataclass(eq=False)
class PausedTier:
    """A tier whose answers wait until they are let go."""

    tier: Any
    kinds: tuple[str, ...] = ("store", "load")
    """What is not answered."""
    answers: list[Callable[[], None]] = field(default_factory=list)
    is_paused: bool = True

    @classmethod
    def before(cls, engine: NodeEngine, *kinds: str) -> PausedTier:
        """Between an engine and its tier."""
        paused = cls(engine.offloading.side.tier, kinds or ("store", "load"))
        engine.run(lambda: setattr(engine.offloading.side, "tier", paused))
        return paused

    def store(self, ask: StoreRequest, done: Callable[[StoreAnswer], None]) -> None:
        self.tier.store(ask, lambda answer: self._come("store", lambda: done(answer)))

    def load(self, ask: LoadRequest, done: Callable[[LoadAnswer], None]) -> None:
        self.tier.load(ask, lambda answer: self._come("load", lambda: done(answer)))

    def drop(self, kept_as: str) -> None:
        self.tier.drop(kept_as)

    def doubt(self, ticket: TransferTicket) -> None:
        self.tier.doubt(ticket)

    def go(self) -> None:
        """All that waits, and what comes from now on. On the loop's thread."""
        self.is_paused = False
        answers, self.answers = self.answers, []
        for answer in answers:
            answer()

    def _come(self, kind: str, answer: Callable[[], None]) -> None:
        if self.is_paused and kind in self.kinds:
            self.answers.append(answer)
        else:
            answer()


@dataclass(eq=False)
class AskedTier:
    """A tier that is looked on: what it is asked to store, and something that happens to it before."""

    node: Node
    tier: Any
    before_store: Callable[[StoreRequest], None] = lambda ask: None
    stores: list[StoreRequest] = field(default_factory=list)
    answers: list[StoreAnswer] = field(default_factory=list)

    @classmethod
    def before(cls, node: Node, engine: NodeEngine) -> AskedTier:
        """Between an engine and its tier."""
        asked = cls(node, engine.offloading.side.tier)
        engine.run(lambda: setattr(engine.offloading.side, "tier", asked))
        return asked

    def store(self, ask: StoreRequest, done: Callable[[StoreAnswer], None]) -> None:
        self.before_store(ask)
        self.stores.append(ask)

        def answered(answer: StoreAnswer) -> None:
            self.answers.append(answer)
            done(answer)

        self.tier.store(ask, answered)

    def load(self, ask: LoadRequest, done: Callable[[LoadAnswer], None]) -> None:
        self.tier.load(ask, done)

    def drop(self, kept_as: str) -> None:
        self.tier.drop(kept_as)

    def doubt(self, ticket: TransferTicket) -> None:
        self.tier.doubt(ticket)


__all__ = ["TIER", "AskedTier", "Case", "FaultyAgents", "PausedTier", "kill", "reopen"]
