"""Paged attention: which tokens are seen (exactly), and how right the numbers are (against float64)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayk.kernels.paged_attention import head_groups, paged_attention, why_no_native
from tests.each import each
from tests.helpers import assert_matches
from tests.kernels.cases import AXIS_ORDERS, Batch, count_marks, dense_attention, make_batch, num_seen
from tests.markers import gpu, interpreted, one_per

needs_native = pytest.mark.skipif(why_no_native() is not None, reason=f"no native: {why_no_native()}")
IMPLS = (
    "reference",
    "torch",
    pytest.param("native", marks=needs_native),
    pytest.param("triton", marks=interpreted),
)
FAST = IMPLS[1:]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MIXED = ((1, 1), (1, 38), (7, 7), (9, 40), (1, 64))
"""Decodes and prefills, whole and chunked; ends inside a block and on its border."""


def run(batch: Batch, impl: str, scale: float = 0.25) -> Tensor:
    return paged_attention(
        *batch.arguments(),
        scale=scale,
        window=batch.window,
        head_size_k=batch.head_size_k,
        impl=impl,
    )


def check_marks(batch: Batch, impl: str) -> None:
    """Every query counts exactly the marks of the tokens it sees; NaN anywhere fails."""
    out = run(batch, impl).float()
    assert out.isfinite().all(), "a slot that no token owns was read"
    counts = torch.round(out * num_seen(batch)).long()
    assert torch.equal(counts, count_marks(batch))


@each("window", [None, 21])
@each("block_size", [1, 8, 16])
@each("order", AXIS_ORDERS)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_query_sees_exactly_its_tokens(
    impl: str, order: str, block_size: int, window: int | None, poisoned_empty: None
) -> None:
    check_marks(make_batch(MIXED, order=order, block_size=block_size, window=window, marks=True), impl)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", IMPLS)
def test_addressing_is_exact_in_every_dtype(impl: str, dtype: torch.dtype) -> None:
    check_marks(make_batch(((1, 300), (33, 130)), dtype=dtype, marks=True), impl)


@each("order", AXIS_ORDERS)
@pytest.mark.parametrize("impl", IMPLS)
def test_kernel_blocks_smaller_than_the_managers(impl: str, order: str) -> None:
    batch = make_batch(MIXED, order=order, block_size=16, kernel_block_size=4, window=21, marks=True)
    check_marks(batch, impl)


@each(
    "kv_index",
    [(0,), (1, 0), (0, 0, 0, 0, 0, 0), (2, 0, 1, 2, 0, 1), (0, 0, 0, 1, 2), (2, 2, 0), (1,) * 12],
    ids=str,
)
@pytest.mark.parametrize("impl", IMPLS)
def test_kv_head_of_each_query_head_is_explicit(impl: str, kv_index: tuple[int, ...]) -> None:
    """Any map from query heads to KV heads: uneven, out of order, some KV heads unread."""
    check_marks(make_batch(((1, 20), (6, 11)), kv_heads=3, kv_index=kv_index, marks=True), impl)


@one_per()
@each("window", [1, 2, 15, 16, 17, 63, 64, 65, 1000])
@pytest.mark.parametrize("impl", IMPLS)
def test_window_edges(impl: str, window: int) -> None:
    check_marks(make_batch(((1, 130), (40, 100), (65, 65)), window=window, marks=True), impl)


@each("head_sizes", [(16, 16), (20, 20), (64, 64), (24, 16), (80, 48), (128, 128)], ids=str)
@each("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", FAST)
def test_numbers_match_float64(impl: str, dtype: torch.dtype, head_sizes: tuple[int, int]) -> None:
    dk, dv = head_sizes
    batch = make_batch(MIXED, head_size_k=dk, head_size_v=dv, dtype=dtype, window=30)
    actual = run(batch, impl, scale=dk**-0.5)
    exact = dense_attention(batch, torch.float64, dk**-0.5)
    eager = dense_attention(batch, dtype, dk**-0.5)
    assert_matches(actual, exact, eager, what=impl, tight=impl != "torch")


def test_reference_in_float64_is_exact() -> None:
    batch = make_batch(MIXED, dtype=torch.float64, window=13)
    exact = dense_attention(batch, torch.float64, 0.25)
    assert float((run(batch, "reference") - exact).abs().max()) < 1e-14


@pytest.mark.parametrize("impl", FAST)
def test_scores_far_apart_do_not_overflow(impl: str) -> None:
    """Scores of +-1e4: the softmax must subtract its running maximum."""
    batch = make_batch(((1, 200), (70, 130)))
    batch.q *= 400
    actual = run(batch, impl, scale=1.0)
    exact = dense_attention(batch, torch.float64, 1.0)
    assert_matches(actual, exact, dense_attention(batch, torch.float32, 1.0), what=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_query_may_be_a_slice_of_a_fused_projection(impl: str) -> None:
    batch = make_batch(MIXED)
    expected = run(batch, impl)
    fused = torch.full((len(batch.q), 9, 16), float("nan"))
    fused[:, 3:7] = batch.q
    batch.q = fused[:, 3:7]
    assert torch.equal(run(batch, impl), expected)


@pytest.mark.parametrize("impl", FAST)
def test_cache_dtype_may_differ_from_the_querys(impl: str) -> None:
    batch = make_batch(MIXED, dtype=torch.bfloat16)
    batch.q = batch.q.float()
    exact = dense_attention(batch, torch.float64, 0.25)
    assert_matches(run(batch, impl), exact, dense_attention(batch, torch.float32, 0.25), what=impl)


@needs_native
def test_native_on_two_threads_gives_the_same_bits() -> None:
    batch = make_batch(((1, 300), (90, 200), (1, 77)), kv_index=(0, 1, 1, 0), window=100)
    expected = run(batch, "native")
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(batch, "native"), expected)
    finally:
        torch.set_num_threads(1)


@needs_native
@pytest.mark.parametrize("block", [-1, 10**6, torch.iinfo(torch.int32).max])
def test_native_refuses_a_block_outside_the_cache(block: int) -> None:
    batch = make_batch(((1, 70),))
    batch.block_table[0, 2] = block
    with pytest.raises(AssertionError, match="out of range"):
        run(batch, "native")


@needs_native
def test_native_leaves_denormals_alone() -> None:
    """A library linked with -ffast-math would flush them in the whole process."""
    run(make_batch(((1, 5),)), "native")
    tiny = torch.tensor([1e-40], dtype=torch.float32)
    assert float(tiny * 1.0) != 0.0


def test_unknown_implementation_is_an_error() -> None:
    with pytest.raises(AssertionError, match="unknown paged_attention"):
        run(make_batch(((1, 5),)), "magic")


def test_head_groups_gathers_query_heads_by_kv_head() -> None:
    groups = head_groups(torch.tensor([2, 0, 2, 2, 0]))
    assert groups.kv_heads == (0, 2)
    assert groups.query_heads == ((1, 4), (0, 2, 3))
    assert groups.kv_heads_tensor.tolist() == [0, 2]
    assert groups.query_heads_tensor.tolist() == [[1, 4, -1], [0, 2, 3]]
    assert not groups.uniform


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 21])
def test_triton_on_the_gpu(dtype: torch.dtype, window: int | None) -> None:
    for order in AXIS_ORDERS:
        batch = make_batch(MIXED, order=order, head_size_k=64, head_size_v=64, dtype=dtype, window=window)
        exact = dense_attention(batch, torch.float64, 0.125)
        eager = dense_attention(batch, dtype, 0.125)
        # The view's strides must survive the move: copy its whole storage.
        storage = torch.tensor([], dtype=dtype).set_(batch.cache.untyped_storage()).cuda()
        cache = storage.as_strided(batch.cache.shape, batch.cache.stride(), batch.cache.storage_offset())
        q, _, *rest = batch.arguments()
        out = paged_attention(
            q.cuda(), cache, *(t.cuda() for t in rest), scale=0.125, window=window, head_size_k=64
        )
        # The low-precision kernel multiplies rounded weights, so it is not held to the tight rule.
        assert_matches(out.cpu(), exact, eager, what=order)
