"""Run by vLLM's interpreter: `run_engine.py MODEL CONFIG` starts one engine with this kv_transfer_config, and
prints as JSON how its caches lie in memory and what it answers."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

RESULT = "RESULT "
"""Begins the line: vLLM logs to stdout, too."""


class Layouts:
    """What vLLM's worker is extended with."""

    def layouts(self) -> dict[str, Any]:
        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        found = {}
        for name, layer in layers.items():
            kept = getattr(layer, "kv_cache", None)
            tensors = kept if isinstance(kept, tuple | list) else [kept]
            found[name] = [[list(t.shape), list(t.stride()), str(t.dtype)] for t in tensors if t is not None]
        return {"conv": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT"), "caches": found}


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        kv_transfer_config=json.loads(sys.argv[2]),
        worker_extension_cls="tests.vllm.run_engine.Layouts",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    prompts = [{"prompt_token_ids": [3 + (7 * i + 11 * n) % 500 for i in range(n)]} for n in (5, 70, 130)]
    answers = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0, detokenize=False))
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    print(RESULT + json.dumps({"layouts": llm.collective_rpc("layouts"), "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
