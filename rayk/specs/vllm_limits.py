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
    if engine.dcp > 1:
        why = _dcp_refusal(engine, config)
        if why is not None:
            return why
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


def _dcp_refusal(engine: VllmEngineConfig, config: DecoderConfig) -> str | None:
    heads, kv_heads, has_latents = config.num_query_heads, config.num_kv_heads, config.mla is not None
    if not has_latents and engine.tp <= kv_heads:
        # config/model.py, as the next two
        return (
            f"Decode context parallelism for GQA/MQA requires `--tensor-parallel-size` ({engine.tp}) to be "
            f"greater than the model's total number of KV heads ({kv_heads}). Increase "
            "`--tensor-parallel-size` or set `--decode-context-parallel-size 1`."
        )
    if not has_latents and engine.dcp > engine.tp // kv_heads:
        return (
            f"`--decode-context-parallel-size` ({engine.dcp}) exceeds the maximum supported value "
            f"({engine.tp // kv_heads}) for `--tensor-parallel-size` ({engine.tp}) and {kv_heads} model KV "
            "heads."
        )
    if not has_latents and heads // kv_heads % engine.dcp:
        return (
            f"The model's number of query heads per KV head ({heads // kv_heads}) must be divisible by "
            f"`--decode-context-parallel-size` ({engine.dcp}) for GQA/MQA."
        )
    if engine.device == "cpu" and not has_latents:
        # v1/worker/cp_utils.py
        return (
            "Decode Context Parallelism (DCP) requires attention implementations to return the softmax LSE "
            "during decode, but CPUAttentionBackendImpl does not. Try a different backend by setting "
            "--attention-backend or disable DCP."
        )
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
