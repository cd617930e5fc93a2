"""Kernels give the same in Triton's interpreter as it comes and as tests have it, with fewer steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from tests import quick_triton
from tests.kernels.cases import Batch, make_batch
from tests.markers import interpreted

pytestmark = interpreted


@pytest.fixture(autouse=True)
def _quick_again() -> Iterator[None]:
    yield
    quick_triton.quicken()


def attend(batch: Batch) -> torch.Tensor:
    from rayk.kernels.paged_attention import paged_attention

    return paged_attention(*batch.arguments(), scale=0.25, window=9, head_size_k=16, impl="triton")


def test_kernels_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [make_batch(((1, 9), (5, 20)), window=9, dtype=d) for d in (torch.float32, torch.bfloat16)]
    quick_triton.as_it_comes()
    wanted = [attend(batch) for batch in batches]
    interpreter = sys.modules["triton.runtime.interpreter"]
    calls: list[object] = []
    original = interpreter._patch_lang
    monkeypatch.setattr(interpreter, "_patch_lang", lambda fn: (calls.append(fn), original(fn))[1])
    attend(batches[0])
    num_calls = len(calls)
    calls.clear()
    quick_triton.quicken()
    assert all(torch.equal(attend(b), w) for b, w in zip(batches, wanted, strict=True))
    assert len(calls) == len(batches), "once a launch"
    assert num_calls > 5, "without this, once for each call of a jitted function"
    quick_triton.as_it_comes()


def test_dtypes_are_those_of_the_interpreter() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    names = ("int1", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    names += ("float16", "bfloat16", "float32", "float64", "float8e5", "float8e4nv", "float8e4b15")
    plain = [getattr(tl, name) for name in names]
    dtypes = [*plain, *(tl.block_type(d, [4]) for d in plain), tl.pointer_type(tl.int8)]
    dtypes.append(tl.block_type(tl.pointer_type(tl.float32), [2, 2]))
    quick_triton.quicken()
    found = [interpreter._get_np_dtype(dtype) for dtype in (*dtypes, *reversed(dtypes))]
    quick_triton.as_it_comes()
    assert found == [interpreter._get_np_dtype(dtype) for dtype in (*dtypes, *reversed(dtypes))]


def test_an_overflow_is_noticed_as_before_where_the_interpreter_is_asked_to() -> None:
    """The assertion belongs to `debug`; without it nobody looks, whether or not the sum is made."""
    from dataclasses import replace

    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    large = tl.tensor(interpreter.TensorHandle(np.array([2**31 - 1], dtype=np.int32), tl.int32), tl.int32)
    noticed = {}
    for how in (quick_triton.as_it_comes, quick_triton.quicken):
        how()
        options = semantic.builder.options
        for debug in (False, True):
            semantic.builder.options = replace(options, debug=debug)
            try:
                semantic.binary_op_sanitize_overflow_impl(large, large, semantic.add)
                noticed[how.__name__, debug] = False
            except AssertionError as error:
                noticed[how.__name__, debug] = "int32 overflow" in str(error)
            finally:
                semantic.builder.options = options
    assert noticed == {
        ("as_it_comes", False): False,
        ("quicken", False): False,
        ("as_it_comes", True): True,
        ("quicken", True): True,
    }
