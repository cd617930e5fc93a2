"""The buffer and its views, element by element, against memory numbered by definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rayk.kv.caches import TORCH_DTYPES, BlockReference, CanonicalKVCaches, allocate
from rayk.kv.fields import ITEMSIZE
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from tests.kv.brute import RANK_CASES, Case, brute_addresses, full, ident, sliding

CPU = torch.device("cpu")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def make(case: Case, layout: str, tp_rank: int, fill: int | None = 0x5A) -> CanonicalKVCaches:
    return allocate(case.rank(layout, tp_rank), CPU, fill)


@pytest.mark.parametrize(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_views_lie_where_the_layout_puts_them(case: Case, layout: str, tp_rank: int):
    """A number per element of the buffer, seen through the view, is the element's number by definition."""
    caches = make(case, layout, tp_rank)
    for group, addresses in zip(caches.geometry.groups, brute_addresses(case, layout, tp_rank), strict=True):
        for layer, expected in zip(group.group.layers, addresses, strict=True):
            view = caches.view(layer)
            size = view.element_size()
            assert view.dtype == getattr(torch, group.group.spec.dtype)
            assert view.stride(-1) == 1
            assert view.untyped_storage().data_ptr() == caches.buffer.untyped_storage().data_ptr()
            numbers = torch.arange(caches.geometry.pages_bytes // size)
            seen = torch.as_strided(numbers, view.shape, view.stride(), view.storage_offset())
            np.testing.assert_array_equal(seen.numpy() * size, expected[..., ::size])


@pytest.mark.parametrize(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_writing_through_a_view_writes_those_bytes_and_no_others(case: Case, layout: str, tp_rank: int):
    for group, addresses in zip(case.groups, brute_addresses(case, layout, tp_rank), strict=True):
        caches = make(case, layout, tp_rank)
        view = caches.view(group.layers[-1])
        view.view(INTEGERS[view.element_size()])[1] = -1
        changed = np.flatnonzero(caches.buffer.numpy()[: caches.geometry.pages_bytes] != 0x5A)
        np.testing.assert_array_equal(changed, np.sort(addresses[-1, 1].reshape(-1)))


@pytest.mark.parametrize(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_tensors_cover_all_pages_once_and_references_hold_their_blocks(case: Case, layout: str, tp_rank: int):
    caches = make(case, layout, tp_rank)
    geometry = caches.geometry
    pages = np.zeros(geometry.pages_bytes, dtype=int)
    numbers = [_byte_numbers(caches, tensor) for tensor in caches.tensors]
    for tensor, covered in zip(caches.tensors, numbers, strict=True):
        assert tensor.dtype == torch.int8
        assert tensor.shape[0] == geometry.num_blocks
        np.add.at(pages, covered.reshape(-1), 1)
    assert np.all(pages == 1)
    expected = brute_addresses(case, layout, tp_rank)
    for group, references, addresses in zip(geometry.groups, caches.references, expected, strict=True):
        if geometry.layout.block_outermost:
            assert references == (BlockReference(0, 0, geometry.block_bytes),)
        ratio = group.kernel_blocks_per_block
        for block in range(geometry.num_blocks):
            held = [numbers[r.tensor][block, r.offset : r.offset + r.num_bytes] for r in references]
            mine = addresses[:, block * ratio : (block + 1) * ratio].reshape(-1)
            assert set(mine.tolist()) <= set(np.concatenate(held).tolist())
            # None is there for nothing: each holds bytes of the block.
            assert all(np.isin(h, mine).any() for h in held)


def _byte_numbers(caches: CanonicalKVCaches, tensor: Tensor) -> np.ndarray:
    assert tensor.untyped_storage().data_ptr() == caches.buffer.untyped_storage().data_ptr()
    numbers = torch.arange(caches.geometry.pages_bytes)
    return torch.as_strided(numbers, tensor.shape, tensor.stride(), tensor.storage_offset()).numpy()


@pytest.mark.parametrize(
    ("layout", "num_tensors", "per_group"),
    [("BHLNC", 1, 1), ("BLHNC", 1, 1), ("BLNHC", 1, 1), ("LBHNC", 2, 2), ("LBNHC", 2, 2), ("LHBNC", 4, 4)],
)
def test_number_of_tensors(layout: str, num_tensors: int, per_group: int):
    """Two positions, two heads: the last group has one layer and so half the references."""
    case = Case("count", {0: full(), 1: full(), 2: sliding(3), 3: sliding(3), 4: sliding(3)}, 1, None)
    caches = make(case, layout, 0)
    assert len(caches.tensors) == num_tensors
    assert [len(r) for r in caches.references] == [per_group, per_group, max(1, per_group // 2)]


def test_hybrid_canonical_allocation():
    """FIXTURES: one int8 tensor (10, 4096); full.0 and sw.0 share an address; three references of 4096."""
    spec = full(block_size=16, kv_heads=4, head_k=8, head_v=8, dtype="float16", query_heads=4)
    window = sliding(64, spec)
    groups = group_layers({0: spec, 1: window, 2: window, 3: spec, 4: window, 5: window})
    rank = plan_rank(groups, LAYOUTS["BLHNC"], tp_size=1, tp_rank=0, num_blocks=10)
    caches = allocate(rank, CPU)
    (tensor,) = caches.tensors
    assert (tensor.shape, tensor.dtype) == ((10, 4096), torch.int8)
    assert caches.view(0).data_ptr() == caches.view(1).data_ptr() == caches.view(2).data_ptr()
    assert caches.view(3).data_ptr() == caches.view(0).data_ptr() + 2048
    assert caches.references == ((BlockReference(0, 0, 4096),),) * 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_blocks", [2, 3, 7])
def test_generations_lie_in_the_buffer_behind_the_pages(layout: str, num_blocks: int):
    case = Case("odd", {0: full(block_size=1, kv_heads=1)}, 1, None, num_blocks)
    caches = make(case, layout, 0)
    generations = caches.generations
    assert (generations.dtype, generations.tolist()) == (torch.int64, [0] * num_blocks)
    start = generations.data_ptr() - caches.buffer.data_ptr()
    assert caches.geometry.pages_bytes <= start == caches.geometry.generations_offset
    assert start % 64 == 0
    assert start + 8 * num_blocks == caches.buffer.numel()
    generations += 1
    assert bytes(caches.buffer[start:].numpy().tobytes()) == (1).to_bytes(8, "little") * num_blocks
    assert torch.all(caches.buffer[: caches.geometry.pages_bytes] == 0x5A)


def test_fill_poisons_pages_only():
    case = Case("fill", {0: full()}, 1, None)
    poisoned = make(case, "BHLNC", 0, -1)
    assert torch.all(poisoned.buffer[: poisoned.geometry.pages_bytes] == -1)
    assert torch.all(poisoned.generations == 0)
    assert torch.all(allocate(case.rank("BHLNC", 0), CPU).buffer == 0)
    assert torch.all(make(case, "BHLNC", 0, None).generations == 0)


def test_poison_is_nan_where_floats_are_kept():
    case = Case("nan", {0: full(dtype="float32")}, 1, None)
    assert torch.all(torch.isnan(make(case, "BHLNC", 0, -1).view(0)))


class Layer:
    kv_cache: Tensor | None = None

    def bind_kv_cache(self, view: Tensor) -> None:
        self.kv_cache = view


def test_bind_gives_every_layer_its_view():
    case = Case("bind", {0: full(), 3: sliding(3), 5: full()}, 1, None)
    caches = make(case, "BLNHC", 0)
    layers = {i: Layer() for i in case.specs}
    caches.bind(layers)
    for index, layer in layers.items():
        assert layer.kv_cache is not None
        expected = caches.view(index)
        assert layer.kv_cache.data_ptr() == expected.data_ptr()
        assert (layer.kv_cache.shape, layer.kv_cache.stride()) == (expected.shape, expected.stride())


@pytest.mark.parametrize("wrong", [{0, 3}, {0, 3, 5, 6}, set(), {0, 3, 6}], ids=str)
def test_bind_refuses_other_layers_and_binds_none(wrong: set[int]):
    caches = make(Case("bind", {0: full(), 3: sliding(3), 5: full()}, 1, None), "BLNHC", 0)
    layers = {i: Layer() for i in wrong}
    with pytest.raises(AssertionError, match="do not match the cache"):
        caches.bind(layers)
    assert all(layer.kv_cache is None for layer in layers.values())


def test_a_layer_without_kv_has_no_view():
    with pytest.raises(KeyError, match="layer 9 keeps no KV"):
        make(Case("one", {0: full()}, 1, None), "BHLNC", 0).view(9)


def test_every_dtype_of_a_spec_has_a_torch_dtype():
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == ITEMSIZE
    for name in TORCH_DTYPES:
        view = make(Case(name, {0: full(dtype=name)}, 1, None), "LBNHC", 0).view(0)
        assert (view.dtype, view.shape) == (TORCH_DTYPES[name], (3, 2, 4, 5))
