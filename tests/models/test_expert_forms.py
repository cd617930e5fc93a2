"""Experts of every family that has them, in the form in which it stores them, against transformers'."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rayk.kernels.grouped_matmul import grouped_matmul
from rayk.models.build import Build
from rayk.models.config import DecoderConfig, ExpertsConfig
from rayk.models.families import FAMILIES, load_config
from rayk.models.layers import moe as moe_module
from rayk.models.layers.moe import Moe, build_moe
from rayk.models.pieces import Pieces
from rayk.models.weights import WeightReader
from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.types.errors import CheckpointError
from tests.helpers import assert_matches
from tests.models.tiny import draw, run_ranks

SHARED: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 3,
    "mamba_d_state": 8,
}
MODELS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "jamba": (
        "JambaForCausalLM",
        "feed_forward",
        1,
        {"num_experts": 5, "attn_layer_period": 2, "attn_layer_offset": 0},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "",
        1,
        {"num_local_experts": 5, "shared_intermediate_size": 27, "layer_types": ["full_attention"] * 2},
    ),
    "llama4": ("Llama4ForCausalLM", "feed_forward", 1, {"num_local_experts": 5}),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "mixer",
        1,
        {
            "layers_block_type": ["full_attention", "moe"],
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 27,
            "routed_scaling_factor": 1.7,
        },
    ),
    "nemotron_h-latent": (
        "NemotronHForCausalLM",
        "mixer",
        1,
        {
            "layers_block_type": ["full_attention", "moe"],
            "n_routed_experts": 5,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 27,
            "moe_latent_size": 12,
            "mlp_bias": True,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "mlp",
        1,
        {"num_experts": 5, "moe_intermediate_size": 20, "norm_topk_prob": True},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "mlp",
        1,
        {
            "num_experts": 5,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 27,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "mlp",
        1,
        {
            "head_dim": "absent",
            "q_lora_rank": None,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 20,
        },
    ),
}
"""Name -> class, the module of its layer (or the layer itself), the layer, settings beyond SHARED."""


@dataclass
class Saved:
    """A saved model, and its experts as a function of [T, hidden]."""

    path: Path
    config: DecoderConfig
    layer: int
    module: Any

    def theirs(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            module = copy.deepcopy(self.module).to(x.dtype)
            out: torch.Tensor = _run(module, x[None])[0]
        return out

    def build(self, comm: Comm, dtype: torch.dtype = torch.float32) -> Moe:
        """The rank's share, and nothing but that is left unread of the layer's experts."""
        names = FAMILIES[self.config.family].weights
        mlp = self.config.layers[self.layer].mlp
        assert isinstance(mlp, ExpertsConfig)
        with WeightReader(self.path, names.plain) as reader:
            pieces = Pieces(reader, names, dtype, torch.device("cpu"))
            build = Build(pieces=pieces, config=self.config, comm=comm, backend_for=lambda _: None)  # type: ignore
            moe = build_moe(build, self.layer, mlp)
            unread = [n for n in reader.unread if f"layers.{self.layer}." in n and "expert" in n]
        assert not unread
        return moe


def _run(module: Any, x: torch.Tensor) -> Any:
    if hasattr(module, "block_sparse_moe"):
        return module.block_sparse_moe(x) + module.shared_mlp(x)
    return module(x)


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp(request.param))


def save(name: str, path: Path) -> Saved:
    class_name, module, layer, settings = MODELS[name]
    chosen = {k: v for k, v in (SHARED | settings).items() if v != "absent"}
    if "layers_block_type" in chosen:
        del chosen["num_hidden_layers"]
    if class_name.startswith("Granite"):
        chosen["mamba_n_heads"] = 4
    model_class = getattr(transformers, class_name)
    model: Any = (
        model_class(model_class.config_class(**chosen, experts_implementation="eager")).eval().float()
    )
    draw(model)
    model.save_pretrained(path)
    (body,) = (child for child in model.children() if hasattr(child, "layers"))
    found = body.layers[layer]
    return Saved(path, load_config(path), layer, getattr(found, module) if module else found)


def inputs() -> torch.Tensor:
    return torch.randn(37, 32, generator=torch.Generator().manual_seed(3))


class Counting(LocalComm):
    """Counts sums over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_sums = 0
        self.size = 2

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return tensor


@pytest.mark.parametrize("tp_size", [1, 2, 3, 7])
def test_experts_equal_transformers(saved: Saved, tp_size: int) -> None:
    """7 ranks: some hold no expert; a shared expert's 27 rows divide unevenly."""
    x = inputs()
    exact, eager = saved.theirs(x.double()), saved.theirs(x)
    ranks = run_ranks(tp_size, lambda comm: saved.build(comm).forward(x))
    for mine in ranks:
        assert torch.equal(mine, ranks[0])
        assert_matches(mine, exact, eager)


def test_the_products_of_accelerators_give_the_same(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_module, "grouped_matmul", partial(grouped_matmul, impl="torch"))
    x = inputs()
    exact, eager = saved.theirs(x.double()), saved.theirs(x)
    for mine in run_ranks(3, lambda comm: saved.build(comm).forward(x)):
        assert_matches(mine, exact, eager)


def test_one_sum_over_the_ranks(saved: Saved) -> None:
    comm = Counting()
    saved.build(comm).forward(inputs())
    assert comm.num_sums == 1


def test_a_rank_holds_its_experts_only(saved: Saved) -> None:
    mlp = saved.config.layers[saved.layer].mlp
    assert isinstance(mlp, ExpertsConfig)
    experts = [moe.experts for moe in run_ranks(3, saved.build)]
    total = mlp.num_experts
    assert [e.count for e in experts] == [total * (r + 1) // 3 - total * r // 3 for r in range(3)]
    width, columns = mlp.latent_size or 32, 20 if mlp.kind == "relu2" else 40
    assert all(e.gate_up.shape == (e.count, width, columns) for e in experts)
    (whole,) = run_ranks(1, saved.build)
    assert torch.equal(torch.cat([e.down for e in experts]), whole.experts.down)


@pytest.mark.parametrize("name", ["deepseek_v3", "nemotron_h"])
def test_bfloat16_models_route_in_float32(name: str, tmp_path: Path) -> None:
    """With weights that were rounded and a correction that was not, as in transformers."""
    saved = save(name, tmp_path)
    router = saved.build(LocalComm(), torch.bfloat16).router
    theirs = saved.module.gate
    assert router.correction is not None
    assert torch.equal(router.correction, theirs.e_score_correction_bias)
    assert torch.equal(router.linear.weight, theirs.weight.detach().bfloat16().float())
    x = inputs().bfloat16()
    with torch.no_grad():
        theirs.weight.copy_(router.linear.weight)
        _, weights, experts = theirs(x)
    routes = router.forward(x)
    assert torch.equal(routes.experts, experts)
    assert torch.equal(routes.weights, weights)


@pytest.mark.parametrize("name", ["deepseek_v3", "granitemoehybrid"])
def test_an_expert_that_is_missing_is_missed_on_every_rank(name: str, tmp_path: Path) -> None:
    saved = save(name, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(n for n in sorted(tensors) if ".1." in n and ("experts.6.up" in n or "moe.output" in n))
    save_file({k: v for k, v in tensors.items() if k != gone}, file)
    for rank in range(2):
        comm = Counting()
        comm.rank = rank
        with pytest.raises(CheckpointError, match=f"tensor {gone} is missing"):
            saved.build(comm)
