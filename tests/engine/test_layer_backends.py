"""Layers of one KV group with unlike attention backends, and kernel blocks of unlike sizes in one pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.attention.backends.paged import PagedBackend
from rayk.engine.backends import LayerBackends
from rayk.engine.rank import EngineRank
from rayk.models.families import load_config
from rayk.oracle.tiny import HYBRID
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig
from rayk.types.errors import LayoutVetoed, UserError
from tests.engine.stepped import Stepped
from tests.engine.test_states import NUM_TOKENS, Model

SHARED_WINDOWS = {
    "num_kv_shared_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 21,
}


@pytest.fixture(scope="module")
def hybrid(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    """Layers 0 and 1 keep all tokens, 2 and 3 a window."""
    path = checkpoint("qwen3", overrides=dict(HYBRID))
    return Model(path, reference(path))


@pytest.fixture(scope="module")
def falcon(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("falcon_h1")
    return Model(path, reference(path))


def check_tokens(engine: Stepped, model: Model) -> None:
    states = [engine.add(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(model.prompts)]
    engine.finish()
    assert [s.output_token_ids for s in states] == model.expected


@pytest.mark.parametrize("name", ["hybrid", "falcon"])
def test_two_backends_in_one_group(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = request.getfixturevalue(name)
    calls: list[str] = []
    forward = PagedBackend.forward
    monkeypatch.setattr(
        PagedBackend, "forward", lambda self, *args: (calls.append(self.name), forward(self, *args))[1]
    )
    engine = Stepped(model.path, layer_backends=((1, "reference"), (3, "cpu-torch")), max_batch_tokens=40)
    check_tokens(engine, model)
    groups = engine.rank.attention_groups.groups
    by_kv_group: dict[int, set[str]] = {}
    for group in groups:
        by_kv_group.setdefault(group.view.kv_group, set()).add(group.backend.name)
    assert {"cpu", "reference"} <= by_kv_group[0], "one KV group, two backends"
    per_step = [next(g.backend.name for g in groups if layer in g.layers) for layer in range(4)]
    assert sorted(per_step) == ["cpu", "cpu", "cpu-torch", "reference"]
    assert calls == per_step * engine.num_steps
    text = engine.rank.backends.implementation
    assert text.startswith("cpu-")
    assert text.endswith("; reference (layer 1); cpu-torch (layer 3)")


def test_a_backend_may_be_named_for_no_layer_of_its_own(hybrid: Model) -> None:
    """`auto` and what it stands for are one backend; layers that share it share their metadata."""
    config = EngineConfig(model=str(hybrid.path), layer_backends=((0, "cpu"), (1, "auto")))
    backends = LayerBackends(config, load_config(hybrid.path))
    assert backends.used == (backends.default,)
    assert ";" not in backends.implementation


def test_a_backend_is_asked_about_its_own_layers_only(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses windowed layers, and computes a layer that keeps all tokens."""

    def veto(self: PagedBackend, layout_name: str, spec: Any) -> str | None:
        return "no windows" if self.name == "reference" and spec.kind == "sliding" else None

    monkeypatch.setattr(PagedBackend, "veto", veto)
    check_tokens(Stepped(hybrid.path, layer_backends=((1, "reference"),)), hybrid)
    with pytest.raises(LayoutVetoed, match="backend reference: no windows"):
        Stepped(hybrid.path, layer_backends=((2, "reference"),))


def test_a_layer_that_shares_keys_and_values_has_a_backend_of_its_own(
    checkpoint: Callable[..., Path], reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked about the pages that the layer reads: here those of layers with a window."""
    path = checkpoint("qwen3", overrides=SHARED_WINDOWS)
    shared = Model(path, reference(path))
    engine = Stepped(path, layer_backends=((3, "reference"),), fast_prefill=True, max_batch_tokens=40)
    check_tokens(engine, shared)
    assert engine.rank.backends.implementation.endswith("; reference (layer 3)")
    assert [b.name for b in engine.rank.backends.used] == ["cpu", "reference"]

    def veto(self: PagedBackend, layout_name: str, spec: Any) -> str | None:
        return "no windows" if self.name == "reference" and spec.kind == "sliding" else None

    monkeypatch.setattr(PagedBackend, "veto", veto)
    Stepped(path, layer_backends=((2, "reference"),))
    with pytest.raises(LayoutVetoed, match="backend reference: no windows"):
        Stepped(path, layer_backends=((3, "reference"),))


def test_backends_of_layers_that_cannot_have_one(hybrid: Model, checkpoint: Callable[..., Path]) -> None:
    for path, layers, match in (
        (hybrid.path, ((4, "reference"),), "layer 4 has no attention"),
        (hybrid.path, ((0, "flash"),), "unknown attention backend 'flash'"),
        (checkpoint("mamba2"), ((0, "cpu"),), "no attention layer"),
        (checkpoint("jamba"), ((0, "cpu"),), "one of 1, 4"),
    ):
        config = EngineConfig(model=str(path), num_blocks=8, layer_backends=layers)
        with pytest.raises(UserError, match=match):
            EngineRank(config, LocalComm())


@pytest.mark.parametrize("layout", ["BHLNC", "LBNHC"])
@pytest.mark.parametrize(("kind", "kernel"), [("full", 4), ("sliding", 8), ("sliding", 1)])
def test_a_kernel_block_size_of_one_group(hybrid: Model, kind: str, kernel: int, layout: str) -> None:
    engine = Stepped(
        hybrid.path, layout=layout, kernel_block_sizes=((kind, kernel),), block_size=16, max_batch_tokens=48
    )
    check_tokens(engine, hybrid)
    geometry = engine.rank.caches.geometry
    found = {g.group.spec.kind: g.kernel_block_size for g in geometry.groups}
    other = {"full": "sliding", "sliding": "full"}[kind]
    assert found == {kind: kernel, other: 16}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"kernel_block_sizes": (("sliding", 6),)}, "kernel_block_size 6 does not divide block_size 16"),
        ({"kernel_block_size": 6}, "kernel_block_size 6 does not divide block_size 16"),
        ({"kernel_block_sizes": (("mla", 8),)}, "names mla groups, and the model has none"),
    ],
)
def test_kernel_blocks_that_cannot_be(hybrid: Model, changes: dict[str, Any], problem: str) -> None:
    config = EngineConfig(model=str(hybrid.path), num_blocks=8, **changes)
    with pytest.raises(UserError, match=problem):
        EngineRank(config, LocalComm())


def test_kernel_blocks_beside_states(falcon: Model) -> None:
    """Attention's blocks have grown to the size of a state's page; kernels cut them as if they had not."""
    engine = Stepped(falcon.path, kernel_block_sizes=(("full", 16),), block_size=16, state_block_size=32)
    check_tokens(engine, falcon)
    sizes = {
        g.group.spec.kind: (g.block_size, g.kernel_block_size) for g in engine.rank.caches.geometry.groups
    }
    assert sizes["mamba2"] == (32, 1)
    assert sizes["full"][0] > sizes["full"][1] == 16
