"""Engines that divide tokens and layers over ranks, each in its own way: every byte comes to its place, is
proven there, and a planted fault is named."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rayk.parallel.shard import EngineShape, Stripe
from rayk.transfer import plan as plan_module
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.types.errors import HandshakeMismatch, KVMismatch
from tests.transfer.cluster import Engine, Pair, Shape, local_pair, make_engine

ONE = EngineShape()
MLA = [
    ONE,
    EngineShape(2, 2),
    EngineShape(2, 2, 4),
    EngineShape(3, 3, 2),
    EngineShape(4, 2, 4),
    EngineShape(4, 4),
    EngineShape(2, 2, 1, (1, 2)),
    EngineShape(1, stages=(1, 1, 1)),
    EngineShape(2, stages=(2, 1)),
]
GQA = [
    ONE,
    EngineShape(4, 2),
    EngineShape(4, 2, 4),
    EngineShape(8, 4, 2, (2, 1)),
    EngineShape(2, stages=(1, 2)),
]


def cases() -> list[Shape]:
    layouts = itertools.cycle(itertools.product(("BHLNC", "LBNHC", "BLHNC"), ("LBHNC", "BLNHC")))
    common = {"num_layers": 3, "num_blocks": (40, 40)}
    made = [
        Shape(units=1, query_heads=24, shapes=pair, block_sizes=sizes, layouts=next(layouts), **common)
        for pair, sizes in zip(itertools.product(MLA, MLA), itertools.cycle([(4, 8), (8, 4)]), strict=False)
    ]
    made += [
        Shape(units=2, query_heads=8, window=13, shapes=pair, layouts=next(layouts), **common)
        for pair in itertools.product(GQA, GQA)
    ]
    return made


def marked(number: int, shape: Shape):
    marks = [pytest.mark.thorough] if number % 10 else []
    return pytest.param(shape, marks=marks, id=f"{shape.shapes[0]} to {shape.shapes[1]}, {shape.units} heads")


@pytest.mark.parametrize("shape", itertools.starmap(marked, enumerate(cases())))
def test_any_division_to_any_other(shape: Shape) -> None:
    """Also where a rank has no token of a request, and where the last turn is cut short."""
    pair = local_pair(shape)
    for number, num_tokens in enumerate((1, 2, 7, 37)):
        values = shape.values(num_tokens, number)
        outcomes, tables = pair.transfer(values, f"r{number}", number)
        assert all(outcome.ok for outcome in outcomes.values()), outcomes
        pair.consumer.check(values, tables)


def planted_pair(shape: Shape, plant) -> Pair:
    network = LocalNetwork()
    engines = [make_engine(shape, side, lambda name: LocalAgent(name, network)) for side in (0, 1)]
    plant(engines)
    pair = Pair(*engines)
    pair.connect()
    return pair


def transfer(pair: Pair) -> dict[int, KVMismatch]:
    """Move a request; per consumer rank that found a mismatch, what diagnosis names first."""
    num_tokens = 37
    tables = pair.producer.tables(num_tokens)
    outcomes, _ = pair.transfer(pair.producer.shape.values(num_tokens))
    found = {}
    for rank, outcome in outcomes.items():
        if outcome.ok:
            continue
        assert isinstance(outcome.error, KVMismatch), outcome.error
        fetched = [
            {
                v.layer: producer.fetch_rows(v.layer, v.group.index, tables[v.group.index], num_tokens)
                for v in producer._views
            }
            for producer in pair.producer.ranks
        ]
        found[rank] = pair.consumer.ranks[rank].diagnose_all("r", fetched)[0]
    return found


def see(engine: Engine, rank: int, **changes) -> None:
    """A rank's views differ from what they should be."""
    views = engine.ranks[rank]._views
    engine.ranks[rank]._views = type(views)(
        [replace(view, **changes) for view in views], views.caches, views.classes
    )


SPLIT = Shape(
    units=1,
    query_heads=8,
    num_layers=2,
    block_sizes=(8, 8),
    shapes=(ONE, EngineShape(2, 2)),
    num_blocks=(20, 20),
)


def test_an_interleave_off_by_one_is_named() -> None:
    """Kernels of consumer rank 0 have tokens 0, 1, 4, 5 where 0, 2, 4, 6 arrived."""
    pair = planted_pair(SPLIT, lambda engines: see(engines[1], 0, tokens=Stripe(2, 0, 2)))
    found = transfer(pair)
    assert list(found) == [0]
    assert (found[0].layer, found[0].field, found[0].head, found[0].token) == (0, "k", 0, 1)
    assert found[0].classification == "rows shifted: token t holds token t+1"


def test_a_rank_that_has_its_neighbours_tokens_is_named() -> None:
    pair = planted_pair(SPLIT, lambda engines: see(engines[1], 1, tokens=Stripe(2, 0)))
    found = transfer(pair)
    assert (found[1].layer, found[1].field, found[1].head, found[1].token) == (0, "k", 0, 0)
    assert found[1].classification == "rows shifted: token t holds token t+1"


def test_a_stages_layers_shifted_by_one_are_named() -> None:
    """Kernels of the producer's last stage, layers 1 to 3, find each layer's pages where the next one's
    are."""
    shape = replace(SPLIT, num_layers=4, shapes=(EngineShape(stages=(1, 3)), EngineShape(2, 2)))

    def plant(engines: list[Engine]) -> None:
        views = engines[0].ranks[0]._views
        assert [view.layer for view in views] == [1, 2, 3]
        shifted = [replace(a, fields=b.fields) for a, b in zip(views, [*views[1:], views[0]], strict=True)]
        right = engines[0].views

        def bound(rank: int, group, layer: int):
            return right(rank, group, 1 + layer % 3 if rank == 0 else layer)

        engines[0].views = bound
        engines[0].ranks[0]._views = type(views)(shifted, views.caches, views.classes)

    found = transfer(planted_pair(shape, plant))
    assert sorted(found) == [0, 1]
    named = {rank: (f.layer, f.field, f.head, f.token) for rank, f in found.items()}
    assert named == {0: (1, "k", 0, 0), 1: (1, "k", 0, 1)}


def test_a_last_stripe_too_short_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map forgets the last row of each block, which is the last of the last rank's."""
    original = plan_module.match_rows

    def shortened(*args, num_rows: int, **kwargs):
        return original(*args, num_rows=num_rows - 1, **kwargs)

    monkeypatch.setattr(plan_module, "match_rows", shortened)
    found = transfer(planted_pair(SPLIT, lambda engines: None))
    # Blocks of 8 tokens meet blocks of 16.
    named = {rank: (f.layer, f.field, f.head, f.token) for rank, f in found.items()}
    assert named == {1: (0, "k", 0, 7)}
    assert "never written: tokens 7 to 31 hold only 0x5a" in found[1].classification


def test_sides_that_divide_tokens_unlike_are_told_so() -> None:
    """Words of unlike token classes cannot be compared."""
    network = LocalNetwork()
    shapes = [SPLIT, replace(SPLIT, shapes=(ONE, EngineShape(2, 2, 4)))]
    pair = Pair(*(make_engine(s, side, lambda n: LocalAgent(n, network)) for side, s in enumerate(shapes)))
    with pytest.raises(HandshakeMismatch, match="token_classes"):
        pair.connect()
