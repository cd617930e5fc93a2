"""Results of earlier weight searches (see draw).

They are hints that save up to fifty trials: a known trial is measured like any other, and if it is not good
enough (with another release of transformers or torch) the search starts from the first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_DECIDING = ("format", "family", "seed", "config", "dtype")


def trial_key(parameters: Mapping[str, Any]) -> str:
    """Digest the parameters in a checkpoint's marker that the draw depends on."""
    deciding = {name: parameters[name] for name in _DECIDING}
    if "quantise" in parameters:
        deciding["quantise"] = parameters["quantise"]
    text = json.dumps(deciding, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


TRIALS: Mapping[str, int] = {
    "1d962b53c645": 4,  # cohere2
    "cd633e30212f": 6,  # cohere2 bfloat16
    "55fe9cd74e17": 4,  # cohere2 float16
    "1dc6d64d59fd": 1,  # deepseek_v3
    "62efc0cc4545": 1,  # deepseek_v3
    "d8e9b38a43f6": 5,  # deepseek_v3
    "b5912e9120bd": 26,  # deepseek_v3
    "afe99498f6be": 51,  # deepseek_v3
    "89ff04d74a1b": 51,  # deepseek_v3 with an MTP layer
    "a476a18ef85f": 2,  # falcon_h1
    "3bf5f252c464": 3,  # falcon_h1
    "bc46682ae3f7": 6,  # falcon_h1
    "885ef01c9814": 15,  # gemma2
    "5e1f38e16dc4": 16,  # gemma2
    "76336beff4f6": 6,  # gemma3
    "e5b0c302335d": 10,  # gemma3
    "6ca9b82c0631": 22,  # gemma3 bfloat16
    "c407d9a02e8a": 10,  # gemma3 float16
    "5124cbec937c": 2,  # gemma3n
    "166983abb079": 9,  # gpt_oss
    "988604024a77": 19,  # gpt_oss bfloat16
    "23eb0ff4b068": 45,  # gpt_oss float16
    "901bd6136e0c": 8,  # granitemoehybrid
    "8ef36f1153ed": 9,  # granitemoehybrid
    "c37ac9b61cb1": 17,  # granitemoehybrid
    "edc88ccb29d8": 1,  # jamba
    "03243287c39b": 6,  # jamba
    "69b0a7a76b58": 6,  # llama
    "7bd31841ebac": 6,  # llama
    "c2a4363d0989": 13,  # llama
    "182de98aff3a": 5,  # llama4
    "4cc1191641ad": 6,  # llama4
    "d8f10fea0d3c": 7,  # llama4
    "4d4221c4bbb3": 3,  # mamba2
    "ebb6158c70a7": 3,  # mamba2
    "53d373af4475": 6,  # mamba2
    "253a3eb99f88": 10,  # mistral
    "64896a2ff82f": 2,  # nemotron_h
    "319129757caf": 1,  # phi3
    "9915b46d5d95": 2,  # phi3 bfloat16
    "2b18ae7b9d89": 1,  # phi3 float16
    "2c751a82011a": 2,  # qwen2
    "c980b3acfa75": 2,  # qwen2
    "66fc5520f16c": 3,  # qwen2
    "7e5641509a5d": 3,  # qwen2
    "ef7a8699b99a": 9,  # qwen2
    "f9e612314fd6": 10,  # qwen2
    "1ae6531592d7": 14,  # qwen2
    "6c27b90f5f55": 1,  # qwen3
    "b55b54353ee1": 1,  # qwen3
    "f46e38bfb49d": 1,  # qwen3
    "fba210748757": 1,  # qwen3
    "a1a6c7dc49d5": 2,  # qwen3
    "d22bf7ba1a21": 5,  # qwen3
    "10952a3959aa": 6,  # qwen3
    "6897c50f70a0": 6,  # qwen3
    "e6fcbc13574f": 6,  # qwen3
    "b41ad9daf5be": 11,  # qwen3
    "18b9cc0aa039": 9,  # qwen3_moe
    "5d89b5d8ed79": 5,  # qwen3_moe bfloat16
    "04734eb37e30": 1,  # qwen3_next
    "4f7a5bca30a2": 27,  # qwen3_next
    "a3f8840fd951": 21,  # deepseek_v3 fp8-block
    "3be69ba39c90": 7,  # gpt_oss mxfp4
    "59767df0be95": 15,  # llama fp8-channel
    "fce4d986297f": 4,  # llama fp8-tensor
    "656443b45046": 10,  # qwen3 fp8-block
    "2c571dd211e5": 7,  # qwen3_moe fp8-block
    "fe6eaa12c4f2": 1,  # llama gptq
    "3b1b111716bc": 5,  # llama int4
    "51cb77648344": 6,  # llama int8
    "69988fa2b097": 4,  # llama modelopt-fp8
    "164066433f86": 7,  # qwen2 gptq
    "fe6128c5dbc8": 5,  # qwen3 modelopt-nvfp4
    "f9069c10c706": 6,  # qwen3_moe awq
}
