"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): qwen3 with experts, which may slide in every layer."""

from __future__ import annotations

from dataclasses import replace

from rayk.models.config import DecoderConfig, ExpertsConfig, RouterConfig
from rayk.models.families import common, experts
from rayk.models.families.raw import RawConfig
from rayk.types.errors import CheckpointError

# configuration_qwen3_moe.py
DEFAULTS = {"decoder_sparse_step": 1, "moe_intermediate_size": 768, "sliding_window": 4096}
_NUM_EXPERTS = 128


def parse(raw: RawConfig) -> DecoderConfig:
    """`attention_bias` puts a bias on q, k, v and o. Unlike qwen3, `use_sliding_window` is about all layers
    (modeling_qwen3_moe.py:148), and without `head_dim` heads divide the hidden size."""
    windows = common.same_window(raw) if raw.flag("use_sliding_window") else None
    config = common.parse_llama_like(raw, windows=windows, bias=raw.flag("attention_bias"))
    mlps = experts.in_every_nth_layer(raw, _experts(raw))
    layers = tuple(replace(layer, mlp=mlp) for layer, mlp in zip(config.layers, mlps, strict=True))
    return replace(config, layers=layers, qk_norm=True)


def _experts(raw: RawConfig) -> ExpertsConfig | None:
    num_experts = _num_experts(raw)
    if num_experts == 0:
        return None
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=experts.num_chosen(raw, num_experts, 8),
        intermediate_size=raw.count("moe_intermediate_size"),
        kind="swiglu",
        router=RouterConfig(scoring="softmax_all", renormalise=raw.flag("norm_topk_prob")),
    )


def _num_experts(raw: RawConfig) -> int:
    """Released files say `num_experts`, those of transformers 5 `num_local_experts`. Raises CheckpointError
    if both are there and differ."""
    named = [key for key in ("num_experts", "num_local_experts") if raw.get(key) is not None]
    counts = {raw.whole(key) for key in named} or {_NUM_EXPERTS}
    if len(counts) > 1:
        raise CheckpointError(
            "`num_experts` and `num_local_experts` differ", where=raw.where, mend="keep one"
        )
    return counts.pop()


_MLP = "model.layers.{i}.mlp"

FAMILY = common.Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    defaults=DEFAULTS,
    parse=parse,
    weights=common.WeightNames(
        layer={**common.LLAMA_LAYER, **experts.single_names(_MLP, router="gate")}, experts="single"
    ),
)
