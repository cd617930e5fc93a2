"""Words by token class: each lies on one rank of either side, and they add up to the words of one class."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from rayk.kernels.digest import digest_rows
from rayk.kv.caches import FieldView
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, Mamba2Spec, SlidingWindowSpec
from rayk.parallel.shard import WHOLE, EngineShape, Stripe, TokenShard
from rayk.transfer.digest_words import whole_sources
from rayk.transfer.layer_view import LayerView, make_layer_view
from rayk.transfer.token_classes import ONE_CLASS, TokenClasses, common_classes
from rayk.transfer.verify import (
    CanonicalViews,
    compare_digests,
    compute_digests,
    fetch_rows,
    num_bytes_checked,
    sorted_views,
)

INTERLEAVES = {size: [i for i in range(1, size + 1) if size % i == 0] for size in (4, 8, 16)}


def owner(position: int, num: int, interleave: int) -> int:
    return position // interleave % num


@pytest.mark.parametrize("sizes", itertools.combinations_with_replacement((1, 2, 3, 4), 2), ids=str)
def test_a_class_lies_in_one_shard_of_each_side(sizes: tuple[int, int]) -> None:
    """Against the owners of every token of both sides, for all interleaves of blocks of 8 and 16."""
    for interleaves in itertools.product(INTERLEAVES[8], INTERLEAVES[16]):
        shapes = [EngineShape(4 * n, n, i) for n, i in zip(sizes, interleaves, strict=True)]
        classes = common_classes(shapes)
        assert classes == common_classes(shapes[::-1])
        positions = np.arange(500)
        # A side that does not deal tokens holds all, whatever its interleave.
        owners = [
            tuple(owner(p, n, i) for n, i in zip(sizes, interleaves, strict=True)) for p in positions.tolist()
        ]
        by_class: dict[int, set[tuple[int, ...]]] = {}
        for found, of in zip(classes.of(positions).tolist(), owners, strict=True):
            by_class.setdefault(found, set()).add(of)
        assert sorted(by_class) == list(range(classes.num))
        assert all(len(of) == 1 for of in by_class.values())
        assert classes.num == len(set(owners)) <= sizes[0] * sizes[1]
        for side, (num, interleave) in enumerate(zip(sizes, interleaves, strict=True)):
            for index in range(num):
                held = tuple(c for c, of in sorted(by_class.items()) if next(iter(of))[side] == index)
                assert classes.held(Stripe(num, index, interleave)) == held


SPECS: list[KVCacheSpec] = [
    FullAttentionSpec(24, 2, 4, 4, "float32", 8),
    SlidingWindowSpec(24, 2, 4, 4, "float32", 8, 20),
    Mamba2Spec(64, "float32", 4, 8, 4, 2, 8),
]
NUM_BLOCKS = 5


def content(spec: KVCacheSpec, layer: int) -> dict[str, torch.Tensor]:
    """[units, tokens or 1, elements] of each field of a layer."""
    generator = torch.Generator().manual_seed(layer)
    num_rows = 3 * 24 if spec.has_token_rows else 1
    return {
        f.name: torch.randn((f.units, num_rows, f.row_bytes // 4), generator=generator) for f in spec.fields()
    }


def make_views(
    tokens: TokenShard, layers: range
) -> tuple[list[LayerView], list[list[int]], list[KVCacheGroup]]:
    """A rank's views of `SPECS`, one group for each, filled by walking the tokens that it holds in order;
    with block tables."""
    views, tables, groups = [], [], []
    for index, spec in enumerate(SPECS):
        group = KVCacheGroup(index, spec, (index,), 1)
        groups.append(group)
        table = [2, 4, 1]
        tables.append(table if spec.has_token_rows else [0, 3])
        if index not in layers:
            continue
        held = tokens if spec.has_token_rows else WHOLE
        mine = [t for t in range(72) if held.holds(np.array([t]))[0]] if spec.has_token_rows else [0]
        per_block = len([t for t in mine if t < 24]) if spec.has_token_rows else 1
        fields = []
        for name, values in content(spec, index).items():
            ids = tuple(range(values.shape[0]))
            view = torch.full((NUM_BLOCKS, len(ids), per_block, values.shape[2]), torch.nan)
            for row, token in enumerate(mine):
                block = table[row // per_block] if spec.has_token_rows else 3
                view[block, :, row % per_block] = values[list(ids), token]
            fields.append(FieldView(name, view, ids))
        views.append(make_layer_view(index, group, fields, tokens))
    return views, tables, groups


SHAPES = [EngineShape(2, 2, 1), EngineShape(2, 2, 4), EngineShape(3, 3, 8), EngineShape(4, 2, 3)]


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 41, 70, 72])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_words_of_all_ranks_add_up(shape: EngineShape, num_tokens: int) -> None:
    """Tokens dealt over ranks and layers over stages: every word is made by one rank, and all of a row group
    are as many as one rank alone would have made of it."""
    views, tables, groups = make_views(WHOLE, range(3))
    reference = compute_digests(sorted_views(views), tables, num_tokens, 16)
    classes = common_classes([shape, EngineShape(2, 2, 2)])
    whole = sorted_views(views, groups, classes)
    expected = compute_digests(whole, tables, num_tokens, 16)
    assert (joined(whole, expected, num_tokens) == reference).all()
    made, num_bytes = np.zeros_like(expected), 0
    for layers in (range(2), range(2, 3)):
        for index in range(shape.dcp):
            # A state lies whole on every rank: one of them counts.
            kept = layers if index == 0 else range(layers.start, min(layers.stop, 2))
            rank, _, _ = make_views(Stripe(shape.dcp, index, shape.dcp_interleave), kept)
            held = sorted_views(rank, groups, classes)
            words = compute_digests(held, tables, num_tokens, 16)
            assert not (made.astype(bool) & words.astype(bool)).any(), "two ranks have a word"
            assert (
                compare_digests(held, expected[None], words, whole_sources(held.lanes), num_tokens, 16) == []
            )
            made += words
            num_bytes += num_bytes_checked(held, num_tokens)
    assert (made == expected).all()
    assert num_bytes == num_bytes_checked(whole, num_tokens)


def joined(views: CanonicalViews, words: np.ndarray, num_tokens: int) -> np.ndarray:
    """Add up classes, by the vector's description alone."""
    made, at = [], 0
    for view in views:
        live = view.live_rows(num_tokens)
        num_groups = len({row // 16 for row in live})
        num_classes = views.classes.num if view.group.spec.has_token_rows else 1
        for field in view.group.spec.fields():
            size = field.units * num_classes * num_groups
            made.append(words[at : at + size].reshape(field.units, num_classes, num_groups).sum(axis=1))
            at += size
    assert at == len(words)
    return np.concatenate([part.reshape(-1) for part in made])


def test_a_word_is_that_of_its_tokens_rows() -> None:
    """Against the digest of just these rows, as kernels.digest defines it."""
    views, tables, groups = make_views(WHOLE, range(1))
    classes = TokenClasses(((Stripe(2, 0, 4), Stripe(2, 1, 4)), tuple(Stripe(3, i, 1) for i in range(3))))
    assert classes.num == 6
    found = compute_digests(sorted_views(views, groups[:1], classes), tables, 70, 16)
    k = content(SPECS[0], 0)["k"]
    for unit, (stripe, third) in itertools.product(range(2), itertools.product(range(2), range(3))):
        rows = torch.tensor([t for t in range(70) if owner(t, 2, 4) == stripe and owner(t, 3, 1) == third])
        token_class = int(classes.of(rows.numpy()[:1])[0])
        words = digest_rows(
            k[None],
            torch.zeros_like(rows),
            rows,
            rows,
            layer=0,
            units=(0, 1),
            fields=((0, 0, 4),),
            rows_per_group=16,
            first_group=0,
            num_groups=5,
            impl="reference",
        )
        at = (unit * 6 + token_class) * 5
        assert (found[at : at + 5] == words[0, unit].numpy()).all()


def test_rows_come_in_the_order_of_their_tokens() -> None:
    views, tables, _ = make_views(Stripe(3, 1, 4), range(1))
    rows = fetch_rows(views[0], tables[0], 41, 6)["k", 1]
    mine = [t for t in range(6, 41) if owner(t, 3, 4) == 1]
    assert views[0].held_rows(41, 6).tolist() == mine
    wanted = content(SPECS[0], 0)["k"][1, mine].contiguous()
    assert (rows == wanted.view(torch.uint8).numpy()).all()


def test_what_is_read_from_nobody_differs() -> None:
    """A rank whose slots hold tokens of others has words that no plan speaks of."""
    views, tables, groups = make_views(Stripe(2, 0, 2), range(1))
    classes = common_classes([EngineShape(2, 2, 1)])
    held = sorted_views(views, groups[:1], classes)
    words = compute_digests(held, tables, 20, 16)
    sources = {(0, name, unit, 0): 0 for name in "kv" for unit in (0, 1)}
    wrong = compare_digests(held, words[None], words, sources, 20, 16)
    assert {(w.unit, w.token_class) for w in wrong} == {(0, 1), (1, 1)}


def test_without_deals_there_is_one_class() -> None:
    assert common_classes([EngineShape(4), EngineShape(2, stages=(3, 3))]) == ONE_CLASS
    assert ONE_CLASS.num == 1
    assert ONE_CLASS.of(np.arange(9)).tolist() == [0] * 9
