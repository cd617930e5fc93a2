"""A host tier under anything in any order: stores, loads, kept sequences, refusals, faults, ends of engines.

After every step its blocks add up; whatever it gives is right, byte by byte; in the end nobody holds a block.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rayk.offload.messages import LoadAnswer, StoreAnswer
from rayk.transfer.faulty_agent import reuse_early
from rayk.transfer.ticket import TransferTicket
from tests.markers import one_per, slow, sweep
from tests.offload.cluster import BareNode, ByteEngine, Kind, Tables, open_node
from tests.offload.test_tier import Clock, Faults
from tests.transfer.cluster import Values
from tests.transfer_faults import flip_bit

MAX_TOKENS = 200
SHARED_TOKENS = 80
"""First tokens that half of all sequences have in common."""
NUM_SEQUENCES = 6
KINDS = (
    Kind(),
    Kind(tp=2, layout="LBHNC", block_size=32, state_block_size=48),
    Kind(tp=4, layout="BLHNC", state_block_size=64),
)
NUM_STEPS = 80


class Text:
    """What sequences hold: bytes of every position, equal where all tokens up to there are."""

    def __init__(self, node: BareNode) -> None:
        self.node = node
        self.rows: dict[tuple[int, int, str, str], np.ndarray] = {}
        for branch in range(NUM_SEQUENCES + 1):
            rng = np.random.default_rng(branch)
            for (layer, part), spec in node.make(16, 16).items():
                for f in spec.fields():
                    shape = (f.units, MAX_TOKENS, f.row_bytes)
                    self.rows[branch, layer, part, f.name] = rng.integers(0, 256, shape, dtype=np.uint8)

    def tokens(self, sequence: int, num_tokens: int) -> tuple[int, ...]:
        """Sequences of even numbers begin alike."""
        shared = SHARED_TOKENS if sequence % 2 == 0 else 0
        return tuple(i if i < shared else 10_000 * (1 + sequence) + i for i in range(num_tokens))

    def values(self, sequence: int, num_tokens: int) -> Values:
        content = {}
        for (layer, part), spec in self.node.make(16, 16).items():
            live = np.array(spec.live_rows(num_tokens), dtype=np.int64)
            common = (live < SHARED_TOKENS) & (sequence % 2 == 0)
            for f in spec.fields():
                own, shared = (self.rows[b, layer, part, f.name][:, live] for b in (sequence, NUM_SEQUENCES))
                found = np.where(common[None, :, None], shared, own)
                content[layer, part, f.name] = torch.from_numpy(found)
        return Values(num_tokens, content)


@dataclass(eq=False)
class Under:
    """A store that is under way: its engine does nothing else."""

    engine: ByteEngine
    ticket: TransferTicket
    tables: Tables
    sequence: int
    num_tokens: int
    found: list[StoreAnswer]
    keep_as: str | None
    may_fail: bool = False


@dataclass(eq=False)
class Walk:
    node: BareNode
    faults: Faults
    clock: Clock
    rng: random.Random
    has_room: bool
    """Whether nothing is ever evicted."""
    stored: dict[int, int] = field(default_factory=dict)
    """Sequence -> tokens of it that must be there."""
    kept: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Name -> sequence, tokens and engine."""
    under: list[Under] = field(default_factory=list)
    offers: list[tuple[LoadAnswer, int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.engines = [self.node.add(kind) for kind in KINDS]
        self.text = Text(self.node)
        self.numbers = 0

    @property
    def keeps_all(self) -> bool:
        """Whether every row lives on."""
        return all(spec.live_step == 0 for spec in self.node.make(16, 16).values())

    def run(self, num_steps: int) -> None:
        steps: list[tuple[Callable[[], None], int]] = [
            (self.store, 6),
            (self.store_and_wait, 4),
            (self.keep, 3),
            (self.load, 6),
            (self.load_kept, 3),
            (self.offer, 3),
            (self.take_offer, 3),
            (self.finish_stores, 4),
            (self.pass_time, 4),
            (self.drop, 1),
            (self.clear, 1),
            (self.changed_ticket, 1),
            (self.another_life, 1),
            (self.flip_in, 2),
            (self.flip_out, 2),
            (self.reuse, 2),
            (self.detach, 1),
            (self.expire, 1),
        ]
        actions, weights = zip(*steps, strict=True)
        for action in self.rng.choices(actions, weights, k=num_steps):
            action()
            self.check()
        self.finish_stores()
        self.expire()
        for name in list(self.kept):
            self.node.tier.drop(name)
        self.node.expect_idle()

    def check(self) -> None:
        """Blocks add up, and are held by what is known to be under way."""
        tier = self.node.tier
        tier.check_integrity()
        status = tier.status()
        assert status["num_kept"] == len(self.kept)
        assert status["num_lent"] == len(self.offers)
        open_stores = sum(not u.found for u in self.under)
        assert (status["num_used_blocks"] > 0) <= (open_stores + len(self.kept) + len(self.offers) > 0)

    # What is drawn.

    def free_engine(self) -> ByteEngine | None:
        busy = {u.engine.name for u in self.under}
        free = [e for e in self.engines if e.name not in busy]
        return self.rng.choice(free) if free else None

    def sequence(self) -> tuple[int, int]:
        units = MAX_TOKENS // self.node.unit_tokens
        return self.rng.randrange(NUM_SEQUENCES), self.rng.randint(1, units) * self.node.unit_tokens

    # Stores.

    def begin(self, num_tokens: int | None = None, keep_as: str | None = None) -> Under | None:
        engine = self.free_engine()
        if engine is None:
            return None
        sequence, whole = self.sequence()
        num_tokens = num_tokens or whole
        self.numbers += 1
        tables = engine.tables(num_tokens, self.numbers)
        engine.poison()
        engine.write(self.text.values(sequence, num_tokens), tables)
        ticket = self.node.ticket(engine, tables, num_tokens)
        tokens = self.text.tokens(sequence, num_tokens)
        found = self.node.begin_store(engine, ticket, tokens, keep_as=keep_as)
        under = Under(engine, ticket, tables, sequence, num_tokens, found, keep_as)
        self.under.append(under)
        return under

    def store(self) -> None:
        self.begin()

    def finish(self, under: Under) -> StoreAnswer:
        self.node.turn_until(lambda: bool(under.found), under.engine)
        self.under.remove(under)
        (answer,) = under.found
        name = "store" if answer.ok else "refused" if answer.reason.startswith("no room") else "failed"
        self.counts[name] += 1
        assert answer.ok or under.may_fail or (name == "refused" and not self.has_room), answer.reason
        if answer.ok and under.keep_as is not None:
            self.kept[under.keep_as] = under.sequence, under.num_tokens, under.engine.name
        if answer.ok:
            self.note(under.sequence, under.num_tokens)
        if not under.may_fail:
            self.node.expect_released(under.engine, under.ticket.lease_id)
        return answer

    def note(self, sequence: int, num_tokens: int) -> None:
        whole = num_tokens // self.node.unit_tokens * self.node.unit_tokens
        if whole < num_tokens and not self.keeps_all:
            return  # what is needed to go on from there may not live any more
        self.stored[sequence] = max(whole, self.stored.get(sequence, 0))

    def store_and_wait(self) -> None:
        under = self.begin()
        if under is not None:
            self.finish(under)

    def keep(self) -> None:
        self.numbers += 1
        under = self.begin(self.rng.randint(1, MAX_TOKENS), f"kept{self.numbers}")
        if under is not None:
            self.finish(under)

    def finish_stores(self) -> None:
        for under in list(self.under):
            self.finish(under)

    def drop(self) -> None:
        if self.kept:
            name = self.rng.choice(sorted(self.kept))
            self.node.tier.drop(name)
            del self.kept[name]
            self.counts["drop"] += 1

    def clear(self) -> None:
        self.finish_stores()
        self.node.tier.clear()
        self.stored.clear()
        self.counts["clear"] += 1

    # Loads.

    def check_found(self, answer: LoadAnswer, sequence: int, num_tokens: int) -> None:
        """A multiple of the unit; all that was stored where nothing was evicted. Of layers with windows a
        longer sequence does not hold what a shorter one needs."""
        known = self.stored.get(sequence, 0)
        if self.has_room and (self.keeps_all or known <= num_tokens):
            assert answer.num_tokens >= min(known, num_tokens)
        assert answer.num_tokens % self.node.unit_tokens == 0
        self.counts["hit" if answer.ticket is not None else "miss"] += 1
        self.counts["from disk"] += answer.num_disk_tokens > 0
        assert answer.lost == ()

    def take(self, answer: LoadAnswer, sequence: int, *, is_hurt: bool = False) -> None:
        engine = self.free_engine()
        if engine is None:
            self.finish_stores()
            engine = self.engines[0]
        if is_hurt:
            self.faults.agents[f"{engine.name}/0.0"].plant(flip_bit(byte=self.rng.randrange(8), bit=5))
        self.numbers += 1
        loaded = self.node.take(engine, answer, self.numbers)
        if is_hurt:
            self.faults.agents[f"{engine.name}/0.0"].heal()
            self.counts["hurt"] += any(error is not None for error in loaded.errors)
            return
        assert loaded.errors == [None] * engine.tp
        engine.check(self.text.values(sequence, answer.num_tokens), loaded.tables)

    def ask(self) -> tuple[LoadAnswer, int]:
        sequence, num_tokens = self.sequence()
        answer = self.node.ask(self.engines[0], self.text.tokens(sequence, num_tokens))
        self.check_found(answer, sequence, num_tokens)
        return answer, sequence

    def load(self) -> None:
        answer, sequence = self.ask()
        if answer.ticket is not None:
            self.take(answer, sequence)

    def flip_out(self) -> None:
        answer, sequence = self.ask()
        if answer.ticket is not None:
            self.take(answer, sequence, is_hurt=True)

    def load_kept(self) -> None:
        if not self.kept:
            return
        name = self.rng.choice(sorted(self.kept))
        sequence, num_tokens, _ = self.kept.pop(name)
        answer = self.node.ask(self.engines[0], kept_as=name)
        assert answer.num_tokens == num_tokens
        self.take(answer, sequence)
        self.counts["load_kept"] += 1

    def offer(self) -> None:
        if len(self.offers) < 2:
            answer, sequence = self.ask()
            if answer.ticket is not None:
                self.offers.append((answer, sequence))

    def take_offer(self) -> None:
        if self.offers:
            self.take(*self.offers.pop(0))
            self.counts["offer"] += 1

    def expire(self) -> None:
        """What was offered and not read comes free."""
        self.finish_stores()
        self.clock.sleep(self.node.settings.lease_s + 1)
        self.node.turn(self.engines[0])
        self.counts["expired"] += len(self.offers)
        self.offers.clear()

    # Refusals and faults.

    def pass_time(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.node.turn(self.rng.choice(self.engines))

    def _refused(self, change: Callable[[TransferTicket], TransferTicket], reason: str) -> None:
        engine = self.free_engine()
        if engine is None:
            return
        sequence, num_tokens = self.sequence()
        tables = engine.tables(num_tokens)
        ticket = change(self.node.ticket(engine, tables, num_tokens))
        found = self.node.begin_store(engine, ticket, self.text.tokens(sequence, num_tokens))
        assert reason in found[0].reason
        self.counts[reason] += 1

    def changed_ticket(self) -> None:
        self._refused(lambda t: replace(t, num_tokens=t.num_tokens, first_row=256), "changed on the way")

    def another_life(self) -> None:
        self._refused(lambda t: replace(t, epoch=7, seal=""), "not connected")

    def flip_in(self) -> None:
        """Rows around the live ones may be hit, which harms nobody: then it is stored."""
        self.finish_stores()
        agent = self.faults.agents["tier"]
        agent.plant(flip_bit(byte=self.rng.randrange(8), bit=self.rng.randrange(8)))
        under = self.begin()
        assert under is not None
        under.may_fail = True
        answer = self.finish(under)
        self.counts["flipped"] += not answer.ok
        agent.heal()

    def reuse(self) -> None:
        """An engine hands out blocks while they are read."""
        self.finish_stores()
        under = self.begin()
        assert under is not None
        if not under.found:
            under.may_fail = True
            for caches in under.engine.caches:
                reuse_early(caches, [b for b in under.tables[-1] if b][-1:])
            self.counts["reused"] += not self.finish(under).ok

    def detach(self) -> None:
        """An engine ends in the middle of whatever it does, and comes back."""
        under = self.rng.choice(self.under) if self.under else self.begin()
        engine = under.engine if under is not None else self.rng.choice(self.engines)
        self.node.tier.detach(engine.name)
        if under is not None and not under.found:
            under.may_fail = True
            self.counts["cut off"] += not self.finish(under).ok
        self.kept = {name: of for name, of in self.kept.items() if of[2] != engine.name}
        self.node.turn_until(lambda: not self.node.tier._draining, engine)
        self.node.attach(engine)
        self.counts["detach"] += 1


def walk(
    family: str,
    num_blocks: int,
    seed: int,
    num_steps: int = NUM_STEPS,
    folder: Path | None = None,
    *,
    disk_bytes: int = 1 << 30,
    queued_pages: int = 1000,
) -> Counter[str]:
    faults, clock = Faults(), Clock()
    others = {"wrap": faults, "clock": clock, "delay_polls": 2, "lease_s": 1000.0, "folder": folder}
    node = open_node(family, num_blocks=num_blocks, disk_bytes=disk_bytes, **others)
    whole = Walk(node, faults, clock, random.Random(seed), num_blocks > 500)
    if node.tier.pages is not None:
        disk = node.tier.pages._disk
        disk._max_queued = queued_pages * max(disk.identity.page_bytes)
    whole.run(num_steps)
    node.tier.close()
    if node.tier.pages is not None:
        told = node.tier.pages.status()
        assert told["state"] == "on"
        assert not any(name.startswith("bad_") for name in told), told
        whole.counts += Counter({name: told[name] for name in ("pages_evicted", "pages_dropped")})
    return whole.counts


WALKS = [
    (family, size) for family in ("full", "gpt_oss", "llama4", "granite", "deepseek") for size in (40, 900)
]
SEEN = (
    "store",
    "failed",
    "hit",
    "miss",
    "hurt",
    "load_kept",
    "offer",
    "flipped",
    "reused",
    "cut off",
    "expired",
)


@sweep(3)
@one_per()
@pytest.mark.parametrize(("family", "num_blocks"), WALKS)
def test_blocks_add_up_and_bytes_are_right_whatever_happens(family: str, num_blocks: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(4):
        counts += walk(family, num_blocks, seed)
    assert not set(SEEN) - set(counts), counts


@one_per()
@pytest.mark.parametrize("family", ["full", "gpt_oss", "granite"])
def test_with_a_disk_behind_it(family: str, tmp_path: Path) -> None:
    """Sequences that a small tier had to give up come back from there, those of an earlier walk, too."""
    counts: Counter[str] = Counter()
    for seed in range(4):
        counts += walk(family, 40, seed, folder=tmp_path)
    assert counts["from disk"] > 4, counts
    assert counts["pages_evicted"] == 0


@one_per()
@pytest.mark.parametrize(
    ("family", "disk_bytes"),
    [("full", 250_000), ("gpt_oss", 200_000), ("llama4", 250_000), ("granite", 60_000)],
)
def test_with_a_small_and_slow_disk_behind_it(family: str, disk_bytes: int, tmp_path: Path) -> None:
    """Parts of sequences are given up there, and others are never written."""
    counts: Counter[str] = Counter()
    for seed in range(4):
        counts += walk(family, 40, seed, folder=tmp_path, disk_bytes=disk_bytes, queued_pages=5)
    assert counts["from disk"] > 0
    assert min(counts["pages_evicted"], counts["pages_dropped"]) > 4, counts


@slow
@pytest.mark.parametrize(("family", "num_blocks"), WALKS)
def test_long_walks(family: str, num_blocks: int) -> None:
    for seed in range(100, 120):
        assert walk(family, num_blocks, seed, 400)["store"] > 20
