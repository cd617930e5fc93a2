"""C++ kernels built for CPUs whose registers are narrower than this one's: as right, in all their tails."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rayk.kernels import native
from rayk.kernels.best_tokens import native as best_tokens
from rayk.kernels.native import NativeKernels, load_native
from rayk.kernels.packed_product import native as packed_product
from rayk.kernels.paged_attention import native as paged_attention
from rayk.kernels.pointwise import native as pointwise
from tests.kernels import test_best_tokens as tokens
from tests.kernels import test_packed_product as products
from tests.kernels import test_paged_attention as attention
from tests.kernels import test_pointwise as points
from tests.markers import one_per, thorough

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64"),
    pytest.mark.skipif(packed_product.why_no_native() is not None, reason="C++ kernels cannot be built"),
]
KERNELS = (best_tokens, packed_product, paged_attention, pointwise)
NARROWER = {8: "-mno-avx512f", 4: "-mno-avx"}
"""Floats of a register -> what keeps the compiler from wider ones."""
PROGRAM = '#include <cstdio>\n#include "simd.h"\nint main() { printf("%d", kLanes); }\n'


@pytest.fixture(params=sorted(NARROWER))
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Kernels built for registers of so many floats."""
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, NARROWER[request.param]))
    load_native.cache_clear()
    for module in KERNELS:
        of = module._KERNELS
        monkeypatch.setattr(module, "_KERNELS", NativeKernels(of._source, of._arguments, of._result))
    yield request.param
    load_native.cache_clear()


@thorough
def test_the_flags_do_what_they_are_for(lanes: int, tmp_path: Path) -> None:
    source = tmp_path / "lanes.cpp"
    source.write_text(PROGRAM)
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))))
    flags = [flag for flag in native._FLAGS if flag != "-shared"]
    include = f"-I{Path(native.__file__).parent}"
    subprocess.run([compiler, *flags, include, str(source), "-o", str(tmp_path / "lanes")], check=True)
    told = subprocess.run([str(tmp_path / "lanes")], check=True, capture_output=True, text=True)
    assert int(told.stdout) == lanes


@one_per("lanes")
@pytest.mark.parametrize("dtype", products.DTYPES, ids=str)
def test_packed_products(lanes: int, dtype: torch.dtype) -> None:
    products.test_products(dtype=dtype)
    products.test_a_row_does_not_depend_on_the_batch_nor_on_threads(dtype)


@thorough
def test_attention(lanes: int) -> None:
    attention.test_numbers_match_float64(impl="native")


@thorough
def test_attention_sees_its_tokens(lanes: int, poisoned_empty: None) -> None:
    attention.test_every_query_sees_exactly_its_tokens(impl="native", poisoned_empty=poisoned_empty)
    attention.test_window_edges(impl="native")


@thorough
def test_pointwise(lanes: int) -> None:
    points.test_add_has_the_bits_of_torchs_sum()
    points.test_rms_norm(impl="native")
    points.test_layer_norm_is_cohere2s(impl="native")
    points.test_gated_norms_are_qwen3_nexts_and_bambas(impl="native")
    points.test_heads_are_normed_and_then_rotated(impl="native")
    points.test_gated_activations(impl="native")


@thorough
def test_rotations_keep_their_bits(lanes: int) -> None:
    points.test_rotation_is_transformers_own_bit_for_bit(impl="native")
    points.test_pairs_turn_by_float32_angles(impl="native")


@thorough
def test_best_tokens(lanes: int) -> None:
    for size in (1, 15, 40, 1000):
        tokens.test_the_first_of_equal_ones_is_chosen(size=size, impl="native")
