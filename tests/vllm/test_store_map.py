"""The map of a store kernel is learned exactly, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rayk.types.errors import Unsupported
from rayk.vllm.store_map import BlockMap, learn_block_map
from tests.each import each
from tests.vllm.standins import AttentionImpl, Places, keys_transposed, shuffled, side_by_side

HEADS, TOKENS, SIZE_K, SIZE_V = 3, 16, 8, 4
NUM_BLOCKS = 5
Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def cache_of(dtype: torch.dtype, order: str = "BHNC") -> torch.Tensor:
    sizes = {"B": NUM_BLOCKS, "H": HEADS, "N": TOKENS, "C": SIZE_K + SIZE_V}
    memory = torch.full([sizes[axis] for axis in order], 5, dtype=dtype)
    return memory.permute([order.index(axis) for axis in "BHNC"])


def store(places: Places) -> Store:
    impl = AttentionImpl(places)
    return lambda keys, values, cache, slots: impl.do_kv_cache_update(None, keys, values, cache, slots)


def learn(write: Store, cache: torch.Tensor) -> BlockMap:
    dtype = torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype
    return learn_block_map(write, cache, HEADS, (SIZE_K, SIZE_V), dtype)


@each("order", ["BHNC", "BNHC", "HBNC"])
@each("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@each("places", [side_by_side, keys_transposed, shuffled])
def test_places_are_learned_as_they_are(places: Places, dtype: torch.dtype, order: str) -> None:
    """In as many passes as it takes, whatever the strides; the cache itself is left alone."""
    cache = cache_of(dtype, order)
    found = learn(store(places), cache)
    expected = places(HEADS, TOKENS, SIZE_K, SIZE_V)
    assert torch.equal(found.keys.index, expected[:, :, :SIZE_K])
    assert torch.equal(found.values.index, expected[:, :, SIZE_K:])
    assert bool((cache == 5).all())


def test_only_linear_places_are_read_as_strided() -> None:
    linear = learn(store(keys_transposed), cache_of(torch.float32))
    assert linear.keys.affine == (0, (TOKENS * (SIZE_K + SIZE_V), 1, TOKENS))
    assert linear.values.affine == (TOKENS * SIZE_K, (TOKENS * (SIZE_K + SIZE_V), SIZE_V, 1))
    assert learn(store(shuffled), cache_of(torch.float32)).keys.affine is None


def leaves_an_element(keys, values, cache, slots) -> None:
    before = cache[1, 2, 3, 4].clone()
    store(side_by_side)(keys, values, cache, slots)
    cache[1, 2, 3, 4] = before


def writes_its_neighbour(keys, values, cache, slots) -> None:
    store(side_by_side)(keys, values, cache, slots)
    cache[2, 0, 0, 0] = 0


def writes_twice(keys, values, cache, slots) -> None:
    store(side_by_side)(keys, values, cache, slots)
    cache[1, 0, 0, 0] = cache[1, 0, 0, 1]


def drops_the_last_token(keys, values, cache, slots) -> None:
    store(side_by_side)(keys[:-1], values[:-1], cache, slots[:-1])


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (leaves_an_element, "does not write all of a block"),
        (writes_its_neighbour, "nothing of its neighbours"),
        (writes_twice, "exactly once"),
        (drops_the_last_token, "does not write all of a block"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_a_store_that_is_no_map_of_a_block_is_refused(dtype: torch.dtype, write: Store, text: str) -> None:
    with pytest.raises(Unsupported, match=text):
        learn(write, cache_of(dtype))


def test_a_block_with_more_than_keys_and_values_is_refused() -> None:
    with pytest.raises(
        Unsupported, match="a block of 576 elements, where K and V of 3 heads and 16 tokens have 528"
    ):
        learn_block_map(store(side_by_side), cache_of(torch.float32), HEADS, (SIZE_K, 3), torch.float32)
    with pytest.raises(Unsupported, match="a KV cache of torch.int16"):
        learn(store(side_by_side), cache_of(torch.int16))
