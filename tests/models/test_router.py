"""Which experts are chosen, with what weights: bit for bit what transformers' routers say, ties included."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridTopKRouter
from transformers.models.jamba.modeling_jamba import JambaTopKRouter
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from rayk.kernels.choose_experts import choose_experts
from rayk.models.config import RouterConfig
from rayk.models.layers import router as router_module
from rayk.models.layers.linear import Linear
from rayk.models.layers.router import ExpertRouter
from tests.each import each
from tests.helpers import assert_matches
from tests.markers import interpreted

NUM_EXPERTS, NUM_CHOSEN, NUM_TOKENS = 12, 4, 400

SIGMOID = RouterConfig(scoring="sigmoid", wide=True, renormalise=True)
GROUPED = RouterConfig(
    scoring="sigmoid", wide=True, renormalise=True, num_groups=4, num_chosen_groups=2, scale=2.5
)
ROUTERS: dict[str, tuple[Any, str, dict[str, Any], RouterConfig]] = {
    "gpt_oss": (GptOssTopKRouter, "GptOssConfig", {"num_local_experts": 12}, RouterConfig(bias=True)),
    "granite": (
        GraniteMoeHybridTopKRouter,
        "GraniteMoeHybridConfig",
        {"num_local_experts": 12, "mamba_n_heads": 2},
        RouterConfig(),
    ),
    "jamba": (JambaTopKRouter, "JambaConfig", {"num_experts": 12}, RouterConfig(scoring="softmax_all")),
    "qwen3_moe": (
        Qwen3MoeTopKRouter,
        "Qwen3MoeConfig",
        {"num_experts": 12, "norm_topk_prob": True},
        RouterConfig(scoring="softmax_all", renormalise=True),
    ),
    "qwen3_moe-as-they-are": (
        Qwen3MoeTopKRouter,
        "Qwen3MoeConfig",
        {"num_experts": 12},
        RouterConfig(scoring="softmax_all"),
    ),
    "qwen3_next": (
        Qwen3NextTopKRouter,
        "Qwen3NextConfig",
        {"num_experts": 12},
        RouterConfig(scoring="softmax_all", renormalise=True),
    ),
    "qwen3_next-as-they-are": (
        Qwen3NextTopKRouter,
        "Qwen3NextConfig",
        {"num_experts": 12, "norm_topk_prob": False},
        RouterConfig(scoring="softmax_all"),
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter,
        "DeepseekV3Config",
        {"n_routed_experts": 12, "n_group": 4, "topk_group": 2},
        GROUPED,
    ),
    "deepseek_v3-as-they-are": (
        DeepseekV3TopkRouter,
        "DeepseekV3Config",
        {"n_routed_experts": 12, "n_group": 3, "topk_group": 1, "norm_topk_prob": False},
        RouterConfig(scoring="sigmoid", wide=True, num_groups=3, num_chosen_groups=1, scale=2.5),
    ),
    "nemotron_h": (NemotronHTopkRouter, "NemotronHConfig", {"n_routed_experts": 12}, SIGMOID),
}


def theirs_and_mine(name: str, dtype: torch.dtype) -> tuple[Any, ExpertRouter]:
    """Weights are the identity, so that the inputs are the logits (plus gpt_oss's bias)."""
    module, config_class, settings, config = ROUTERS[name]
    values = {"hidden_size": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, **settings}
    theirs = module(getattr(transformers, config_class)(**values)).to(dtype)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        theirs.weight.copy_(torch.eye(NUM_EXPERTS))
        if config.bias:
            theirs.bias.copy_(torch.randint(-2, 3, (NUM_EXPERTS,), generator=draw) / 4)
    correction = None
    if config.scoring == "sigmoid":
        correction = torch.randint(-2, 3, (NUM_EXPERTS,), generator=draw).float() / 8
        theirs.e_score_correction_bias = correction
    weight = theirs.weight.detach()
    linear = Linear(weight.float() if config.wide else weight, theirs.bias.detach() if config.bias else None)
    return theirs, ExpertRouter(linear, config, NUM_CHOSEN, correction)


@pytest.mark.parametrize("levels", [None, 3], ids=["distinct", "ties"])
@each("dtype", [torch.float32, torch.bfloat16], ids=str)
@each("name", list(ROUTERS))
def test_router_is_transformers_own(name: str, dtype: torch.dtype, levels: int | None) -> None:
    theirs, mine = theirs_and_mine(name, dtype)
    draw = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=draw)
    if levels is not None:
        logits = torch.randint(0, levels, logits.shape, generator=draw).float()
    with torch.no_grad():
        _, weights, experts = theirs(logits.to(dtype))
    routes = mine.forward(logits.to(dtype))
    assert torch.equal(routes.experts, experts)
    assert torch.equal(routes.weights, weights)
    assert routes.weights.dtype == weights.dtype


@interpreted
@pytest.mark.parametrize("levels", [None, 3], ids=["distinct", "ties"])
@each("name", list(ROUTERS))
def test_one_launch_chooses_the_same(name: str, levels: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of equal ones is open; with a correction they may differ in weight."""
    theirs, mine = theirs_and_mine(name, torch.float32)
    if levels is not None and mine.correction is not None:
        return
    draw = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(50, NUM_EXPERTS, generator=draw)
    if levels is not None:
        logits = torch.randint(0, levels, logits.shape, generator=draw).float()
    with torch.no_grad():
        _, weights, experts = theirs(logits)
    monkeypatch.setattr(router_module, "choose_experts", partial(choose_experts, impl="triton"))
    routes = mine.forward(logits)
    assert bool((routes.experts.sort().values.diff() > 0).all()), "no expert twice"
    order, their_order = routes.experts.argsort(), experts.argsort()
    if levels is None:
        assert torch.equal(routes.experts.gather(1, order), experts.gather(1, their_order))
        found, exact = routes.weights.gather(1, order), weights.gather(1, their_order)
    else:
        found, exact = routes.weights.sort().values, weights.sort().values
    assert_matches(found, exact.double(), exact)


def test_what_the_comparisons_reach() -> None:
    """Groups that are left out hold some of the best experts, and the correction changes choices."""
    _, mine = theirs_and_mine("deepseek_v3", torch.float32)
    assert mine.correction is not None
    logits = 2 * torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(2))
    best = (logits.sigmoid() + mine.correction).topk(NUM_CHOSEN).indices.sort().values
    uncorrected = logits.topk(NUM_CHOSEN).indices.sort().values
    chosen = mine.forward(logits).experts.sort().values
    assert not torch.equal(best, chosen)
    assert not torch.equal(best, uncorrected)
    assert bool((chosen // 3).diff(dim=1).ne(0).sum(1).le(1).all()), "experts of more than two groups"


@pytest.mark.parametrize("change", ["correction", "groups", "scale", "renormalise"])
def test_a_wrong_router_shows(change: str) -> None:
    """The comparison above is no accident."""
    theirs, mine = theirs_and_mine("deepseek_v3", torch.float32)
    settings = {
        "groups": {"num_chosen_groups": 3},
        "scale": {"scale": 2.4},
        "renormalise": {"renormalise": False},
    }
    config = RouterConfig(**{
        "scoring": "sigmoid", "wide": True, "renormalise": True, "num_groups": 4, "num_chosen_groups": 2,
        "scale": 2.5, **settings.get(change, {}),
    })  # fmt: skip
    correction = torch.zeros(NUM_EXPERTS) if change == "correction" else mine.correction
    logits = 2 * torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        _, weights, experts = theirs(logits)
    routes = ExpertRouter(mine.linear, config, NUM_CHOSEN, correction).forward(logits)
    assert not (torch.equal(routes.experts, experts) and torch.equal(routes.weights, weights))
