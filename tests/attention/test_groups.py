"""Which layers share metadata, and that groups are formed once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rayk.attention import (
    AttentionGroups,
    AttentionLayer,
    AttentionView,
    CommonAttentionMetadata,
    get_backend,
    make_attention_groups,
)
from rayk.kv.specs import FullAttentionSpec, SlidingWindowSpec

BACKEND = get_backend("reference", "cpu")
FULL = FullAttentionSpec(16, 2, 64, 64, "float32", 8)
SLIDING = SlidingWindowSpec(16, 2, 64, 64, "float32", 8, window=50)
VIEW = AttentionView(kv_group=0)
WINDOW = AttentionView(kv_group=1, window=50)
BASE = AttentionLayer(layer=0, backend=BACKEND, spec=FULL, num_query_heads=8, view=VIEW)


def common(num_tokens: int = 1) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_host(
        query_lens=[num_tokens],
        seq_lens=[num_tokens],
        block_table=torch.ones(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(16, 16 + num_tokens),
        block_size=16,
    )


def test_like_layers_share_a_group_in_layer_order() -> None:
    layers = [
        replace(BASE, layer=0),
        replace(BASE, layer=1, spec=SLIDING, view=WINDOW),
        replace(BASE, layer=2),
        replace(BASE, layer=3, spec=SLIDING, view=WINDOW),
    ]
    groups = make_attention_groups(layers)
    assert [group.layers for group in groups] == [(0, 2), (1, 3)]
    assert [group.view.kv_group for group in groups] == [0, 1]
    assert [group.view.window for group in groups] == [None, 50]


@pytest.mark.parametrize(
    "difference",
    [
        {"view": replace(VIEW, kv_group=1)},
        {"backend": get_backend("cpu-torch", "cpu")},
        {"spec": SLIDING},
        {"num_query_heads": 4},
        {"view": replace(VIEW, window=50)},
        {"view": replace(VIEW, chunk=32)},
        {"view": replace(VIEW, fast_prefill=True)},
    ],
    ids=["kv-group", "backend", "spec", "query-heads", "window", "chunk", "fast-prefill"],
)
def test_any_difference_makes_another_group(difference: dict[str, object]) -> None:
    groups = make_attention_groups([BASE, replace(BASE, layer=1, **difference)])
    assert [group.layers for group in groups] == [(0,), (1,)]


def test_build_gives_each_layer_its_kv_groups_metadata_and_window() -> None:
    groups = AttentionGroups()
    groups.initialise(
        [
            replace(BASE, layer=3),
            replace(BASE, layer=5, spec=SLIDING, view=WINDOW),
            # Kept in full, seen through a window: another attention group of the same KV group.
            replace(BASE, layer=7, view=replace(VIEW, window=50)),
        ]
    )
    first, second = common(1), common(2)
    built = groups.build(groups.see({0: first, 1: second}))
    assert set(built) == {3, 5, 7}
    assert (built[3].common, built[3].window) == (first, None)
    assert (built[5].common, built[5].window) == (second, 50)
    assert (built[7].common, built[7].window) == (first, 50)


def test_initialising_twice_is_an_error() -> None:
    groups = AttentionGroups()
    groups.initialise([BASE])
    with pytest.raises(AssertionError, match="already initialised"):
        groups.initialise([BASE])


def test_a_layer_in_two_groups_is_an_error() -> None:
    with pytest.raises(AssertionError, match="layer 0 is in two"):
        make_attention_groups([BASE, replace(BASE, view=WINDOW)])


def test_building_before_initialising_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not initialised"):
        AttentionGroups().build({VIEW: common()})
