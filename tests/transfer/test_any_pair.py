"""Property tests over all pairs of engines: however both divide units, tokens and layers, every live byte
arrives once, from a rank that holds it, every producer rank is told when it may free, and pushes bring what
pulls do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from math import lcm

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from rayk.kv.layout import LAYOUTS
from rayk.transfer import plan as plan_module
from rayk.transfer.plan import TransferPlan, plan_pushes, plan_transfer, release_senders
from rayk.transfer.token_classes import common_classes
from tests.kv.brute import cuts_blocks
from tests.markers import one_per, sweep
from tests.transfer.any_pair import (
    FORMATS,
    AnyPair,
    Content,
    Engine,
    Model,
    Side,
    any_pairs,
    is_prime_to,
    moved_bytes,
    number,
)
from tests.transfer.brute import UNKNOWN

NUM_PARTS, NUM_NIGHTLY_PARTS = 8, 25
PAIRS_PER_PART, PAIRS_PER_NIGHTLY_PART = 150, 800
CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large)


def check_pair(case: AnyPair) -> None:
    """Everything that must hold of a pair."""
    producer, consumer = Engine(case, 0), Engine(case, 1)
    content = number(case.model, consumer.groups, case.num_tokens)
    sources = [producer.fill(rank, content) for rank in range(case.sides[0].num_ranks)]
    plans = [plan_transfer(producer.ranks, rank) for rank in consumer.ranks]
    pulled = [
        check_pull(plan, rank, (producer, consumer), content, sources) for rank, plan in enumerate(plans)
    ]
    check_elections(plans, producer, consumer)
    check_releases(plans, producer, consumer)
    if case.chunk_ends:
        check_pushes((producer, consumer), content, pulled)


def check_pull(
    plan: TransferPlan, rank: int, engines: tuple[Engine, Engine], content: Content, sources: list[np.ndarray]
) -> Counter[int]:
    """Every live byte of a rank is right; no byte is written twice, nor apart from live ones.

    Moves: (producer rank, source address, destination address), packed into one number each.
    """
    producer, consumer = engines
    landed = np.full(consumer.ranks[rank].pages_bytes, UNKNOWN, dtype=np.int64)
    written = np.zeros(len(landed), dtype=np.int64)
    moves: list[np.ndarray] = []
    num_descriptors = 0
    for reads in plan.lower(consumer.case.num_tokens, producer.tables, consumer.tables):
        here, there = moved_bytes(reads, producer.num_blocks, consumer.num_blocks)
        assert len(here) == reads.num_bytes
        assert 0 < reads.num_coalesced <= reads.num_descriptors
        num_descriptors += reads.num_descriptors
        landed[there] = sources[reads.producer_rank][here]
        np.add.at(written, there, 1)
        moves.append(pack(reads.producer_rank, here, there))
    expected = consumer.fill(rank, content)
    live = expected != UNKNOWN
    assert np.array_equal(landed[live], expected[live]), "a live byte is wrong"
    assert set(np.unique(landed[~live]).tolist()) <= {UNKNOWN}, "what is live lands elsewhere, too"
    assert written.max(initial=0) <= 1, "a byte is written twice"
    assert not written[~consumer.open_bytes(rank, producer)].any(), "a byte is written that nobody asked for"
    return np.sort(np.concatenate(moves)) if moves else np.empty(0, dtype=np.int64)


def pack(producer_rank: int, here: np.ndarray, there: np.ndarray) -> np.ndarray:
    assert max(here.max(initial=0), there.max(initial=0)) < 1 << 28
    return (np.int64(producer_rank) << 56) | (here << 28) | there


DESTINATION = (1 << 28) - 1
"""The bits of what `pack` makes that say where a byte goes."""


def check_elections(plans: list[TransferPlan], producer: Engine, consumer: Engine) -> None:
    """Each unit is read from one rank that holds it; its readers are spread evenly over its holders."""
    one, other = producer.side, consumer.side
    classes = common_classes([one.shape, other.shape])
    tokens = np.arange(lcm(one.dcp * one.interleave, other.dcp * other.interleave))
    owners = [tokens // side.interleave % side.dcp for side in (one, other)]
    met = {
        (int(p), int(d), int(c)) for p, d, c in zip(*owners, classes.of(tokens), strict=True)
    }  # who has it on both sides, and what it is called
    assert len(met) == len({c for *_, c in met}) == len({(p, d) for p, d, _ in met})
    for group, (layer, part) in ((g, key) for g in consumer.groups for key in g.keys):
        has_rows = part == "attention"
        for name, place in consumer.places[0][group.index].items():
            field_of = next(g.index for g in producer.groups if (layer, part) in g.keys)
            for unit, owner in itertools.product(
                range(place.piece.num_units), range(one.dcp if has_rows else 1)
            ):
                holders = [
                    rank
                    for rank, places in enumerate(producer.places)
                    if one.owns(rank, layer)
                    and unit in places[field_of][name].units
                    and (not has_rows or rank % one.tp % one.dcp == owner)
                ]
                asked: Counter[int] = Counter()
                for rank, places in enumerate(consumer.places):
                    if not other.owns(rank, layer) or unit not in places[group.index][name].units:
                        continue
                    mine = rank % other.tp % other.dcp
                    named = {c for p, d, c in met if (p, d) == (owner, mine)} if has_rows else {0}
                    sources = plans[rank].sources(classes)
                    found = {sources[layer, name, unit, c] for c in named}
                    assert len(found) == (len(named) > 0), "tokens of one holder come from several"
                    asked.update(found)
                assert set(asked) <= set(holders)
                counts = [asked[rank] for rank in holders]
                assert max(counts) - min(counts) <= 1, "one replica is read more often than another"


def check_releases(plans: list[TransferPlan], producer: Engine, consumer: Engine) -> None:
    """Whoever reads from a rank tells it when it is done; somebody tells each rank."""
    senders = release_senders(producer.ranks, consumer.ranks)
    assert len(senders) == producer.side.num_ranks
    for rank, told_by in enumerate(senders):
        readers = {i for i, plan in enumerate(plans) if rank in plan.producer_ranks}
        assert told_by
        assert len(set(told_by)) == len(told_by)
        assert readers <= set(told_by) <= set(range(consumer.side.num_ranks))
        assert readers == set(told_by) or not readers


def check_pushes(engines: tuple[Engine, Engine], content: Content, pulled: list[np.ndarray]) -> None:
    """Layer by layer and chunk by chunk, with what is computed by then: together what pulls bring, once."""
    producer, consumer = engines
    case = consumer.case
    layers = list(range(len(case.model.layers)))
    size = case.layers_per_write
    starts = (0, *case.chunk_ends[:-1])
    moves: list[list[np.ndarray]] = [[] for _ in consumer.ranks]
    for rank, me in enumerate(producer.ranks):
        pushes = plan_pushes(me, producer.ranks, consumer.ranks)
        whole = producer.fill(rank, content)
        for begin, end in zip(starts, case.chunk_ends, strict=True):
            computed = producer.fill(rank, content, end)
            tables = [
                table[: -(-end // g.spec.block_size)]
                for g, table in zip(producer.groups, producer.tables, strict=True)
            ]
            for first, (target, plan) in itertools.product(layers[::size], pushes.items()):
                chosen = layers[first : first + size]
                rows = range(begin, end)
                for write in plan.lower(case.num_tokens, tables, consumer.tables, layers=chosen, rows=rows):
                    assert set(write.layers) <= set(chosen)
                    assert write.producer_rank == rank
                    here, there = moved_bytes(write, producer.num_blocks, consumer.num_blocks)
                    assert np.array_equal(computed[here], whole[here]), "a row is pushed before it is there"
                    moves[target].append(pack(rank, here, there))
    for rank, (pushed, wanted) in enumerate(zip(moves, pulled, strict=True)):
        found = np.sort(np.concatenate(pushed)) if pushed else np.empty(0, dtype=np.int64)
        places = found & DESTINATION
        assert len(np.unique(places)) == len(places), "a byte is pushed twice"
        # Fewer layers at once: it may pay to move rows around the live ones where it did not, or the other
        # way round.
        live = consumer.fill(rank, content) != UNKNOWN
        assert not (~consumer.open_bytes(rank, producer))[places].any()
        assert np.array_equal(found[live[places]], wanted[live[wanted & DESTINATION]])


SIDES = (
    Side("BLNHC", 2, 4, 16, 2, keeps_all=True, is_scattered=True, num_spare_blocks=1),
    Side("LBHNC", 4, 6, 5, 1, keeps_all=False, is_scattered=False, num_spare_blocks=0),
)


@pytest.mark.parametrize("sides", [SIDES, SIDES[::-1], (SIDES[0],) * 2], ids=["there", "back", "alike"])
@pytest.mark.parametrize("layers_per_write", [1, 2])
def test_windows_chunks_and_states_between_groups_of_other_layers(
    sides: tuple[Side, Side], layers_per_write: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine keeps all rows of all attention in one group, the other gives local layers theirs."""
    layers = ("full", "sliding", "full+mamba2", "chunked", "sliding")
    model = Model(layers, 8, kv_heads=4, state_groups=2, dtype="float16", window=9, chunk=14)
    monkeypatch.setattr(plan_module, "BLOCK_COST_BYTES", 0)
    for num_tokens in (1, 13, 27):
        ends = tuple(sorted({1, num_tokens // 2 + 1, num_tokens}))
        check_pair(AnyPair(model, num_tokens, sides, ends, layers_per_write, block_cost=0, seed=3))


LAYERS = ("full", "sliding", "mla", "full+mamba2", "chunked", "gdn")
STAGES = {1: (), 2: (4, 2), 3: (1, 3, 2), 4: (2, 1, 1, 2)}


def divided(number: int, layout: str, dcp: int, pp: int, tp: int) -> Side:
    """An engine of so many token shards and stages, and `tp` times as many ranks as the former."""
    block_size = (4, 6, 8)[number % 3]
    interleave = (1, block_size // 2, block_size)[number // 3 % 3]
    return Side(
        layout,
        tp * dcp,
        block_size,
        state_block=16,
        kernels_per_block=1 + number % 2,
        keeps_all=number % 5 == 0,
        is_scattered=number % 2 == 1,
        num_spare_blocks=0,
        dcp=dcp,
        interleave=interleave,
        stages=STAGES[pp],
    )


def divisions() -> list[AnyPair]:
    """All pairs of 1 to 4 token shards and of 1 to 4 stages; layouts, sizes and lengths in turn."""
    cases = []
    for n, (a, b, p, q) in enumerate(itertools.product(range(1, 5), repeat=4)):
        layouts = [tuple(LAYOUTS)[k % 6] for k in (n, n // 6)]
        # Elsewhere blocks of all groups must have one shape.
        layers = ("full",) * 6 if any(map(cuts_blocks, layouts)) else LAYERS
        model = Model(layers, 24, 1, 2, tuple(FORMATS)[n % len(FORMATS)], window=9, chunk=14)
        sides = (
            divided(n, layouts[0], a, p, 1 + n % 2),
            divided(n + 1 + n // 5, layouts[1], b, q, 1 + n // 2 % 2),
        )
        num_tokens = n * 29 % 70 + 1
        ends = tuple(sorted({1 + num_tokens // 2, num_tokens})) if n % 4 == 0 else ()
        cases.append(AnyPair(model, num_tokens, sides, ends, 2, block_cost=n % 2 * 100, seed=n))
    assert {case.num_tokens for case in cases} == set(range(1, 71))
    return cases


@sweep(4)
@one_per()
@pytest.mark.parametrize("part", range(16))
def test_any_shards_of_tokens_and_layers_to_any_other(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in divisions()[part::16]:
        monkeypatch.setattr(plan_module, "BLOCK_COST_BYTES", case.block_cost)
        check_pair(case)


def run_part(number_of_pairs: int, part_seed: int | None) -> list[AnyPair]:
    """Draw and check pairs; those that were met."""
    met: list[AnyPair] = []

    @settings(max_examples=number_of_pairs, deadline=None, database=None, suppress_health_check=CHECKS)
    @given(case=any_pairs())
    def check(case: AnyPair) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan_module, "BLOCK_COST_BYTES", case.block_cost)
            check_pair(case)
        met.append(case)

    (check if part_seed is None else seed(part_seed)(check))()
    assert len(met) >= number_of_pairs
    return met


@one_per()
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_byte_of_any_pair_arrives_once(part: int) -> None:
    met = run_part(PAIRS_PER_PART, part)
    assert {side.layout for case in met for side in case.sides} == set(LAYOUTS)
    tps = {tuple(side.tp for side in case.sides) for case in met}
    assert any(is_prime_to(*tp) for tp in tps)
    dealt = {tuple(side.dcp for side in case.sides) for case in met}
    staged = {tuple(len(side.stages) for side in case.sides) for case in met}
    assert all(any(a < b for a, b in pairs) and any(a > b for a, b in pairs) for pairs in (dealt, staged))
    assert any(is_prime_to(*(s.block_size for s in case.sides)) for case in met)
    assert any(case.sides[0].keeps_all != case.sides[1].keeps_all for case in met)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(NUM_NIGHTLY_PARTS))
def test_every_byte_of_any_pair_arrives_once_nightly(part: int) -> None:
    """Other pairs each time; hypothesis prints what fails."""
    run_part(PAIRS_PER_NIGHTLY_PART, None)
