"""Layers that use another's keys and values: which may, that they own nothing, and whose memory they see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rayk.kv.caches import CanonicalKVCaches, allocate
from rayk.kv.groups import measure_waste
from rayk.kv.layout import LAYOUTS
from rayk.models.config import LayerConfig, why_bad_source
from rayk.models.engine_plan import plan_engine
from rayk.models.kv_specs import engine_groups, engine_specs
from rayk.types.config import EngineConfig
from tests.kv.decoders import decoder, layer
from tests.kv.test_caches import Owner

YOCO = ("sliding", "full", "sliding:0", "full:1", "sliding:0", "full:1")
"""gemma3n's form: the last four layers reuse the two layers of their own types."""
GAPS = ("full", "chunked", "full:0", "chunked:1", "full", "chunked", "full:4", "chunked:5")
"""F0 L1 | reuse 0, reuse 1 | F4 L5 | reuse 4, reuse 5 (facts/FIXTURES)."""
CPU = torch.device("cpu")


def made(*kinds: str) -> list[LayerConfig]:
    return [layer(kind) for kind in kinds]


def test_a_layer_may_use_an_earlier_one_of_its_own_type():
    for kinds in (YOCO, GAPS, ("full", "full:0"), ("sliding", "full", "full:1", "sliding:0")):
        layers = made(*kinds)
        assert [why_bad_source(layers, i) for i in range(len(layers))] == [None] * len(layers)


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (("full", "full:7"), "layer 1 reuses the keys and values of layer 7, of layers 0 to 1"),
        (("full", "full:-1"), "layer 1 reuses the keys and values of layer -1, of layers 0 to 1"),
        (("full:1", "full"), "layer 0 reuses the keys and values of layer 1, which does not come before it"),
        (("full", "full:1"), "layer 1 reuses the keys and values of layer 1, which does not come before it"),
        (
            ("full", "full:0", "full:1"),
            "layer 2 reuses the keys and values of layer 1, which has none of its own",
        ),
        (
            ("sliding", "full:0"),
            "layer 1 (window None) reuses the keys and values of layer 0 (window 9)",
        ),
        (("full", "sliding:0"), "layer 1 (window 9) reuses the keys and values of layer 0 (window None)"),
        (("full", "chunked:0"), "layer 1 (chunk 6) reuses the keys and values of layer 0 (chunk None)"),
        (
            ("state", "full:0"),
            "layer 1 (mixer attention) reuses the keys and values of layer 0 (mixer mamba2)",
        ),
        (("state", "state:0"), "layer 1 reuses the cache of layer 0, but a mamba2 mixer cannot"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_a_layer_may_not_use_is_refused_by_name(kinds: tuple[str, ...], reason: str):
    """Missing, later, itself, one that shares itself, of another type: the first such layer's reason."""
    layers = made(*kinds)
    reasons = [why_bad_source(layers, i) for i in range(len(layers))]
    assert [r for r in reasons if r is not None] == [reason]
    with pytest.raises(AssertionError) as caught:
        decoder(*kinds)
    # pytest says below what it saw.
    assert str(caught.value).splitlines()[0] == reason


def test_windows_and_chunks_of_other_lengths_are_other_types():
    assert why_bad_source([layer("chunked", 6), layer("chunked:0", 7)], 1) == (
        "layer 1 (chunk 7) reuses the keys and values of layer 0 (chunk 6)"
    )
    window = layer("sliding")
    assert why_bad_source([window, replace(window, window=10, kv_source=0)], 1) == (
        "layer 1 (window 10) reuses the keys and values of layer 0 (window 9)"
    )


def test_layers_that_could_stop_early_are_the_trailing_ones():
    assert decoder(*YOCO).fast_prefill_layers == range(2, 6)
    assert decoder(*GAPS).fast_prefill_layers == range(6, 8)
    assert decoder("full", "full:0", "full").fast_prefill_layers == range(3, 3)


@pytest.mark.parametrize("kinds", [YOCO, GAPS], ids=["yoco", "gaps"])
@pytest.mark.parametrize("hybrid_kv", [True, False])
def test_a_layer_that_shares_keeps_nothing(kinds: tuple[str, ...], hybrid_kv: bool):
    """Groups, waste and memory are those of the model without it."""
    engine = EngineConfig(model="made", hybrid_kv=hybrid_kv, num_blocks=7)
    config = decoder(*kinds)
    own = [i for i, kind in enumerate(kinds) if ":" not in kind]
    assert config.sharing_layers == tuple(i for i in range(len(kinds)) if i not in own)
    assert list(engine_specs(engine, config)) == [(i, "attention") for i in own]
    without = decoder(*(kinds[i] for i in own))
    groups, alone = engine_groups(engine, config), engine_groups(engine, without)
    assert [tuple(own.index(n) for n in g.layers) for g in groups] == [g.layers for g in alone]
    assert [g.spec for g in groups] == [g.spec for g in alone]
    assert measure_waste(groups) == measure_waste(alone)
    ranks = plan_engine(engine, config).ranks
    assert ranks[0].buffer_bytes == plan_engine(engine, without).ranks[0].buffer_bytes
    assert config.attention_layers == tuple(own)


def cached(kinds: tuple[str, ...], layout: str, num_blocks: int = 5) -> CanonicalKVCaches:
    """Kernel blocks of 2: several in a block."""
    engine = EngineConfig(
        model="made", tp=2, layout=layout, block_size=4, kernel_block_size=2, num_blocks=num_blocks
    )
    return allocate(plan_engine(engine, decoder(*kinds)).ranks[1], CPU, fill=0x5A)


def mixers(kinds: tuple[str, ...]) -> tuple[dict, list]:
    """Owners by key, and the readers with the key of what they read, as a decoder has them."""
    owners = {(i, "attention"): Owner() for i, kind in enumerate(kinds) if ":" not in kind}
    readers = [((int(kind.partition(":")[2]), "attention"), Owner()) for kind in kinds if ":" in kind]
    return owners, readers


def tensor_of(owner: Owner) -> torch.Tensor:
    assert isinstance(owner.bound, torch.Tensor)
    return owner.bound


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kinds", [YOCO, GAPS], ids=["yoco", "gaps"])
def test_a_reader_sees_its_targets_memory(kinds: tuple[str, ...], layout: str):
    """What the owner writes, its readers read, and nobody else's readers do."""
    caches = cached(kinds, layout)
    owners, readers = mixers(kinds)
    caches.bind(owners, readers)
    assert len(readers) == 4
    # Groups share blocks: each owner's are looked at before the next one writes.
    for key, owner in owners.items():
        tensor_of(owner)[3, :, 1] = 1000.0 + key[0]
        for target, reader in readers:
            seen, mine = tensor_of(reader), tensor_of(owners[target])
            assert seen.data_ptr() == mine.data_ptr()
            assert (seen.shape, seen.stride(), seen.dtype) == (mine.shape, mine.stride(), mine.dtype)
            if target == key:
                assert torch.all(seen[3, :, 1] == 1000.0 + key[0])


def test_readers_let_go_and_are_bound_again():
    """After unbind no reader holds the buffer either; another engine's memory takes them over."""
    owners, readers = mixers(YOCO)
    caches = cached(YOCO, "BHLNC")
    caches.bind(owners, readers)
    storage = caches.buffer.untyped_storage()
    caches.unbind(owners, readers)
    assert all(m.bound is None for m in (*owners.values(), *(reader for _, reader in readers)))
    del caches
    assert torch._C._storage_Use_Count(storage._cdata) == 1, "somebody else still holds the old buffer"
    again = cached(YOCO, "LBNHC", num_blocks=9)
    again.bind(owners, readers)
    for target, reader in readers:
        assert tensor_of(reader).data_ptr() == tensor_of(owners[target]).data_ptr()
        assert tensor_of(reader).untyped_storage().data_ptr() == again.buffer.data_ptr()
        assert tensor_of(reader).shape[0] == 9 * 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda owners, readers: readers.append(((2, "attention"), Owner())),
        lambda owners, readers: readers.append(((0, "state"), Owner())),
        lambda owners, readers: owners.update({(2, "attention"): Owner()}),
    ],
    ids=["of a layer that shares itself", "of a state that is not there", "as if it kept something"],
)
def test_a_reader_of_nothing_is_refused_and_nothing_is_bound(spoil: Callable[[dict, list], None]):
    owners, readers = mixers(YOCO)
    spoil(owners, readers)
    with pytest.raises(AssertionError, match="are read and keep nothing|do not match the cache"):
        cached(YOCO, "BHLNC").bind(owners, readers)
    assert all(m.bound is None for m in (*owners.values(), *(reader for _, reader in readers)))
