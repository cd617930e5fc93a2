"""Work recorded on a CPU and done again on what its buffers hold then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rayk.kernels.packed_product import pack, packed_product
from rayk.kernels.pointwise import add, gated, rms_norm
from rayk.kernels.replay import CannotReplay, Pool, Recording, why_no_native
from rayk.kernels.store_kv import store_kv

pytestmark = pytest.mark.skipif(why_no_native() is not None, reason=str(why_no_native()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_and_operators_are_done_again_on_new_inputs(dtype: torch.dtype) -> None:
    """C++ and torch in turns, views of both, an operator in place; memory is used twice on the way."""
    weight = pack(torch.randn(64, 32).to(dtype))
    x = torch.randn(3, 32).to(dtype)

    def work() -> torch.Tensor:
        inner = gated(packed_product(x, weight, 64, None), "silu")
        more = (inner[:, :16] * 2).cos().repeat(1, 2)
        more.add_(inner)
        return add(rms_norm(more, None, eps=1e-5, wide=False), x).flatten()

    pool = Pool()
    for _ in range(2):  # the second recording has the memory of the first
        with torch.inference_mode(), Recording(pool) as recording:
            result = work()
    for seed in range(3):
        x.copy_(torch.randn(3, 32, generator=torch.Generator().manual_seed(seed)))
        with torch.inference_mode():
            recording.replay()
            replayed, expected = result.clone(), work()
        assert torch.equal(replayed, expected)


def test_memory_that_was_given_back_is_used_again() -> None:
    x = torch.ones(4, 512)
    pool = Pool()
    with torch.inference_mode(), Recording(pool) as recording:
        y = add(x, x)
        for _ in range(100):
            y = add(y, x)
    assert len(pool) == 2
    recording.replay()
    assert torch.equal(y, 102 * x)


@pytest.mark.parametrize(
    "look", [torch.Tensor.tolist, lambda x: x.sum().item(), torch.nonzero, lambda x: x.topk(2)]
)
def test_work_that_may_differ_the_next_time_is_refused(look: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(CannotReplay, match="aten"), torch.inference_mode(), Recording(Pool()):
        look(torch.ones(3) + 1)
    with torch.inference_mode(), Recording(Pool()):
        add(torch.ones(1, 3), torch.ones(1, 3))  # the refusal left nothing behind


def test_a_kernel_that_fails_in_a_replay_says_which() -> None:
    k = torch.randn(1, 2, 8)
    cache, slots = torch.zeros(3, 2, 4, 16), torch.tensor([5])
    with torch.inference_mode(), Recording(Pool()) as recording:
        store_kv(k, k, cache, slots)
    assert torch.equal(cache[1, :, 1, :8], k[0])
    slots[0] = 6
    recording.replay()
    assert torch.equal(cache[1, :, 2, 8:], k[0])
    slots[0] = 12
    with pytest.raises(AssertionError, match="rayk_store_kv failed"):
        recording.replay()


def test_operators_write_into_what_they_made_when_recorded() -> None:
    """Also where the result is broadcast or converted, and where an operator has no form that writes."""
    x, ids = torch.randn(2, 1), torch.tensor([2, 0])
    weight = torch.randn(4, 3)

    def work() -> torch.Tensor:
        return (x * weight[:1]).bfloat16().float() + torch.nn.functional.embedding(ids, weight).cos()

    with torch.inference_mode(), Recording(Pool()) as recording:
        result = work()
        at = result.data_ptr()
    x.copy_(torch.randn(2, 1))
    ids.copy_(torch.tensor([3, 1]))
    with torch.inference_mode():
        recording.replay()
        assert torch.equal(result, work())
    assert result.data_ptr() == at
