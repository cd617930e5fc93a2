"""Digests of a request are made in few passes, and the device is waited for once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayk.kernels import digest as digest_module
from rayk.kernels.digest import native, native_digest
from rayk.kernels.digest import triton as triton_kernel
from rayk.kv.caches import FieldView
from rayk.kv.specs import (
    FullAttentionSpec,
    GatedDeltaNetSpec,
    KVCacheSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlaSpec,
)
from rayk.transfer.layer_view import LayerView
from rayk.transfer.token_classes import ONE_CLASS
from rayk.transfer.verify import WrongWord, compare_digests, compute_digests
from tests.transfer.cluster import Shape, local_pair


class Reads(TorchDispatchMode):
    """Counts what takes a value from a tensor to Python: on a device each waits for all that is queued."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("family", "passes"),
    [
        (None, 3),  # K and V of three layers
        ("deepseek_v3", 3),  # latent and rotated key
        ("mamba2", 8),  # heads of x and states, groups of B and C, of two layers
        ("qwen3_next", 3 * 4 + 1),
    ],
)
def test_one_pass_per_packed_view_and_one_copy(
    family: str | None, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(family=family, dtype="bfloat16", tp=(2, 1))
    pair = local_pair(shape)
    values, tables = shape.values(37), pair.producer.tables(37)
    pair.producer.write(values, tables)
    rank = pair.producer.ranks[1]
    expected = rank.digests(37, tables)
    calls: list[str] = []
    monkeypatch.setattr(
        digest_module, "digest_rows_reference", count(calls, "pass", digest_module.digest_rows_reference)
    )
    monkeypatch.setattr(digest_module, "native_digest", lambda: None)
    monkeypatch.setattr(LayerView, "host_places", count(calls, "places", LayerView.host_places))
    monkeypatch.setattr(torch.Tensor, "cpu", count(calls, "copy", torch.Tensor.cpu))
    with Reads() as reads:
        found = rank.digests(37, tables)
    assert (found == expected).all()
    assert calls.count("pass") == passes
    assert calls.count("places") == len(pair.producer.groups())
    assert calls.count("copy") == 1
    assert reads.num == 0


@pytest.mark.skipif(native_digest() is None, reason="no compiler")
@pytest.mark.parametrize("family", [None, "mamba2", "qwen3_next"])
def test_native_code_is_called_once(family: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the layers and groups; and nothing of the request is kept from one call to the next."""
    pair = local_pair(Shape(family=family, dtype="bfloat16", window=13))
    rank = pair.producer.ranks[0]
    calls: list[str] = []
    monkeypatch.setattr(native, "native_digest", lambda: count(calls, "call", native_digest()))
    for number, num_tokens in enumerate((37, 5, 61)):
        values, tables = pair.producer.shape.values(num_tokens), pair.producer.tables(num_tokens, number)
        pair.producer.write(values, tables)
        found = rank.digests(num_tokens, tables)
        assert len(calls) == number + 1
        with monkeypatch.context() as plain:
            plain.setattr(digest_module, "native_digest", lambda: None)
            assert (rank.digests(num_tokens, tables) == found).all()
        assert (found != 0).all()


RELEASED = {
    "llama": [FullAttentionSpec(16, 8, 128, 128, "bfloat16", 32)],
    "deepseek_v3": [MlaSpec(16, 512, 64, "bfloat16", 128)],
    "qwen3_next": [
        FullAttentionSpec(16, 2, 256, 256, "bfloat16", 16),
        GatedDeltaNetSpec(16, "bfloat16", 4, 16, 128, 32, 128),
    ],
    "nemotron_h": [
        FullAttentionSpec(16, 8, 128, 128, "bfloat16", 32),
        Mamba2Spec(16, "bfloat16", 4, 128, 64, 8, 128),
    ],
    "jamba": [FullAttentionSpec(16, 8, 128, 128, "bfloat16", 32), Mamba1Spec(16, "bfloat16", 4, 8192, 16)],
    "nvfp4": [FullAttentionSpec(16, 8, 128, 128, "nvfp4", 32)],
}


@pytest.mark.parametrize("name", RELEASED)
def test_all_that_a_released_model_keeps_has_words_of_eight_bytes(name: str) -> None:
    """So that one launch digests it."""
    assert word_sizes(RELEASED[name]) == {8}


def word_sizes(specs: Iterable[KVCacheSpec]) -> set[int]:
    sizes = [f.row_bytes for spec in specs for f in spec.fields()]
    return {next(word for word in (8, 4, 2, 1) if size % word == 0) for size in sizes}


NARROW = Shape(dtype="bfloat16", head_sizes=(6, 4), units=3, query_heads=6)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(window=13, layouts=("LBHNC", "LBHNC")), id="plain"),
        pytest.param(NARROW, id="words of 4 bytes beside words of 8"),
        pytest.param(Shape(family="deepseek_v3"), id="MLA"),
        pytest.param(Shape(family="qwen3_next", tp=(2, 1)), id="hybrid"),
        pytest.param(Shape(family="jamba"), id="mamba1"),
    ],
)
def test_a_gpu_launches_a_kernel_for_each_size_of_words(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the layers: with the words of C++ or torch, for one request after the other."""
    launches = len(word_sizes(shape.specs(0).values()))
    calls: list[str] = []
    monkeypatch.setattr(triton_kernel, "launching", count(calls, "launch", triton_kernel.launching))
    monkeypatch.setattr(triton_kernel, "concatenated", count(calls, "upload", triton_kernel.concatenated))
    pair = local_pair(shape)
    rank = pair.producer.ranks[0]
    for number, num_tokens in enumerate((37, 1, 61)):
        values, tables = shape.values(num_tokens), pair.producer.tables(num_tokens, number)
        pair.producer.write(values, tables)
        expected = rank.digests(num_tokens, tables)
        calls.clear()
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(digest_module, "_default", lambda device: "triton")
            found = rank.digests(num_tokens, tables)
        assert calls == ["upload", *["launch"] * launches]
        assert (found == expected).all()
        assert (found != 0).any()


@pytest.mark.parametrize("family", [None, "mamba2", "qwen3_next"])
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (2, 4)], ids=str)
def test_every_differing_word_is_named_and_no_other(family: str | None, tp: tuple[int, int]) -> None:
    """Words changed one by one in each producer rank's vector, against a walk through every coordinate."""
    pair = local_pair(Shape(family=family, units=4, window=13, tp=tp))
    num_tokens, per_group = 37, 4
    views = pair.consumer.ranks[0]._views
    sources = pair.consumer.ranks[0].plan("p").sources(ONE_CLASS)
    coordinates: list[tuple[int, int, int, int, int, str]] = []
    for view in views:
        live = view.live_rows(num_tokens)
        groups = sorted({row // per_group for row in live})
        for f, field in enumerate(view.group.spec.fields()):
            for unit in range(field.units):
                coordinates += [(view.group.index, view.layer, f, unit, g, field.name) for g in groups]
    expected = np.random.default_rng(0).integers(-(2**63), 2**63, (tp[0], len(coordinates)))
    found = np.zeros(len(coordinates), dtype=np.int64)
    own_units = {(v.group.index, v.layer, f): set(s.units) for v in views for f, s in enumerate(v.fields)}
    mine = [c[3] in own_units[c[:3]] for c in coordinates]
    for i, (_, layer, _, unit, _, name) in enumerate(coordinates):
        if mine[i]:
            found[i] = expected[sources[layer, name, unit, 0], i]
    assert compare_digests(views, expected, found, sources, num_tokens, per_group) == []
    for i, (group, layer, f, unit, row_group, name) in enumerate(coordinates):
        for rank in range(tp[0]):
            expected[rank, i] ^= 1
            wrong = compare_digests(views, expected, found, sources, num_tokens, per_group)
            counts = mine[i] and sources[layer, name, unit, 0] == rank
            assert wrong == ([WrongWord(group, layer, f, unit, row_group)] if counts else [])
            expected[rank, i] ^= 1


def count(calls: list[str], name: str, function: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    return counted


def test_fields_of_unlike_memory_are_digested_apart() -> None:
    """The same content, packed or not, has the same words."""
    pair = local_pair(Shape(dtype="float16"))
    values, tables = pair.producer.shape.values(9), pair.producer.tables(9)
    pair.producer.write(values, tables)
    views = pair.producer.ranks[0]._views
    apart = [LayerView(v.layer, v.group, tuple(copied(f) for f in v.fields)) for v in views]
    assert [len(v.packed) for v in views] == [1, 1, 1]
    assert [len(v.packed) for v in apart] == [2, 2, 2]
    words = [compute_digests(v, tables, 9, rows_per_group=4) for v in (views, apart)]
    assert (words[0] == words[1]).all()
    assert (words[0] != 0).all()


def copied(field: FieldView) -> FieldView:
    return FieldView(field.name, field.view.contiguous(), field.units)


@pytest.mark.parametrize("block", [40, -1])
def test_blocks_of_nobody_are_refused(block: int) -> None:
    pair = local_pair(Shape())
    with pytest.raises(AssertionError, match="block ids outside 0 .. 39"):
        pair.producer.ranks[0].digests(9, [[1, block, 2]])
