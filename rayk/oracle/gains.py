"""What every tensor of a tiny model is drawn from.

Every tensor is drawn: no norm is neutral and no bias 0, so that forgetting one shows. The gains make
attention peaked and its share of the residual stream large (dropping a cached token or mixing up a
head changes the output) and give logits a standard deviation of about 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

_LOGIT_STD = 4.0
_QK_GAIN = 1.8
"""Of queries and of keys: makes the softmax peaked."""

_UNIT_OFFSET = frozenset({"gemma2", "gemma3_text"})
"""Model types whose norms multiply by 1 + weight."""


@dataclass(frozen=True, kw_only=True)
class Gains:
    """What of a model decides how its tensors are drawn."""

    tied: bool
    unit_offset: bool
    """Norms multiply by 1 + weight, and a norm of its own closes every branch."""
    embedding_scale: float
    """What the model multiplies embeddings by."""
    logit_scale: float
    """What it multiplies logits by."""
    value_share: float
    """Share of the rows of a fused qkv_proj that are v's, the last ones."""

    @classmethod
    def of(cls, config: Any) -> Gains:
        """Read from transformers' config object."""
        unit_offset = config.model_type in _UNIT_OFFSET
        num_q, num_kv = config.num_attention_heads, config.num_key_value_heads
        return cls(
            tied=bool(config.tie_word_embeddings),
            unit_offset=unit_offset,
            embedding_scale=math.sqrt(config.hidden_size) if unit_offset else 1.0,
            logit_scale=getattr(config, "logit_scale", None) or 1.0,
            value_share=num_kv / (num_q + 2 * num_kv),
        )

    def draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        """Random values, float32, for the parameter of this name."""
        if len(shape) == 1 and "norm" in name:
            uniform = 0.5 + torch.rand(shape, generator=generator)
            return uniform * self._norm_gain(name) - (1.0 if self.unit_offset else 0.0)
        normal = torch.randn(shape, generator=generator)
        if name.endswith("sinks"):
            # As large as the sum of what a query sees, for some heads; next to nothing for others.
            return 3.0 + 4.0 * normal
        if name.endswith("bias"):
            return (0.5 if "router" in name else 0.2) * normal
        # Experts lie transposed: [expert, in, out].
        fan_in = shape[-2] if len(shape) == 3 else shape[-1]
        values = self._matrix_std(name, fan_in) * normal
        if "qkv_proj" in name:
            first = round(shape[0] * (1 - self.value_share))
            values[first:] /= _QK_GAIN
        return values

    def _norm_gain(self, name: str) -> float:
        if "q_norm" in name or "k_norm" in name:
            return _QK_GAIN
        if self.unit_offset and "layers" not in name:
            return self._final_gain
        # These norms set the size of the branches, which o_proj and down_proj do elsewhere.
        post = "post_attention" in name or "post_feedforward" in name
        return 4.0 if self.unit_offset and post else 1.0

    @property
    def _final_gain(self) -> float:
        """Of the norm before lm_head. Larger where small embeddings are both scaled up and tied."""
        return 4.0 if self.unit_offset else 1.0

    def _matrix_std(self, name: str, fan_in: int) -> float:
        """Gains by what a matrix feeds; others keep the RMS of their input."""
        base = 1.0 / math.sqrt(fan_in)
        if "lm_head" in name or ("embed" in name and self.tied):
            return _LOGIT_STD * base / (self.logit_scale * self._final_gain)
        if "embed" in name:
            return 1.0 / self.embedding_scale
        if "q_proj" in name or "k_proj" in name or "qkv_proj" in name:
            return _QK_GAIN * base
        if "router" in name:
            return 2.0 * base
        # A tied model would repeat its input token, were the embedding not drowned by the layers.
        share = 3.0 / self.logit_scale if self.tied else 1.0
        if "o_proj" in name:
            return 3.0 * share * base
        if "down_proj" in name:
            return 2.4 * share * base
        return base
