"""The distributions that every tensor of a tiny model is drawn from.

No norm is neutral and no bias 0, so that forgetting one shows. The gains make attention peaked and its share
of the residual stream large (dropping a cached token or mixing up a head changes the output) and give logits
a standard deviation of about 4. Recurrent states forget at different rates: some within a few tokens, some
not within hundreds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_LOGIT_STD = 4.0
_QK_GAIN = 1.8
"""Gain of queries and of keys, which makes the softmax peaked."""
_STEP_STD = 0.7
"""Standard deviation of a token's contribution to its time step, before softplus."""

_ALTUP_GAINS = {"modality_router": 0.5, "prediction_coefs": 0.25, "correction_coefs": 0.5}
"""Gains of gemma3n. Larger ones make it chaotic: a layer's effects on the next one's weights multiply."""


@dataclass(frozen=True, kw_only=True)
class Gains:
    """Properties of a model that decide how its tensors are drawn."""

    tied: bool
    unit_offset: bool
    closing_norms: bool
    transposed_experts: bool
    """Experts are stored [expert, in, out]."""
    embedding_scale: float
    """The model's factor on embeddings."""
    logit_scale: float
    """The model's factor on logits."""
    branch_scale: float
    """The model's factor on additions to the residual stream."""
    value_share: float
    """Share of v's rows, the last ones, in a fused qkv_proj."""
    step_rows: int
    """Time-step rows, the last ones, of a Mamba2 in_proj; 0 without."""
    mixer_gain: float
    """Gain of a recurrent mixer's output projection."""
    head_gain: float
    """Gain of the norms of query and key heads."""
    per_layer_size: int
    """Elements of a token's input to one layer (gemma3n); 0 without."""
    latent: bool
    """Keys come from a latent whose gain is fixed, so queries get the whole gain."""

    @classmethod
    def of(cls, model: Any) -> Gains:
        """Read from a model of transformers', whatever its weights are: from its config, the names and shapes
        of its parameters, and how its norms and attention compute."""
        config, shapes = model.config, {name: tuple(p.shape) for name, p in model.named_parameters()}
        closing_norms = any("post_feedforward" in name for name in shapes)
        num_q = getattr(config, "num_attention_heads", 1)
        num_kv = getattr(config, "num_key_value_heads", 1)
        scale = math.sqrt(config.hidden_size) if closing_norms else 1.0
        logit_scale = getattr(config, "logit_scale", None) or 1.0
        return cls(
            tied=bool(config.tie_word_embeddings),
            unit_offset=any(_adds_one(module) for module in model.modules()),
            closing_norms=closing_norms,
            transposed_experts=_are_experts_transposed(shapes, config.hidden_size),
            embedding_scale=scale * getattr(config, "embedding_multiplier", 1.0),
            logit_scale=logit_scale
            * getattr(config, "lm_head_multiplier", 1.0)
            / getattr(config, "logits_scaling", 1.0),
            branch_scale=getattr(config, "residual_multiplier", 1.0),
            value_share=num_kv / (num_q + 2 * num_kv),
            step_rows=_mamba2_heads(config),
            mixer_gain=_mixer_gain(config, shapes),
            head_gain=_QK_GAIN * (config.head_dim**-0.25 if _are_scores_unscaled(model) else 1.0),
            per_layer_size=getattr(config, "hidden_size_per_layer_input", 0),
            latent=hasattr(config, "kv_lora_rank"),
        )

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Random values, float32, for the parameter or buffer of this name."""
        if len(shape) == 1 and "norm" in name:
            uniform = 0.5 + torch.rand(shape, generator=generator)
            plain = "linear_attn" in name or not self.unit_offset
            return uniform * self._norm_gain(name) - (0.0 if plain else 1.0)
        if name.endswith("correct_output_scale"):
            return 0.5 + torch.rand(shape, generator=generator)
        recurrence = _recurrence(name, shape, generator)
        if recurrence is not None:
            return recurrence
        normal = torch.randn(shape, generator=generator)
        if name.endswith("sinks"):
            # Comparable to the sum over a query's keys for some heads, negligible for others.
            return 3.0 + 4.0 * normal
        if name.endswith("bias"):
            return (0.5 if "router" in name else 0.2) * normal
        fan_in = shape[-2] if len(shape) == 3 and self.transposed_experts else shape[-1]
        values = (self._altup_std(name, fan_in) or self._matrix_std(name, fan_in)) * normal
        if "qkv_proj" in name:
            first = round(shape[0] * (1 - self.value_share))
            values[first:] /= _QK_GAIN
        if name.endswith("in_proj.weight") and self.step_rows:
            values[-self.step_rows :] *= _STEP_STD
        return values

    def _norm_gain(self, name: str) -> float:
        if "q_norm" in name or "k_norm" in name:
            return self.head_gain
        if self.closing_norms and name == "model.norm.weight":
            return self._final_gain
        # These norms set the size of the branches, which o_proj and down_proj do elsewhere.
        closing = ("post_attention", "post_feedforward", "post_laurel", "post_per_layer")
        post = any(part in name for part in closing)
        return 4.0 if self.closing_norms and post else 1.0

    @property
    def _final_gain(self) -> float:
        """Gain of the norm before lm_head; larger if small embeddings are both scaled up and tied."""
        return 4.0 if self.closing_norms else 1.0

    def _matrix_std(self, name: str, fan_in: int) -> float:
        """Standard deviation by a matrix's role; by default it keeps the RMS of its input."""
        base = 1.0 / math.sqrt(fan_in)
        if "lm_head" in name or ("embed" in name and self.tied):
            return _LOGIT_STD * base / (self.logit_scale * self._final_gain)
        if "embed" in name:
            return 1.0 / self.embedding_scale
        if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "q_b_proj")):
            return (_QK_GAIN**2 if self.latent else _QK_GAIN) * base
        if "router" in name or name.endswith(".gate.weight"):
            return 2.0 * base
        if name.endswith("dt_proj.weight"):
            return _STEP_STD * base
        # A tied model would repeat its input token unless the layers dominate the embedding.
        share = 3.0 / self.logit_scale if self.tied else 1.0 / self.branch_scale
        if "o_proj" in name:
            return 3.0 * share * base
        if "out_proj" in name:
            return self.mixer_gain * share * base
        if "down_proj" in name or "output_linear" in name:
            return 2.4 * share * base
        return base

    def _altup_std(self, name: str, fan_in: int) -> float | None:
        """For matrices of gemma3n whose inputs do not have RMS 1; None for others."""
        if "embed_tokens_per_layer" in name:
            return 1.0 / math.sqrt(self.per_layer_size)  # what the model multiplies it by
        if "modality_router" in name:
            return _ALTUP_GAINS["modality_router"] * math.sqrt(fan_in)  # its input is divided by its size
        if "per_layer_input_gate" in name:
            return 0.2 / math.sqrt(fan_in)  # streams grow to some 10
        return next((gain for part, gain in _ALTUP_GAINS.items() if part in name), None)


def _adds_one(module: Any) -> bool:
    """Tell whether a module is a norm that multiplies by 1 + weight."""
    weight = getattr(module, "weight", None)
    if weight is None or not type(module).__name__.endswith("RMSNorm"):
        return False
    with torch.no_grad():
        ones = torch.ones_like(weight)  # which a norm leaves as they are
        return bool((module(ones) - weight).mean() > 0.5)


def _are_experts_transposed(shapes: Mapping[str, tuple[int, ...]], hidden_size: int) -> bool:
    """Tell whether fused experts lie [expert, in, out]."""
    for name, shape in shapes.items():
        if len(shape) != 3 or "experts" not in name:
            continue
        first, last = shape[1:]
        if "gate_up_proj" in name and last != first == hidden_size:
            return True
        if "down_proj" in name and first != last == hidden_size:
            return True
    return False


def _are_scores_unscaled(model: Any) -> bool:
    """Tell whether scores are not divided by the root of the head size."""
    return any(getattr(module, "scaling", None) == 1.0 for module in model.modules())


def _mixer_gain(config: Any, shapes: Mapping[str, Any]) -> float:
    """Without a norm before its projection the size of the states sets that of a mixer's branch."""
    if any("dt_layernorm" in name for name in shapes):
        return 0.8  # norms of step, B and C bound the states
    return 3.0 if getattr(config, "mamba_rms_norm", True) else 0.2


def _mamba2_heads(config: Any) -> int:
    num_heads = getattr(config, "mamba_n_heads", None) or getattr(config, "mamba_num_heads", None)
    if num_heads is None and not hasattr(config, "num_attention_heads"):
        num_heads = config.num_heads  # of a model without attention
    return int(num_heads or 0)


def _recurrence(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor | None:
    """List values that decide how a state forgets; None for any other parameter.

    With time steps of 0.1 to 1 and decay rates of 0.01 to 2, a state keeps between a seventh and 0.999 of
    itself per token. No step comes near 0.001, to which transformers clamps nemotron_h's in prefill only.
    """
    uniform = (name.endswith("A_log"), name.endswith(("dt_bias", "dt_proj.bias")))
    if any(uniform):
        low, high = (-4.5, 0.7) if uniform[0] else (-2.2, 0.5)
        return low + (high - low) * torch.rand(shape, generator=generator)
    if name.rsplit(".", 1)[-1] == "D":
        return 0.7 * torch.randn(shape, generator=generator)
    return None
