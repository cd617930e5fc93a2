"""store_kv: exactly the right bytes change, in every layout; nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayk.kernels.store_kv import store_kv
from rayk.kernels.store_kv.native import why_no_native
from tests.each import each
from tests.kernels.cases import AXIS_ORDERS, layer_view
from tests.markers import interpreted

needs_native = pytest.mark.skipif(why_no_native() is not None, reason=str(why_no_native()))
IMPLS = (
    "reference",
    pytest.param("native", marks=needs_native),
    pytest.param("triton", marks=interpreted),
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCKS, HEADS, DK, DV = 5, 3, 20, 12


def new_tokens(num: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and v as slices of one fused projection, as a model hands them over."""
    fused = torch.randn(num, 2 + HEADS, DK + DV, generator=torch.Generator().manual_seed(1)).to(dtype)
    return fused[:, 2:, :DK], fused[:, 2:, DK:]


def expected_bytes(view: Tensor, k: Tensor, v: Tensor, slots: list[int]) -> Tensor:
    """The view's storage after storing element by element."""
    copy = torch.tensor([], dtype=view.dtype).set_(view.untyped_storage().clone())
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        block, offset = divmod(slot, view.shape[2])
        for head in range(HEADS):
            for c, value in enumerate([*k[token, head], *v[token, head]]):
                index = (block, head, offset, c)
                copy[
                    view.storage_offset() + sum(i * s for i, s in zip(index, view.stride(), strict=True))
                ] = value
    return copy.view(torch.int8)


@each("block_size", [1, 8])
@each("order", AXIS_ORDERS)
@pytest.mark.parametrize("impl", IMPLS)
def test_only_the_named_slots_change(impl: str, order: str, block_size: int) -> None:
    view = layer_view(
        order, blocks=BLOCKS, heads=HEADS, slots=block_size, content=DK + DV, dtype=torch.float32
    )
    slots = [3, -1, 2] if block_size == 1 else [9, -1, 15, 16, 39, -1, 30]
    k, v = new_tokens(len(slots), torch.float32)
    expected = expected_bytes(view, k, v, slots)
    store_kv(k, v, view, torch.tensor(slots), impl=impl)
    stored = torch.tensor([], dtype=torch.int8).set_(view.untyped_storage())
    assert torch.equal(stored, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", [None, *IMPLS])
def test_values_are_copied_or_rounded_once(impl: str | None, dtype: torch.dtype) -> None:
    view = layer_view("BLHNC", blocks=2, heads=HEADS, slots=4, content=DK + DV, dtype=dtype)
    # The native form copies: it is not asked to round.
    k, v = new_tokens(3, dtype if impl == "native" else torch.float32)
    store_kv(k, v, view, torch.tensor([4, 5, 7]), impl=impl)
    assert torch.equal(view[1, :, [0, 1, 3], :DK], k.transpose(0, 1).to(dtype))
    assert torch.equal(view[1, :, [0, 1, 3], DK:], v.transpose(0, 1).to(dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens_is_no_work(impl: str) -> None:
    view = layer_view("BLHNC", blocks=2, heads=HEADS, slots=4, content=DK + DV, dtype=torch.float32)
    k, v = new_tokens(2, torch.float32)
    store_kv(k[:0], v[:0], view, torch.empty(0, dtype=torch.int64), impl=impl)
    store_kv(k, v, view, torch.tensor([-1, -1]), impl=impl)
    assert view.isnan().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_content_must_be_keys_then_values(impl: str) -> None:
    view = layer_view("BLHNC", blocks=2, heads=HEADS, slots=4, content=DK + DV + 1, dtype=torch.float32)
    k, v = new_tokens(1, torch.float32)
    with pytest.raises(AssertionError, match="keys then values"):
        store_kv(k, v, view, torch.tensor([0]), impl=impl)


@needs_native
@pytest.mark.parametrize("slot", [-2, 8, 2**40])
def test_a_slot_out_of_range_stores_nothing(slot: int) -> None:
    view = layer_view("BLHNC", blocks=2, heads=HEADS, slots=4, content=DK + DV, dtype=torch.float32)
    k, v = new_tokens(1, torch.float32)
    with pytest.raises(AssertionError, match="out of range"):
        store_kv(k, v, view, torch.tensor([slot]), impl="native")
    assert view.isnan().all()
