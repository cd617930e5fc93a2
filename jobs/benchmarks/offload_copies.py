"""Copies that storing and loading take per block, by the layouts of engine and tier.

    python jobs/benchmarks/offload_copies.py --record

Every cell is a real store into a host tier, and a load from it, of one sequence by an engine without a model.
Run by run, what is asked of the transport must be what the plans say.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from rayk.kv.caches import allocate
from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.groups import KVCacheGroup, group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec
from rayk.offload.host import HostTier
from rayk.offload.messages import LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.offload.tier_parts import TierParts
from rayk.parallel.shard import EngineShape
from rayk.transfer.connectors import layer_views
from rayk.transfer.handshake import describe_cache
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.plan import consecutive_tables, plan_transfer
from rayk.transfer.rank import TransferRank
from rayk.transfer.staging import StagingSettings
from rayk.transfer.ticket_seal import sealed
from rayk.types.offload import OffloadSettings
from rayk.types.rows import TransferRow

ABOUT = """\
{num_layers} layers of full attention with {num_heads} heads
and {num_tokens} tokens, every block of which is full.
A cell has the copies that storing takes, and loading: per block of the smaller of both block sizes, and per
rank of the engine. One run of bytes is one copy; neighbouring blocks are not counted as one. BHLNC is the
canonical page: a rank's heads lie together, with all layers. In LBHNC and LBNHC every layer has pages of its
own.
"""
MODES = {
    "never": "Run by run",
    "auto": "As shipped: stretches are read whole and repacked on arrival where that should cost less",
}
"""Whether reads are staged -> what the table is of."""
NUM_LAYERS, NUM_HEADS, NUM_TOKENS = 6, 8, 128
LAYOUT_NAMES = ("BHLNC", "BLHNC", "LBHNC", "LBNHC")
TIER_LAYOUTS = ("BHLNC", "LBNHC")
TPS, BLOCK_SIZES, TIER_BLOCK_SIZES = (1, 2, 4), (16, 32), (16, 32)
COLUMNS = tuple(itertools.product(TIER_LAYOUTS, TIER_BLOCK_SIZES))
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Case:
    layout: str
    tp: int
    block_size: int
    tier_layout: str
    tier_block_size: int

    @property
    def num_slices(self) -> int:
        """Blocks of the smaller size that the sequence has, times ranks."""
        return NUM_TOKENS // min(self.block_size, self.tier_block_size) * self.tp


@dataclass(frozen=True)
class Copies:
    case: Case
    num_stored: int
    num_loaded: int

    def __str__(self) -> str:
        found = [n / self.case.num_slices for n in (self.num_stored, self.num_loaded)]
        return " / ".join(f"{n:g}" for n in found)


def measure(case: Case, mode: str = "never") -> Copies:
    """Store and load. AssertionError where a move run by run takes other copies than the plans say."""
    staging = StagingSettings(mode=mode)
    network = LocalNetwork()
    groups = _groups(case.block_size)
    num_blocks = 1 + NUM_TOKENS // case.block_size
    ranks = []
    for rank in range(case.tp):
        geometry = plan_rank(
            groups, LAYOUTS[case.layout], shape=EngineShape(case.tp), rank=rank, num_blocks=num_blocks
        )
        caches = allocate(geometry, torch.device("cpu"), fill=rank)
        agent = LocalAgent(f"engine.{rank}", network)
        told = describe_cache(agent, caches, engine="engine", fingerprint={})
        ranks.append(TransferRank(agent, caches, list(layer_views(caches)), told, staging=staging))
    settings = OffloadSettings(
        host_bytes=1 << 22, layout=case.tier_layout, block_size=case.tier_block_size, store_tokens=NUM_TOKENS
    )
    like = ranks[0].description
    tier_groups = _groups(case.tier_block_size)
    parts = TierParts.open(LocalAgent("tier", network), tier_groups, like, settings, staging=staging)
    tier = HostTier(parts, settings)
    engine = [rank.description for rank in ranks]
    tier.attach(engine)
    for one in ranks:
        one.connect([tier.description], engine)
    stored, loaded = _store(tier, ranks), _load(tier, ranks)
    found = Copies(case, _asked(stored), _asked(loaded))
    if mode == "never":
        sides = [rank.geometry for rank in engine], [tier.description.geometry]
        planned = _planned(*sides), _planned(*reversed(sides))
        assert (found.num_stored, found.num_loaded) == planned, f"{case}: {found} by plans {planned}"
    return found


def _groups(block_size: int) -> tuple[KVCacheGroup, ...]:
    spec = FullAttentionSpec(block_size, NUM_HEADS, 16, 16, "float16", NUM_HEADS)
    return group_layers({(layer, spec.part): spec for layer in range(NUM_LAYERS)})


def _planned(producers: Sequence[RankGeometry], consumers: Sequence[RankGeometry]) -> int:
    tables = consecutive_tables(producers[0], NUM_TOKENS), consecutive_tables(consumers[0], NUM_TOKENS)
    reads = (read for c in consumers for read in plan_transfer(producers, c).lower(NUM_TOKENS, *tables))
    return sum(read.num_descriptors for read in reads)


def _asked(rows: Sequence[TransferRow]) -> int:
    return sum(row.num_descriptors for row in rows)


def _store(tier: HostTier, ranks: Sequence[TransferRank]) -> Sequence[TransferRow]:
    tables = consecutive_tables(ranks[0].description.geometry, NUM_TOKENS)
    for rank in ranks:
        rank.lease("store", _deadline_ns())
    ticket = ranks[0].make_ticket(
        request_id="store",
        lease_id="store",
        num_tokens=NUM_TOKENS,
        block_tables=tables,
        digests=[rank.digests(NUM_TOKENS, tables) for rank in ranks],
    )
    answers: list[StoreAnswer] = []
    tier.store(StoreRequest(ticket=sealed(ticket), token_ids=tuple(range(NUM_TOKENS))), answers.append)
    _until(lambda: bool(answers), tier, ranks)
    assert answers[0].ok, answers[0].reason
    return answers[0].transfers


def _load(tier: HostTier, ranks: Sequence[TransferRank]) -> Sequence[TransferRow]:
    answers: list[LoadAnswer] = []
    ask = LoadRequest(request_id="load", token_ids=tuple(range(NUM_TOKENS)), max_tokens=NUM_TOKENS)
    tier.load(ask, answers.append)
    ticket = answers[0].ticket
    assert ticket is not None, answers[0].reason
    tables = consecutive_tables(ranks[0].description.geometry, NUM_TOKENS)
    for rank in ranks:
        rank.start(ticket, tables, _deadline_ns())
    rows: list[TransferRow] = []
    num_over = 0

    def are_over() -> bool:
        nonlocal num_over
        for outcome in itertools.chain(*(rank.poll(time.monotonic_ns()) for rank in ranks)):
            assert outcome.error is None, outcome.error
            rows.extend(outcome.rows)
            num_over += 1
        return num_over == len(ranks)

    _until(are_over, tier, ())
    return rows


def _until(condition: Callable[[], bool], tier: HostTier, ranks: Sequence[TransferRank]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, "it takes too long"
        for rank in ranks:
            rank.poll(time.monotonic_ns())
        tier.turn()


def _deadline_ns() -> int:
    return time.monotonic_ns() + int(DEADLINE_S * 1e9)


def cases() -> list[Case]:
    axes = LAYOUT_NAMES, TPS, BLOCK_SIZES, TIER_LAYOUTS, TIER_BLOCK_SIZES
    return [Case(*values) for values in itertools.product(*axes)]


def copies_rows(mode: str = "never") -> Iterator[list[object]]:
    """A row per engine, a column per tier. `mode`: of staging."""
    for row in itertools.product(LAYOUT_NAMES, TPS, BLOCK_SIZES):
        yield [*row, *(measure(Case(*row, *column), mode) for column in COLUMNS)]


def fill(_: argparse.Namespace, page: Page) -> None:
    page.say(ABOUT.format(num_layers=NUM_LAYERS, num_heads=NUM_HEADS, num_tokens=NUM_TOKENS))
    tiers = [f"{layout}, blocks of {size}" for layout, size in COLUMNS]
    for mode, title in MODES.items():
        page.say(f"## {title}", "")
        page.head("engine", "TP", "blocks of", *tiers)
        for row in copies_rows(mode):
            page.row(*row)
        page.say("")


def main() -> int:
    return run(fill, __file__, title="Copies per block")


if __name__ == "__main__":
    sys.exit(main())
