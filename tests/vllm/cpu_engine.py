"""Run by vLLM's interpreter, `python -m tests.vllm.cpu_engine MODEL OUT.npz NUM_TOKENS TP`.

One engine computes a prompt; each of its workers tells the rows that ProvenCaches reads of it,
RANK.LAYER.FIELD.UNIT.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from rayk.vllm.arguments import ALONE, ON_CPUS

ENVIRONMENT = {**ALONE, **ON_CPUS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
VOCABULARY = 256


def prompt_ids(num_tokens: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(0).integers(3, VOCABULARY, num_tokens)]


class Extension:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def read_rows(self, block_ids: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
        """RANK.LAYER.FIELD.UNIT -> uint8 [rows, row bytes]."""
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        from rayk.vllm.caches import ProvenCaches

        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        runner = self.model_runner
        layers = runner.vllm_config.compilation_config.static_forward_context
        caches = ProvenCaches(runner.vllm_config, runner.kv_cache_config, layers, rank, size)
        assert size > 1 or (caches.digests(block_ids, num_tokens) != 0).all()
        rows = caches.rows(block_ids, num_tokens)
        return {
            f"{rank}.{layer}.{field}.{unit}": values
            for (layer, _), fields in rows.items()
            for (field, unit), values in fields.items()
        }


def main(model: str, out: str, num_tokens: int, tp_size: int) -> None:
    os.environ |= ENVIRONMENT
    import vllm

    llm = vllm.LLM(
        model,
        dtype="float32",
        tensor_parallel_size=tp_size,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=1024,
        enable_prefix_caching=False,  # with it vLLM 0.32 fails on CPU in prefills that it would checkpoint
        async_scheduling=False,
        worker_extension_cls="tests.vllm.cpu_engine.Extension",
    )
    engine = llm.llm_engine
    sampling = vllm.SamplingParams(max_tokens=2, temperature=0.0)
    engine.add_request("r", {"prompt_token_ids": prompt_ids(num_tokens)}, sampling)
    engine.step()
    scheduler = engine.engine_core.engine_core.scheduler
    (request,) = scheduler.requests.values()
    assert request.num_computed_tokens == num_tokens
    block_ids = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    found = llm.collective_rpc("read_rows", args=(block_ids, num_tokens))
    np.savez(out, **{name: rows for of_rank in found for name, rows in of_rank.items()})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
