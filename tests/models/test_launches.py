"""How many kernels a layer launches on a device: operators that compute something, and Triton's own."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rayk.kernels
from rayk.models.families import FAMILIES
from rayk.models.layers import linear
from rayk.parallel.local import LocalComm
from tests.markers import interpreted, one_per
from tests.models.tiny import Paged, load, write_checkpoint

pytestmark = interpreted

MOST = {"plain": 15, "other": 31}
"""One below the targets: a long context is attended to in splits, which one more kernel combines."""
PLAIN = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "cohere2")
OTHERS = ("gpt_oss", "llama4", "jamba", "bamba", "mamba2", "granitemoehybrid", "nemotron_h", "falcon_h1")
OTHERS += ("qwen3_next", "qwen3_moe", "deepseek_v3", "gemma3n")
NO_LAUNCH = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
)


class Launches(TorchDispatchMode):
    """Counts operators that are no views, by name; those made of others count as these."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and name not in NO_LAUNCH:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


class Counted:
    """A layer, and what it launched in its last call."""

    def __init__(self, layer: Any, launches: Launches) -> None:
        self._layer = layer
        self._launches = launches
        self.calls: Counter[str] = Counter()

    def forward(self, *arguments: Any) -> Any:
        self._launches.calls.clear()
        with self._launches:
            out = self._layer.forward(*arguments)
        self.calls = Counter(self._launches.calls)
        return out


def launched(path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """Run a decode step of two requests as on a device, its Triton kernels left out; a Counter per layer."""
    from triton.runtime.interpreter import GridExecutor

    launches = Launches()

    def count_only(executor: Any, *arguments: Any, **settings: Any) -> None:
        launches.calls[executor.fn.__name__] += 1

    monkeypatch.setattr(GridExecutor, "__call__", count_only)
    for found in pkgutil.walk_packages(rayk.kernels.__path__, "rayk.kernels."):
        if found.name.split(".")[-1] in ("ahead", "target", "interpreter", "occupancy"):
            continue
        module = importlib.import_module(found.name)
        if hasattr(module, "default_impl"):
            monkeypatch.setattr(module, "default_impl", lambda is_cuda: "triton")
        if hasattr(module, "_has_kernel"):
            monkeypatch.setattr(module, "_has_kernel", lambda device: False)
        if hasattr(module, "INTERPRETED"):
            # What the interpreter needs converted is no launch on a device.
            monkeypatch.setattr(module, "INTERPRETED", False)
        if hasattr(module, "widened"):
            monkeypatch.setattr(module, "widened", lambda tensor: tensor)
    # A CPU's packed products are no operators.
    monkeypatch.setattr(linear, "MIN_PACKED_ELEMENTS", 1 << 40)
    decoder = load(write_checkpoint(path, family), LocalComm(), torch.bfloat16, backend="triton")
    decoder.layers = tuple(Counted(layer, launches) for layer in decoder.layers)
    with torch.no_grad():
        paged = Paged(decoder, 2, dtype="bfloat16")
        paged.step([[5, 6, 7], [9, 8]])
        paged.step([[1], [2]])
    return [layer.calls for layer in decoder.layers]


def test_every_family_is_counted() -> None:
    assert {*PLAIN, *OTHERS} == FAMILIES.keys()


@one_per("family")
@pytest.mark.parametrize("family", [*PLAIN, *OTHERS])
def test_launches_of_a_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = MOST["plain" if family in PLAIN else "other"]
    for calls in launched(tmp_path, family, monkeypatch):
        assert 0 < calls.total() <= most, (calls.total(), calls)
