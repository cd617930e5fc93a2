"""The buffer and its views, element by element, against memory numbered by definition."""

from __future__ import annotations

import gc
import hashlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rayk.kv.caches import (
    TORCH_DTYPES,
    BlockReference,
    CacheView,
    CanonicalKVCaches,
    FieldView,
    allocate,
    empty_bytes,
)
from rayk.kv.fields import ITEMSIZE
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import CacheKey, group_layers
from rayk.kv.layout import LAYOUTS, get_layout
from rayk.kv.specs import MlaSpec
from rayk.parallel.shard import EngineShape
from tests.each import each
from tests.kv.brute import (
    RANK_CASES,
    Case,
    brute_addresses,
    brute_bundles,
    full,
    ident,
    keyed,
    mamba2,
    sliding,
)
from tests.markers import gpu

CPU = torch.device("cpu")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def make(case: Case, layout: str, tp_rank: int, fill: int | None = 0x5A) -> CanonicalKVCaches:
    return allocate(case.rank(layout, tp_rank), CPU, fill)


def fields_of(caches: CanonicalKVCaches, key: CacheKey) -> dict[str, Tensor]:
    """Field -> its view [B, U, N, elements]; a bundle of unlike dtypes is seen as bytes, and cut by them."""
    view = caches.view(*key)
    (group,) = [g for g in caches.geometry.groups if key in g.group.keys]
    dtypes = {f.field.name: getattr(torch, f.field.dtype) for f in group.fields}
    kept = brute_bundles(group.group.spec)
    assert isinstance(view, Tensor) == (len(kept) == 1)
    bundles = {"kv": view} if isinstance(view, Tensor) else dict(view)
    found = {}
    for pieces, (name, bundle) in zip(kept, bundles.items(), strict=True):
        assert name in ("kv", pieces[0].name)
        own = {dtypes[p.name] for p in pieces}
        assert {bundle.dtype} == (own if len(own) == 1 else {torch.uint8})
        parts = bundle.split([p.row_bytes // bundle.element_size() for p in pieces], dim=-1)
        found |= {p.name: part.view(dtypes[p.name]) for p, part in zip(pieces, parts, strict=True)}
    return found


@each(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_views_lie_where_the_layout_puts_them(case: Case, layout: str, tp_rank: int):
    """A number per element of the buffer, seen through the view, is the element's number by definition."""
    caches = make(case, layout, tp_rank)
    for group, places in zip(caches.geometry.groups, brute_addresses(case, layout, tp_rank), strict=True):
        dtypes = {f.field.name: f.field.dtype for f in group.fields}
        for position, key in enumerate(group.group.keys):
            fields = fields_of(caches, key)
            assert list(fields) == list(places)
            for name, view in fields.items():
                size = view.element_size()
                assert view.dtype == getattr(torch, dtypes[name])
                assert view.stride(-1) == 1
                assert view.untyped_storage().data_ptr() == caches.buffer.untyped_storage().data_ptr()
                numbers = torch.arange(caches.geometry.pages_bytes // size)
                seen = torch.as_strided(numbers, view.shape, view.stride(), view.storage_offset())
                np.testing.assert_array_equal(seen.numpy() * size, places[name][position][..., ::size])


@each(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_writing_through_a_view_writes_those_bytes_and_no_others(case: Case, layout: str, tp_rank: int):
    for group, places in zip(case.groups, brute_addresses(case, layout, tp_rank), strict=True):
        caches = make(case, layout, tp_rank)
        for view in fields_of(caches, group.keys[-1]).values():
            view.view(INTEGERS[view.element_size()])[1] = -1
        changed = np.flatnonzero(caches.buffer.numpy()[: caches.geometry.pages_bytes] != 0x5A)
        written = np.concatenate([addresses[-1, 1].reshape(-1) for addresses in places.values()])
        np.testing.assert_array_equal(changed, np.sort(written))


@each(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
def test_what_kernels_write_is_found_where_the_geometry_says(case: Case, layout: str, tp_rank: int):
    """Each byte of a field, written through the bound view, is its coordinate's own number; read back from
    the buffer at geometry's address. Groups share bytes, so each has the buffer to itself."""
    for group in case.rank(layout, tp_rank).groups:
        caches = make(case, layout, tp_rank)
        expected: dict[int, int] = {}
        for position, key in enumerate(group.group.keys):
            for number, (name, view) in enumerate(fields_of(caches, key).items()):
                field = group.field(name)
                for index in np.ndindex(*view.shape[:3]):
                    size = field.field.row_bytes
                    text = f"{key} {number} {index[0]} {field.units[index[1]]} {index[2]}".encode()
                    content = np.frombuffer(hashlib.shake_128(text).digest(size), dtype=np.uint8)
                    view[index].view(torch.uint8).copy_(torch.from_numpy(content.copy()))
                    start = field.address(position, *index)
                    expected |= dict(zip(range(start, start + size), content.tolist(), strict=True))
        at = np.array(list(expected))
        memory = caches.buffer.view(torch.uint8).numpy()
        np.testing.assert_array_equal(memory[at], np.array(list(expected.values()), dtype=np.uint8))


@each(("case", "layout", "tp_rank"), RANK_CASES, ids=ident)
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
            referenced = [numbers[r.tensor][block, r.offset : r.offset + r.num_bytes] for r in references]
            mine = np.concatenate(
                [a[:, block * ratio : (block + 1) * ratio].reshape(-1) for a in addresses.values()]
            )
            assert set(mine.tolist()) <= set(np.concatenate(referenced).tolist())
            # None is there for nothing: each holds bytes of the block.
            assert all(np.isin(h, mine).any() for h in referenced)


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
    groups = group_layers(keyed({0: spec, 1: window, 2: window, 3: spec, 4: window, 5: window}))
    rank = plan_rank(groups, LAYOUTS["BLHNC"], num_blocks=10)
    caches = allocate(rank, CPU)
    (tensor,) = caches.tensors
    assert (tensor.shape, tensor.dtype) == ((10, 4096), torch.int8)
    at = [fields_of(caches, (layer, "attention"))["k"].data_ptr() for layer in range(4)]
    assert at[0] == at[1] == at[2] == at[3] - 2048
    assert caches.references == ((BlockReference(0, 0, 4096),),) * 3


@each("layout", LAYOUTS)
@each("num_blocks", [2, 3, 7])
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
    assert torch.all(torch.isnan(fields_of(make(case, "BHLNC", 0, -1), (0, "attention"))["k"]))


class Owner:
    """What a layer does with its cache: keeps it, forgets it, writes to it."""

    bound: CacheView | None = None

    def bind_kv_cache(self, view: CacheView) -> None:
        self.bound = view

    def unbind_kv_cache(self) -> None:
        self.bound = None

    def field_views(self) -> tuple[FieldView, ...]:
        raise NotImplementedError

    @property
    def tensors(self) -> list[Tensor]:
        assert self.bound is not None
        return [self.bound] if isinstance(self.bound, Tensor) else list(self.bound.values())


BOUND = Case("bind", {0: full(), 3: (sliding(3), mamba2()), 5: full(), 6: mamba2()}, 1)


@pytest.mark.parametrize("layout", ["BLNHC", "LBHNC"])
def test_bind_gives_every_owner_its_view(layout: str):
    caches = make(BOUND, layout, 0)
    owners = {key: Owner() for key in keyed(BOUND.specs)}
    caches.bind(owners)
    for key, owner in owners.items():
        expected = caches.view(*key)
        views = [expected] if isinstance(expected, Tensor) else list(expected.values())
        assert len(views) == (1 if key[1] == "attention" else 4)
        for bound, view in zip(owner.tensors, views, strict=True):
            assert bound.data_ptr() == view.data_ptr()
            assert (bound.shape, bound.stride(), bound.dtype) == (view.shape, view.stride(), view.dtype)


def test_unbound_free_and_bound_again():
    """After unbind nothing holds the buffer; a new allocation, of another size, takes the owners over."""
    owners = {key: Owner() for key in keyed(BOUND.specs)}
    caches = make(BOUND, "BHLNC", 0)
    caches.bind(owners)
    storage = caches.buffer.untyped_storage()
    caches.unbind(owners)
    assert all(owner.bound is None for owner in owners.values())
    del caches
    assert torch._C._storage_Use_Count(storage._cdata) == 1, "somebody else still holds the old buffer"
    again = allocate(BOUND.rank("BLHNC", 0, num_blocks=7), CPU, 0x5A)
    again.bind(owners)
    for owner in owners.values():
        for view in owner.tensors:
            assert view.shape[0] % 7 == 0
            assert view.untyped_storage().data_ptr() == again.buffer.data_ptr()
            view.view(INTEGERS[view.element_size()])[-1] = 0
    last = again.buffer[again.geometry.block_bytes * 6 : again.geometry.pages_bytes]
    assert torch.any(last == 0)
    assert torch.all(again.buffer[: again.geometry.block_bytes * 6] == 0x5A)


@pytest.mark.parametrize(
    "wrong",
    [
        {(0, "attention"), (3, "attention")},
        {(0, "attention"), (3, "attention"), (3, "state"), (5, "attention"), (6, "attention")},
        set(),
        {*keyed(BOUND.specs), (7, "state")},
    ],
    ids=lambda wrong: str(sorted(wrong)),
)
def test_bind_refuses_other_owners_and_binds_none(wrong: set[CacheKey]):
    caches = make(BOUND, "BLNHC", 0)
    owners = {key: Owner() for key in wrong}
    with pytest.raises(AssertionError, match="do not match the cache"):
        caches.bind(owners)
    assert all(owner.bound is None for owner in owners.values())


@pytest.mark.parametrize("key", [(9, "attention"), (0, "state"), (6, "attention")], ids=str)
def test_what_is_not_kept_has_no_view(key: CacheKey):
    with pytest.raises(KeyError, match=f"layer {key[0]} keeps no {key[1]}"):
        make(BOUND, "BHLNC", 0).view(*key)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here")
def test_a_cache_on_the_host_asks_for_huge_pages():
    """The kernel's own word for it: flag hg of the mapping that the buffer lies in."""
    buffer = empty_bytes(8 << 20, CPU)
    assert (buffer.shape, buffer.dtype) == ((8 << 20,), torch.int8)
    stretch: tuple[int, int] = (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            stretch = int(found[1], 16), int(found[2], 16)
        if line.startswith("VmFlags") and stretch[0] <= buffer.data_ptr() < stretch[1]:
            assert "hg" in line.split()
            return
    pytest.fail("the buffer is in no mapping")


def test_memory_that_cannot_be_page_locked_says_so(monkeypatch: pytest.MonkeyPatch):
    """Without CUDA, and where CUDA refuses: the buffer is there all the same."""
    rank = BOUND.rank("BHLNC", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    caches = allocate(rank, CPU, 3, pinned=True)
    assert not caches.is_pinned
    assert (caches.buffer[: rank.pages_bytes] == 3).all()
    cuda = RecordingCuda(status=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    buffer = empty_bytes(1 << 16, CPU, pinned=True)
    del buffer
    gc.collect()
    assert [name for name, *_ in cuda.calls] == ["register"], "what was not locked is not unlocked"


def test_locked_memory_is_unlocked_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch):
    cuda = RecordingCuda(status=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    buffer = empty_bytes(3 << 20, CPU, pinned=True)
    address, part = buffer.data_ptr(), buffer[7:]
    del buffer
    gc.collect()
    assert cuda.calls == [("register", address, 3 << 20, True)]
    del part
    gc.collect()
    assert cuda.calls[1:] == [("unregister", address, 0, True)]


class RecordingCuda:
    """What is asked of CUDA's runtime, and whether the memory is mapped then."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[str, int, int, bool]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self._note("register", address, num_bytes)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self._note("unregister", address, 0)
        return 0

    def _note(self, name: str, address: int, num_bytes: int) -> None:
        stretches = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/maps").read_text(), re.M)
        mapped = any(int(first, 16) <= address < int(stop, 16) for first, stop in stretches)
        self.calls.append((name, address, num_bytes, mapped))


@gpu
def test_a_cache_on_the_host_is_page_locked_for_a_gpu():
    """A copy to the GPU and back that the host does not wait for brings every byte."""
    caches = allocate(BOUND.rank("BHLNC", 0), CPU, 3, pinned=True)
    assert caches.is_pinned
    there = caches.buffer.to("cuda", non_blocking=True)
    back = empty_bytes(there.numel(), CPU, pinned=True)
    assert back.is_pinned()
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, caches.buffer)


def test_every_dtype_of_a_spec_has_a_torch_dtype():
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()} == ITEMSIZE
    for name in TORCH_DTYPES:
        view = make(Case(name, {0: full(dtype=name)}, 1), "LBNHC", 0).view(0)
        assert isinstance(view, Tensor)
        assert (view.dtype, view.shape) == (TORCH_DTYPES[name], (3, 2, 4, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["one head", "latents"])
def test_two_ranks_that_deal_tokens_keep_half_of_a_head_each(kind: str, layout: str) -> None:
    """The pages of a request of 64 tokens, 3 layers of 2 * 8 float32: 12 KiB on each of two replicas."""
    spec = MlaSpec(16, 12, 4, "float32", 4) if kind == "latents" else full(16, 1, 8, 8, "float32", 4)
    kept = {}
    for dcp, rank in itertools.product((1, 2), (0, 1)):
        groups = group_layers({(layer, "attention"): spec for layer in range(3)}, dcp=dcp)
        num_blocks = 1 + 64 // groups[0].spec.block_size  # the null block, and the request's
        shape = EngineShape(2, dcp)
        caches = allocate(
            plan_rank(groups, get_layout(layout), shape=shape, rank=rank, num_blocks=num_blocks), CPU
        )
        kept[dcp, rank] = sum(tensor[1:].numel() for tensor in caches.tensors)
    assert kept == {(1, 0): 12288, (1, 1): 12288, (2, 0): 6144, (2, 1): 6144}
