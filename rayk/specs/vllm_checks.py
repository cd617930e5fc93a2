"""What is refused of cells with vLLM's engines before anything starts; what vLLM refuses, it says itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayk.models.config import DecoderConfig
from rayk.specs.cells import Cell
from rayk.specs.experiment import AXES, ExperimentSpec
from rayk.specs.load import LoadedSpec
from rayk.specs.prompts import check_token_ids
from rayk.specs.vllm_engines import is_unheeded
from rayk.types.errors import SpecError

VLLM_NAMES = {
    "num_blocks": "num_gpu_blocks_override",
    "max_batch_tokens": "max_num_batched_tokens",
    "max_seqs": "max_num_seqs",
    "attention_backend": "attention_backend",
}
"""Settings of rayk's engines -> what vLLM calls something like it."""


def check_kinds(cells: Sequence[Cell], loaded: LoadedSpec) -> None:
    """Refuse settings that are given and that no cell heeds, for all engines are of the other kind. In a
    matrix of both kinds, cells pass over what is not theirs. Raises SpecError."""
    kinds = {kind for cell in cells for kind in cell.spec.kinds}
    if len(kinds) > 1:
        return
    (kind,) = kinds
    for key in AXES:
        if is_unheeded(key, (kind,)) and _is_given(key, loaded):
            whose, others = ("rayk's", "vLLM's") if kind == "rayk" else ("vLLM's", "rayk's own")
            name = VLLM_NAMES.get(key.rpartition(".")[2])
            mend = "engine: {kind: vllm}, or leave it out"
            if kind == "vllm":
                mend = f"engine: {{vllm: {{{name}: ...}}}}" if name else "leave it out"
            raise SpecError(
                problem=f"{key} is a setting of {others} engines, and all engines of this spec are {whose}",
                where=loaded.where(key),
                mend=mend,
            )


def _is_given(key: str, loaded: LoadedSpec) -> bool:
    """Tell whether a key has another value than its default, or several. A resolved spec names every key:
    that alone says nothing."""
    if any(key in matrix for matrix in loaded.spec.matrix):
        return True
    return bool(_value(loaded.spec, key) != _value(_DEFAULTS, key))


_DEFAULTS = ExperimentSpec.model_validate({"model": "m", "prompts": {"file": "f"}})


def _value(spec: Any, key: str) -> Any:
    for part in key.split("."):
        spec = getattr(spec, part, None)
    return spec


def check_vllm_cell(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse host tiers and faults of rayk's, which vLLM's engines do not have. Raises SpecError."""
    if cell.spec.offload.host_gib:
        raise SpecError(
            problem="offload is rayk's own host tier, and the cell's engines are vLLM's",
            where=loaded.where("offload.host_gib"),
            mend="offload: {host_gib: 0}, or vLLM's: engine: {connector: OffloadingConnector}",
        )
    for fault in cell.faults:
        raise SpecError(
            problem=f"fault {fault.kind} strikes rayk's own engines, and the cell's are vLLM's",
            where=loaded.where("faults"),
            mend="engine: {connector_options: {planted: heads_shifted}}, and others in docs/vllm.md",
        )
    for side, engine in zip(("prefill", "decode"), cell.vllm, strict=False):
        own = getattr(cell.spec, side).vllm or {}
        for name, _ in engine.arguments:
            where = loaded.where(f"{side if name in own else 'engine'}.vllm")
            if name in _SAID_BY:
                problem = f"engine argument {name} is said elsewhere in a spec"
                raise SpecError(problem=problem, where=where, mend=_SAID_BY[name])
            if name in _NOT_TAKEN:
                problem = f"engine argument {name} is not taken: {_NOT_TAKEN[name]}"
                raise SpecError(problem=problem, where=where, mend=f"leave {name} out")


_SAID_BY = {
    "tensor_parallel_size": "prefill.tp, decode.tp",
    "pipeline_parallel_size": "prefill.pp, decode.pp",
    "decode_context_parallel_size": "prefill.dcp, decode.dcp",
    "cp_kv_cache_interleave_size": "prefill.dcp_interleave, decode.dcp_interleave",
    "block_size": "prefill.block_size, decode.block_size",
    "model": "model",
    "dtype": "dtype",
    "kv_cache_dtype": "kv_dtype, prefill.kv_dtype, decode.kv_dtype",
    "enable_prefix_caching": "engine.prefix_caching",
    "kv_transfer_config": "engine.connector, engine.connector_options",
    "kv_offloading_size": "engine.connector: OffloadingConnector, engine.connector_options",
    "kv_offloading_backend": "engine.connector: OffloadingConnector, engine.connector_options",
}
"""vLLM's engine arguments that would silently take the place of a setting of the spec -> that setting."""
_SPECULATES = "a draft model's layers have no place in the proof"
_ONE_ENGINE = "rayk starts one engine at a time, whose prompts are not split"
_NOT_TAKEN = {
    "worker_extension_cls": "rayk's checks ask vLLM's workers by its own (rayk.vllm.extension)",
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _SPECULATES),
    **dict.fromkeys(
        (
            *("data_parallel_size", "data_parallel_size_local", "nnodes"),
            "prefill_context_parallel_size",
        ),
        _ONE_ENGINE,
    ),
}
"""Engine arguments with which rayk can prove nothing -> why."""


def check_vllm_prompts(
    cell: Cell, prompts: Sequence[list[int]], config: DecoderConfig, loaded: LoadedSpec
) -> None:
    """Refuse prompts that do not fit the sequences vLLM's engines are started for. Raises SpecError."""
    stop_where = f"{loaded.where('sampling.stop_token_ids')}: sampling.stop_token_ids"
    check_token_ids([0, *cell.sampling.stop_token_ids], config.vocab_size, stop_where)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    total = len(prompts[longest]) + cell.sampling.max_tokens
    request = f"prompt {longest} of {len(prompts[longest])} + max_tokens {cell.sampling.max_tokens}"
    if total > config.max_positions:
        raise SpecError(
            problem=f"{request} = {total} tokens, over {config.positions_text}", where=loaded.where("prompts")
        )
    most = min(engine.max_tokens for engine in cell.vllm)
    if total > most:
        raise SpecError(
            problem=f"{request} = {total} tokens, over the {most} of a sequence that vLLM's engines are "
            "started for",
            where=loaded.where("prompts"),
            mend=f"engine: {{vllm: {{max_model_len: {total}}}}}",
        )
