"""What vLLM is known to refuse, in its own words, without starting it: limits of the version that rayk is
tested with. Another version may have others."""

from __future__ import annotations

from rayk.models.config import DecoderConfig
from rayk.types.config import VllmEngineConfig

CPU_BLOCK_SIZE = 128  # platforms/cpu.py, where nobody says
_CPU_LAYOUT = "LBHNC"
_CPU_BLOCK_MULTIPLE = 32


def is_plain(config: DecoderConfig) -> bool:
    """Tell whether every layer keeps keys and values of heads, and nothing else."""
    return all(layer.parts == ("attention",) for layer in config.layers)


def engine_refusal(engine: VllmEngineConfig, config: DecoderConfig) -> str | None:
    """Return what vLLM says at the start of an engine that it cannot run; None where nothing is known."""
    heads, kv_heads = config.num_query_heads, config.num_kv_heads
    if heads % engine.tp:
        # config/model.py
        must = f"must be divisible by tensor parallel size ({engine.tp})."
        return f"Total number of attention heads ({heads}) {must}"
    if kv_heads % engine.tp and engine.tp % kv_heads:
        return f"assert tp_size % self.total_num_kv_heads == 0 ({engine.tp} and {kv_heads} KV heads)"
    if engine.device != "cpu":
        return None
    if engine.layout not in ("auto", _CPU_LAYOUT):
        # v1/attention/backends/utils.py
        return (
            f"VLLM_KV_CACHE_LAYOUT={engine.layout} does not satisfy every supported set; valid layouts: "
            f"['{_CPU_LAYOUT}']."
        )
    if engine.block_size is not None and engine.block_size % _CPU_BLOCK_MULTIPLE:
        # v1/worker/utils.py
        return f"No common block size for {engine.block_size} (CPU_ATTN: [MultipleOf({_CPU_BLOCK_MULTIPLE})])"
    return None


def handshake_refusal(
    prefill: VllmEngineConfig, decode: VllmEngineConfig, config: DecoderConfig
) -> str | None:
    """Return what NixlConnector's worker on the decode side says in its handshake; None where nothing is
    known."""
    if decode.connector != "NixlConnector" or decode.transfer_mode != "pull":
        return None
    # distributed/kv_transfer/kv_connector/utils.py
    if decode.tp >= prefill.tp and decode.tp % prefill.tp:
        remote = f"remote tensor parallel size {prefill.tp}."
        return f"Local tensor parallel size {decode.tp} is not divisible by {remote}"
    if decode.tp < prefill.tp and prefill.tp % decode.tp:
        return (
            f"Remote tensor parallel size {prefill.tp} is not divisible by local tensor parallel size "
            f"{decode.tp}."
        )
    if prefill.block_size is None or decode.block_size is None or not is_plain(config):
        return None  # vLLM chooses them; of models with states it makes them larger
    if decode.block_size % prefill.block_size:
        remote = f"remote block size {prefill.block_size} or vice versa."
        return f"Local block size {decode.block_size} is not divisible by {remote}"
    # nixl/base_worker.py
    if decode.tp < prefill.tp <= config.num_kv_heads and decode.block_size != prefill.block_size:
        return "Different local/remote block sizes are not supported when P TP > D TP."
    return None
