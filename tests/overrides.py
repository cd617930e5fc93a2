"""Config values of tiny checkpoints that reach settings which no family has by default."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

YARN: Mapping[str, Any] = MappingProxyType(
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    }
)
"""Overrides that scale positions with yarn, for families with one rope for all layers."""

LINEAR_ROPE: Mapping[str, Any] = MappingProxyType(
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
)
"""Overrides that divide every position by 4."""

NO_POSITIONS: Mapping[str, Any] = MappingProxyType({"position_embedding_type": None})
"""Overrides that remove granitemoehybrid's positions."""

NO_EXPERTS: Mapping[str, Any] = MappingProxyType({"num_local_experts": 0})
"""Overrides that leave granitemoehybrid its shared MLPs."""

GATE_FIRST: Mapping[str, Any] = MappingProxyType({"mamba_rms_norm": True, "mamba_norm_before_gate": False})
"""Overrides that give falcon_h1 an inner norm after the gate."""

LATENT_YARN: Mapping[str, Any] = MappingProxyType(
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
        "q_lora_rank": None,
        "attention_bias": True,
    }
)
"""Overrides of deepseek_v3: yarn with both mscales, uncompressed queries, biases."""
