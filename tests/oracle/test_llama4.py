"""The reference on llama4: chunks and positions are the same however a text is fed; its second tiny shape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.oracle.checkpoint import read_marker
from rayk.oracle.routing import routers, routing_gaps
from rayk.oracle.text import FedText
from tests.conftest import CheckpointFactory
from tests.helpers import assert_matches
from tests.oracle.test_every_tensor_counts import forgotten, kinds_of, load, same_output
from tests.spec_models import ALL_ROUTED

SHARED = {"num_hidden_layers": 6, "no_rope_layers": [1, 0, 1, 0, 1, 0], "num_kv_shared_layers": 3}
"""Layers 3 and 5, whose queries grow with their position, reuse layer 1; layer 4 reuses layer 2."""
SHAPES: dict[str, dict[str, Any]] = {"mixed": {}, "all-routed": dict(ALL_ROUTED), "shared": SHARED}


@pytest.fixture
def path(request: pytest.FixtureRequest, checkpoint: CheckpointFactory) -> Path:
    overrides = SHAPES[request.param]
    return checkpoint("llama4", **({"overrides": overrides} if overrides else {}))


def in_pieces(model: Any, token_ids: Sequence[int], cuts: Sequence[int]) -> torch.Tensor:
    text, bounds = FedText(model), [0, *cuts, len(token_ids)]
    return torch.cat([text.feed(token_ids[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)])


@pytest.mark.parametrize("path", SHAPES, indirect=True)
def test_a_text_fed_in_pieces_is_one_text(path: Path) -> None:
    """Logits of every token; whole, cut at and beside the ends of chunks, and token by token at the end."""
    model = load(path)
    probe = read_marker(path)["probes"][-1]
    token_ids = [*probe["prompt"], *probe["output"]]
    chunk = json.loads((path / "config.json").read_text())["attention_chunk_size"]
    assert len(probe["prompt"]) > 3 * chunk
    eager = in_pieces(model, token_ids, ())
    if not getattr(model.config, "num_kv_shared_layers", 0):
        with torch.inference_mode():
            alone = model(torch.tensor([token_ids]), use_cache=False).logits[0]
        assert torch.equal(alone, eager)
    exact = in_pieces(model.double(), token_ids, ())
    model.float()
    for cuts in ((chunk, 2 * chunk), (chunk - 1, chunk + 1, 300), range(300, len(token_ids))):
        assert_matches(in_pieces(model, token_ids, cuts), exact, eager, what=f"cut at {cuts}")


@pytest.mark.parametrize("path", ["all-routed"], indirect=True)
def test_one_forgotten_tensor_changes_the_output(path: Path) -> None:
    model = load(path)
    assert same_output(model, path)
    unnoticed = []
    for kind, parameters in kinds_of(model).items():
        for layer, parameter in enumerate(parameters):
            with forgotten(parameter, 1.0 if "norm" in kind else 0.0):
                if same_output(model, path):
                    unnoticed.append((kind, layer))
    # Without positions it adds one number to all scores of a query, which the softmax takes away again.
    assert unnoticed == [("model.self_attn.k_proj.bias", layer) for layer in (0, 3)]


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_chunk_size": 39},
        {"attention_chunk_size": 41},
        {"attention_chunk_size": 48},
        {"attn_temperature_tuning": False},
        {"floor_scale": 31},
        {"use_qk_norm": True},
        {"num_experts_per_tok": 2},
        {"no_rope_layers": [0, 1, 1, 1]},
        {"no_rope_layers": [1, 1, 1, 0]},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["all-routed"], indirect=True)
def test_a_wrong_setting_changes_the_output(path: Path, settings: dict[str, Any]) -> None:
    kinds = json.loads((path / "config.json").read_text())["layer_types"]
    assert not same_output(load(path, {"layer_types": kinds} | settings), path)


@pytest.mark.parametrize("path", ["mixed", "all-routed"], indirect=True)
def test_routers_choose_clearly(path: Path) -> None:
    """The promised gap, measured on the logits themselves."""
    model, marker = load(path), read_marker(path)
    found = routers(model)
    assert len(found) == len(model.config.moe_layers)
    measured: list[float] = []

    def look(router: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        best = output[1].topk(router.top_k + 1).values
        measured.append(float((best[:, -2] - best[:, -1]).min()))

    for router in found.values():
        router.register_forward_hook(look)
    with routing_gaps(model) as gaps:
        for probe in marker["probes"]:
            FedText(model).feed(probe["prompt"] + probe["output"][:-1], logits_to_keep=1)
    assert gaps == measured
    assert min(measured) > 6e-4
    assert min(measured) == pytest.approx(marker["routing_gap"], abs=1e-4)
