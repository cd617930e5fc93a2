"""Engines behind a host tier decide as simulated ones do, turn by turn: what is stored, loaded, swapped."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.loop import EngineLoop
from rayk.handover.commands import Connect, Describe, TicketPart
from rayk.handover.handover import TransferHandover
from rayk.handover.tier_side import facts_of
from rayk.models.families import load_config
from rayk.models.kv_specs import tier_groups
from rayk.offload.host import HostTier
from rayk.offload.messages import LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.offload.tier_parts import TierParts
from rayk.oracle.tiny import HYBRID
from rayk.simulate import SimOutcome, cell_arrivals, simulate_cell
from rayk.simulate import engine as sim_engine
from rayk.simulate.extension import SimExtension
from rayk.simulate.tier import SimTier, SimTierProcess
from rayk.simulate.tokens import TokenRule
from rayk.specs import Cell
from rayk.transfer.handshake import like_engine
from rayk.transfer.lease import ReleaseMessage
from rayk.transfer.local_agent import LocalNetwork
from rayk.transfer.ticket import TransferTicket
from tests.markers import one_per
from tests.simulate.cells import BOOK, sim_cell
from tests.simulate.replay import HeldAgent, RealSide, Watched

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_blocks": 26},
    "qwen3-hybrid": {"num_blocks": 40},
}
TIER_TURNS = 6
"""So many a real tier may take for what a simulated one does in one: it reads, then looks at generations."""


def tier_state(tier: HostTier) -> list[object]:
    pool = tier.manager.pool
    counts = {name: num for name, num in tier.counts.items() if num}
    return [pool.num_free_blocks, pool.num_cached_blocks, sorted(tier._kept), sorted(counts.items())]


@dataclass
class Recording:
    acts: list[tuple[str, str, Any]] = field(default_factory=list)
    """(engine, or host, what, of what), in order."""
    outcome: SimOutcome = field(default_factory=SimOutcome)


def record(monkeypatch: pytest.MonkeyPatch, *args: Any, **settings: Any) -> Recording:
    """Simulate a cell (arguments: simulate_cell's), noting what its engines and its tier are told and do."""
    found = Recording()
    acts = found.acts
    stored: dict[str, list[str]] = {}

    class Loop(EngineLoop):
        def __init__(self, rank: Any, extension: Any, leader: Any, **more: Any) -> None:
            self.name, self.watched = leader._handover._engine, Watched(rank, extension, leader.manager)
            super().__init__(rank, extension, leader, **more)

        def turn(self) -> bool:
            stored[self.name] = []
            going_on = super().turn()
            acts.append((self.name, "turn", (self.watched.take(), stored[self.name])))
            return going_on

    take_stored, submit, tier_turn = SimExtension._take_stored, TransferHandover.submit, SimTierProcess._turn
    take, reach, come_back, begin = SimExtension.take, SimTier._reach, SimTier._return, TokenRule.begin

    def took(self: SimExtension, now_ns: int) -> Iterator[tuple[str, TicketPart]]:
        for name, part in take_stored(self, now_ns):
            stored[self.name].append(name)
            yield name, part

    def submitted(self: Any, *args: Any, **how: Any) -> None:
        acts.append((self._engine, "submit", (args, how)))
        submit(self, *args, **how)

    def turned(self: SimTierProcess) -> None:
        tier_turn(self)
        acts.append(("host", "turn", tier_state(self.tier)))

    def news(self: SimExtension, message: Any) -> None:
        if isinstance(message, ReleaseMessage):
            acts.append((self.name, "news", message.lease_id))
        take(self, message)

    def reached(self: SimTier, action: Any) -> None:
        acts.append((self._engine.name, "ask", None))
        reach(self, action)

    def returned(self: SimTier, done: Any, answer: Any) -> None:
        acts.append((self._engine.name, "answer", _key(answer)))
        come_back(self, done, answer)

    def began(self: TokenRule, request_id: str, **how: Any) -> None:
        acts.append(("", "begin", (request_id, how)))
        begin(self, request_id, **how)

    with monkeypatch.context() as patched:
        patched.setattr(sim_engine, "EngineLoop", Loop)
        patched.setattr(SimExtension, "_take_stored", took)
        patched.setattr(SimExtension, "take", news)
        patched.setattr(TransferHandover, "submit", submitted)
        patched.setattr(SimTierProcess, "_turn", turned)
        patched.setattr(SimTier, "_reach", reached)
        patched.setattr(SimTier, "_return", returned)
        patched.setattr(TokenRule, "begin", began)
        found.outcome = simulate_cell(*args, **settings)
    return found


def _key(answer: StoreAnswer | LoadAnswer) -> tuple[str, str]:
    return ("store", answer.name) if isinstance(answer, StoreAnswer) else ("load", answer.request_id)


class HandTier:
    """Implements handover.tier_side.Tier: asks and answers wait until they are delivered."""

    def __init__(self) -> None:
        self.asks: deque[Callable[[HostTier], object]] = deque()
        self.answers: dict[tuple[str, str], list[Callable[[], None]]] = {}

    def store(self, ask: StoreRequest, done: Callable[[StoreAnswer], None]) -> None:
        self.asks.append(lambda tier: tier.store(ask, lambda answer: self._keep(done, answer)))

    def load(self, ask: LoadRequest, done: Callable[[LoadAnswer], None]) -> None:
        self.asks.append(lambda tier: tier.load(ask, lambda answer: self._keep(done, answer)))

    def drop(self, kept_as: str) -> None:
        self.asks.append(lambda tier: tier.drop(kept_as))

    def doubt(self, ticket: TransferTicket) -> None:
        raise AssertionError(f"nothing differs: {ticket}")

    def _keep(self, done: Callable[[Any], None], answer: Any) -> None:
        self.answers.setdefault(_key(answer), []).append(lambda: done(answer))


class HeldDigesting:
    """Stores are told of when the simulation was told."""

    def __init__(self) -> None:
        self.made: dict[str, TicketPart] = {}
        self.wanted: list[str] = []

    def begin(self, name: str, digest: Callable[[], TicketPart]) -> None:
        self.made[name] = digest()

    def take(self) -> tuple[Any, Any]:
        wanted, self.wanted = self.wanted, []
        return tuple((name, self.made.pop(name)) for name in wanted), ()

    def close(self) -> None:
        """Nothing is under way."""


def replay(recording: Recording, cell: Cell, path: Path) -> dict[str, RealSide]:
    """Have real engines and a real tier do what was recorded; raises AssertionError at the first turn that
    differs."""
    network, model = LocalNetwork(), load_config(path)
    rule, limits, clock = TokenRule(model), cell.deadlines, lambda: 0
    settings = cell.spec.offload.settings(transfer_s=limits.transfer_s, request_s=limits.request_s)
    assert settings is not None
    settings = settings.on("cpu")
    sides, tiers, digesting = {}, {}, {}
    for name in (f"prefill{i}" for i in range(cell.num_prefill_engines)):
        side = sides[name] = RealSide(name, cell, cell.prefill, network, rule, offload=settings, clock=clock)
        digesting[name] = side.extensions[0]._digesting = HeldDigesting()  # type: ignore[assignment]
    described = {name: tuple(side.execute(Describe())) for name, side in sides.items()}
    groups = tier_groups(cell.prefill, model, settings)
    agent = HeldAgent("tier", network)
    like = like_engine(next(iter(described.values())))
    parts = TierParts.open(agent, groups, like, settings, epoch=1, clock=clock)
    tier, inbox = HostTier(parts, settings, clock=clock), deque()
    for name, side in sides.items():
        tier.attach(described[name])
        side.execute(Connect((tier.description,), described[name]))
        tiers[name] = HandTier()
        assert side.handover.offloading is not None
        side.handover.offloading.attach(tiers[name], facts_of(tier))
    for number, (name, what, of) in enumerate(recording.acts):
        if what == "begin":
            rule.begin(of[0], **of[1])
        elif what == "submit":
            (request, _), how = of
            sides[name].handover.submit(request, sides[name].hear, **how)
        elif what == "ask":
            inbox.append(tiers[name].asks.popleft())
        elif what == "answer":
            answer = tiers[name].answers[of].pop(0)
            sides[name].leader.post(answer)
        elif what == "news":
            for one in (agent, *(a for s in sides.values() for a in s.agents)):
                one.deliver(of)
        elif name == "host":
            while inbox:
                inbox.popleft()(tier)
            for _ in range(TIER_TURNS):
                tier.turn()
            assert tier_state(tier) == of, f"act {number}: a turn of the tier"
        else:
            kept, stored = of
            digesting[name].wanted = stored
            sides[name].turn()
            assert sides[name].watched.take().text() == kept.text(), f"act {number}: a turn of {name}"
    tier.check_integrity()
    for side in sides.values():
        side.leader.check_integrity()
        side.close()
    tier.close()
    return sides


@pytest.fixture(scope="session")
def model_of(checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        family, _, hybrid = name.partition("-")
        return checkpoint(family, overrides=dict(HYBRID)) if hybrid else checkpoint(family)

    return make


def prompts(seed: int, num: int = 14) -> list[tuple[int, ...]]:
    """Some begin alike."""
    draw = random.Random(seed)
    prefixes = [tuple(draw.randrange(3, 200) for _ in range(24)) for _ in range(2)]
    return [
        draw.choice(prefixes)[: draw.choice([0, 8, 24])]
        + tuple(draw.randrange(3, 200) for _ in range(draw.randrange(1, 30)))
        for _ in range(num)
    ]


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("name", list(KINDS))
@one_per()
def test_what_is_stored_loaded_and_swapped_is_equal(
    name: str, num_engines: int, model_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_of(name)
    cell = sim_cell(
        load_config(path),
        model=str(path),
        prefill={"num_engines": num_engines},
        engine={"max_batch_tokens": 12, "max_seqs": 4, "prefix_caching": True, **KINDS[name]},
        offload={"host_gib": 0.0015, "block_size": 8, "load": "always", "swap": "always"},
        dtype="float32",
        sampling={"max_tokens": 14},
    )
    found: dict[str, int] = {}
    for seed in range(3):
        asked = prompts(seed)
        draw = random.Random(seed)
        due_ns = sorted(draw.randrange(60_000_000) for _ in asked)
        arrivals = cell_arrivals(cell, asked, due_ns=due_ns)
        recording = record(monkeypatch, cell, load_config(path), arrivals, BOOK, fast=False)
        assert [row.error for row in recording.outcome.requests] == [None] * len(asked)
        for side in replay(recording, cell, path).values():
            assert side.handover.offloading is not None
            for key, num in side.handover.offloading.counts.items():
                found[key] = found.get(key, 0) + num
    assert min(found.get(key, 0) for key in ("stores", "loads", "swaps")) > 0, found
