"""Digests of a request are made in few passes, and the device is waited for once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayk.kernels import digest as digest_module
from rayk.transfer import verify
from rayk.transfer.verify import LayerView, compute_digests
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
        verify, "digest_rows", count(calls, "pass", partial(digest_module.digest_rows, impl="reference"))
    )
    monkeypatch.setattr(LayerView, "places", count(calls, "places", LayerView.places))
    monkeypatch.setattr(torch.Tensor, "cpu", count(calls, "copy", torch.Tensor.cpu))
    with Reads() as reads:
        found = rank.digests(37, tables)
    assert (found == expected).all()
    assert calls.count("pass") == passes
    assert calls.count("places") == len(pair.producer.groups())
    assert calls.count("copy") == 1
    assert reads.num == 0


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


def copied(field: verify.FieldView) -> verify.FieldView:
    return verify.FieldView(field.name, field.view.contiguous(), field.units)


@pytest.mark.parametrize("block", [40, -1])
def test_blocks_of_nobody_are_refused(block: int) -> None:
    pair = local_pair(Shape())
    with pytest.raises(AssertionError, match="block ids outside 0 .. 39"):
        pair.producer.ranks[0].digests(9, [[1, block, 2]])
