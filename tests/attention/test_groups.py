"""Which layers share metadata, and that groups are formed once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayk.attention import (
    AttentionGroups,
    AttentionLayer,
    AttentionView,
    CommonAttentionMetadata,
    PagedAttentionMetadata,
    get_backend,
    make_attention_groups,
)
from rayk.attention import (
    groups as groups_module,
)
from rayk.attention.backends.paged import PagedBackend
from rayk.kv.specs import FullAttentionSpec, SlidingWindowSpec
from tests.attention.brute import Asked, make_common, wanted_tokens

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


class CountingBackend(PagedBackend):
    """Notes what it is asked to build."""

    def __init__(self) -> None:
        super().__init__("counting", "counting", store="reference", attend="reference")
        self.built: list[tuple[CommonAttentionMetadata, int | None, int | None]] = []

    def build(
        self, common: CommonAttentionMetadata, window: int | None, chunk: int | None = None
    ) -> PagedAttentionMetadata:
        self.built.append((common, window, chunk))
        return super().build(common, window, chunk)


WINDOWED, CHUNKED = replace(VIEW, window=8), replace(VIEW, chunk=16)
FAST, FAST_WINDOWED, FAST_CHUNKED = (replace(v, fast_prefill=True) for v in (VIEW, WINDOWED, CHUNKED))


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> tuple[AttentionGroups, CountingBackend, Counter[str]]:
    """Six ways to see one KV group, two attention groups each; and how often each transform ran."""
    calls: Counter[str] = Counter()
    for name in ("fast_prefill", "chunked_local", "sliding_window"):
        transform = getattr(groups_module, name)

        def counted(*args: Any, name: str = name, transform: Any = transform, **options: Any) -> Any:
            calls[name] += 1
            return transform(*args, **options)

        monkeypatch.setattr(groups_module, name, counted)
    backend, groups = CountingBackend(), AttentionGroups()
    views = (VIEW, WINDOWED, CHUNKED, FAST, FAST_WINDOWED, FAST_CHUNKED)
    base = replace(BASE, backend=backend)
    layers = [replace(base, layer=layer, view=view) for layer, view in enumerate(views)]
    layers += [replace(layer, layer=layer.layer + 6, num_query_heads=4) for layer in layers]
    groups.initialise(layers)
    assert len(groups.groups) == 12
    return groups, backend, calls


REQUESTS = (Asked(0, 40, 1), Asked(30, 1, 1), Asked(60, 20, 0))


def test_each_transform_and_each_build_is_done_once_a_step(
    counting: tuple[AttentionGroups, CountingBackend, Counter[str]],
) -> None:
    """Twelve groups see six things; the fast ones begin with the same reduced batch."""
    groups, backend, calls = counting
    seen = groups.see({0: make_common(REQUESTS, 4)}, np.array(wanted_tokens(REQUESTS)))
    assert calls == {"fast_prefill": 1, "chunked_local": 2, "sliding_window": 2}
    built = groups.build(seen)
    assert len(backend.built) == len({id(common) for common, _, _ in backend.built}) == 6
    for layer in range(6):
        assert built[layer] is built[layer + 6]
    assert len({id(metadata) for metadata in built.values()}) == 6
    assert [built[layer].common.num_requests for layer in range(6)] == [3, 3, 3 + 1 + 2, 2, 2, 2]
    # The next step is another one.
    groups.build(groups.see({0: make_common(REQUESTS, 4)}, np.array(wanted_tokens(REQUESTS))))
    assert (len(backend.built), calls.total()) == (12, 10)


@pytest.mark.parametrize("says_all", [True, False], ids=["all wanted", "no wanted"])
def test_what_comes_to_the_same_is_built_once(
    counting: tuple[AttentionGroups, CountingBackend, Counter[str]], says_all: bool
) -> None:
    """In a decode step, layers that could compute less see what the others see."""
    groups, backend, calls = counting
    requests = tuple(Asked(30 + r, 1, 1) for r in range(4))
    seen = groups.see({0: make_common(requests, 4)}, np.arange(4) if says_all else None)
    for view, fast in ((VIEW, FAST), (WINDOWED, FAST_WINDOWED), (CHUNKED, FAST_CHUNKED)):
        assert seen[view] is seen[fast]
    built = groups.build(seen)
    assert len(backend.built) == 3
    assert (calls["chunked_local"], calls["sliding_window"]) == (1, 1)
    assert built[0] is built[3] is built[6] is built[9]


def test_a_window_that_cuts_nothing_is_still_told_to_the_kernels(
    counting: tuple[AttentionGroups, CountingBackend, Counter[str]],
) -> None:
    """Short requests: every view is the common metadata itself, and layers are told their own."""
    groups, backend, _ = counting
    common = make_common((Asked(0, 9, 1),), 4)
    built = groups.build(groups.see({0: common}))
    assert [seen for seen, _, _ in backend.built] == [common] * 3
    assert [(m.window, m.chunk) for m in (built[0], built[1], built[2])] == [
        (None, None),
        (8, None),
        (None, 16),
    ]


def test_groups_that_compute_nothing_have_no_metadata(
    counting: tuple[AttentionGroups, CountingBackend, Counter[str]],
) -> None:
    """Inside a prompt nobody wants logits: the fast layers are skipped."""
    groups, backend, calls = counting
    seen = groups.see({0: make_common((Asked(0, 40), Asked(60, 20)), 4)}, np.array([], dtype=np.int64))
    assert list(seen) == [VIEW, WINDOWED, CHUNKED]
    assert set(groups.build(seen)) == {0, 1, 2, 6, 7, 8}
    assert len(backend.built) == 3
    assert (calls["chunked_local"], calls["sliding_window"]) == (1, 1)


def test_kv_groups_are_seen_apart() -> None:
    groups = AttentionGroups()
    groups.initialise(
        [replace(BASE, view=CHUNKED), replace(BASE, layer=1, view=replace(CHUNKED, kv_group=1))]
    )
    commons = {0: make_common((Asked(30, 1),), 4), 1: make_common((Asked(30, 1),), 8)}
    built = groups.build(groups.see(commons))
    assert built[0].common.block_table.tolist() == [[5, 6, 7, 8]]
    assert built[1].common.block_table.tolist() == [[3, 4]]
