"""What vLLM is told of an engine: its arguments, and environment variables for what has no argument."""

from __future__ import annotations

import json
from typing import Any

from rayk.types.config import VllmEngineConfig

PROVING = "rayk.vllm.proving"
PROOF_S = 60.0
"""A producer that has just started takes long over its first digest, on a busy machine."""
PUSHES = {"NixlConnector": "NixlPushConnector"}
"""vLLM's connectors that only pull -> those of their kind whose producer writes."""
ALONE = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""Environment variables of an engine that asks nothing of the world."""
ON_CPUS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment variables of engines that share a few cores."""
LEASE_S = 600
"""vLLM's own 30 s may be over before a decode engine of a busy machine has read a prompt's blocks."""


def engine_arguments(
    config: VllmEngineConfig, secret_file: str = "", host: str = "127.0.0.1"
) -> dict[str, Any]:
    """Make the keyword arguments of vLLM's AsyncEngineArgs. Engines that prove KV to one another share what
    `secret_file` holds: vLLM logs its arguments. Workers serve their proofs at `host`."""
    arguments: dict[str, Any] = {
        "model": config.model,
        "tensor_parallel_size": config.tp,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_dtype,
        "kv_cache_memory_bytes": config.cache_bytes,
        "max_model_len": config.max_tokens,
        "max_num_seqs": config.max_seqs,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": True,
        "worker_extension_cls": "rayk.vllm.extension.WorkerExtension",
    }
    shape = {
        "pipeline_parallel_size": config.pp,
        "decode_context_parallel_size": config.dcp,
        "cp_kv_cache_interleave_size": config.dcp_interleave,
    }
    arguments |= {name: size for name, size in shape.items() if size > 1}
    if config.block_size is not None:
        arguments["block_size"] = config.block_size
    if config.max_batch_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_batch_tokens
    if config.connector:
        arguments["kv_transfer_config"] = _transfer_config(config, secret_file, host)
    return arguments | {name: json.loads(value) for name, value in config.arguments}


def _transfer_config(config: VllmEngineConfig, secret_file: str, host: str) -> dict[str, Any]:
    """vLLM derives much of the connector's name, so the proving one goes by that of the one it wraps."""
    options: dict[str, Any] = {"kv_lease_duration": LEASE_S}
    pushes = config.transfer_mode == "push"
    connector = PUSHES.get(config.connector, config.connector) if pushes else config.connector
    transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
    if config.device == "cpu":
        transfer["kv_buffer_device"] = "cpu"
    if config.is_proven:
        transfer["kv_connector_module_path"] = PROVING
        options |= {"secret_file": secret_file, "host": host, "keep_rows": True, "timeout_s": PROOF_S}
    options |= {key: json.loads(value) for key, value in config.connector_options}
    return transfer | {"kv_connector_extra_config": options}


def engine_environment(config: VllmEngineConfig, host: str, port: int) -> dict[str, str]:
    """`host` and `port`: where the engine answers the handshakes of others."""
    found = {
        **ALONE,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_HOST_IP": host,
        # Every request has a name of its own already, by which connectors are asked about it.
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    }
    if config.device == "cpu":
        # Without this, the first request with logprobs has vLLM compile for a minute what ranks tokens.
        found |= {**ON_CPUS, "TORCH_COMPILE_DISABLE": "1"}
    if config.pp_layers is not None:
        found["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, config.pp_layers))
    if config.layout != "auto":
        found["VLLM_KV_CACHE_LAYOUT"] = config.layout
    return found
