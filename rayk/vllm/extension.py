"""What the driver may ask of each of an engine's workers, over vLLM's collective_rpc."""

from __future__ import annotations

import os
from typing import Any


class WorkerExtension:
    """Extends vLLM's worker classes, which mix it in for `worker_extension_cls`. Its answers are plain data,
    which vLLM's messages carry without pickle."""

    model_runner: Any

    def rayk_facts(self) -> dict[str, Any]:
        """Return what it runs with, wherever this version of vLLM tells."""
        runner = self.model_runner
        config, cache = runner.vllm_config, runner.kv_cache_config
        groups = [group for of_kv in getattr(runner, "attn_groups", ()) for group in of_kv]
        return {
            "layout": str(config.cache_config.kv_cache_layout or "auto"),
            "block_sizes": [int(group.kv_cache_spec.block_size) for group in cache.kv_cache_groups],
            "num_blocks": int(cache.num_blocks),
            "keeps_states": any("Mamba" in type(g.kv_cache_spec).__name__ for g in cache.kv_cache_groups),
            "backend": ", ".join(dict.fromkeys(str(group.backend.get_name()) for group in groups)),
        }

    def rayk_unpin(self) -> None:
        """Let the thread that computes run on every core again. On CPUs, vLLM's NixlConnector pins it to the
        last core, so all engines of a machine would share that one."""
        if self.model_runner.device.type == "cpu":
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))

    def rayk_proof(self, request_id: str) -> dict[str, Any]:
        """Return what the proving connector found of a request, which is told once."""
        found: dict[str, Any] = _connector().proof_results(request_id)
        return found

    def rayk_rows(self, request_id: str) -> tuple[list[list[Any]], bytes]:
        """Copy the prompt's rows that the proving connector kept: [layer, field, unit, rows, row bytes] of
        each array, and the bytes of all."""
        kept = _connector().kept_rows(request_id)
        shapes = [[layer, field, unit, *rows.shape] for (layer, field, unit), rows in kept.items()]
        return shapes, b"".join(rows.tobytes() for rows in kept.values())

    def rayk_forget(self) -> None:
        _connector().forget()


def _connector() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()
