"""What is refused before any actor starts: nonsense, and what this version does not do yet."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rayk.kv.groups import group_layers
from rayk.kv.manager import KVCacheManager
from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import kv_cache_specs
from rayk.specs.cells import Cell, expand
from rayk.specs.faults import check_fault, check_fits_model
from rayk.specs.load import LoadedSpec
from rayk.specs.prompts import TokenizerLoader, check_token_ids, resolve_prompts
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, SpecError


def plan_cells(
    loaded: LoadedSpec,
    config: DecoderConfig,
    *,
    device: str | None = None,
    tokenizer_loader: TokenizerLoader | None = None,
) -> list[tuple[Cell, list[list[int]]]]:
    """Cells with their prompts, everything checked that needs no actor. Raises UserError."""
    cells = expand(loaded.spec, config, device=device)
    planned = []
    prompts_of: dict[str, list[list[int]]] = {}
    if tokenizer_loader is not None:
        _check_stop_strings(cells, loaded, tokenizer_loader)
    for cell in cells:
        check_cell(cell, loaded)
        check_fits_model(cell, config, loaded)
        _check_fits_device(cell, loaded)
        key = cell.spec.prompts.model_dump_json()
        if key not in prompts_of:
            prompts_of[key] = resolve_prompts(cell.spec, config, tokenizer_loader)
        check_prompts(cell, prompts_of[key], config, loaded)
        planned.append((cell, prompts_of[key]))
    return planned


def check_cell(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse what cannot be meant and what is not built yet. Raises SpecError."""
    if "tokens" in cell.checks:
        _check_greedy(cell, loaded)
    for key, what in _not_supported(cell):
        raise SpecError(problem=f"not supported yet: {what}", where=loaded.where(key))
    _check_kernel_blocks(cell, loaded)
    for fault in cell.faults:
        check_fault(fault, cell, loaded)


def _check_greedy(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse to compare with the reference's greedy tokens what is chosen or ended in another way."""
    sampling = cell.sampling
    for name, plain in (
        ("temperature", 0),
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
        ("repetition_penalty", 1),
        ("stop", ()),
    ):
        value = getattr(sampling, name)
        if value != plain:
            wanted = f"{plain}" if name != "stop" else "[]"
            found = f"{value:g}" if name != "stop" else f"{list(value)}"
            raise SpecError(
                problem=f"check `tokens` compares greedy tokens: {name} must be {wanted}, got {found}",
                where=loaded.where(f"sampling.{name}"),
                mend=f"{name}: {wanted}, or leave `tokens` out of checks",
            )


def _check_stop_strings(cells: Sequence[Cell], loaded: LoadedSpec, tokenizer_loader: TokenizerLoader) -> None:
    """Refuse stop strings of a model without a tokenizer."""
    if any(cell.sampling.stop for cell in cells):
        try:
            tokenizer_loader(loaded.spec.model)
        except CheckpointError as error:
            raise SpecError(
                problem=f"stop strings need the model's tokenizer: {error.problem}",
                where=loaded.where("sampling.stop"),
                mend="sampling: {stop_token_ids: [...]}",
            ) from error


def _not_supported(cell: Cell) -> list[tuple[str, str]]:
    """(key, what) of everything in the cell that a later version does."""
    spec, engine = cell.spec, cell.spec.engine
    found = [
        ("engine.prefix_caching", "prefix_caching: true", engine.prefix_caching),
        ("engine.fast_prefill", "fast_prefill: true", engine.fast_prefill),
        (
            "failure_policy",
            f"failure_policy: {spec.failure_policy} (only fail)",
            spec.failure_policy != "fail",
        ),
        ("arrival.rate", "arrival.rate (all requests arrive at once)", spec.arrival.rate is not None),
    ]
    engines = (("prefill", cell.prefill), ("decode", cell.decode))
    for side, config in engines:
        if config is not None and config.kv_dtype != "auto":
            key = f"{side}.kv_dtype" if getattr(spec, side).kv_dtype else "kv_dtype"
            found.append((key, f"kv_dtype: {config.kv_dtype} (only auto)", True))
    if cell.decode is not None:
        transfer = spec.transfer
        found += [
            ("transfer.mode", "transfer.mode: push (only pull)", transfer.mode == "push"),
            (
                "transfer.staging",
                "transfer.staging: always (only auto, never)",
                transfer.staging == "always",
            ),
        ]
    return [(key, what) for key, what, wrong in found if wrong]


def _check_fits_device(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse a backend or comm that the cell's device cannot have."""
    engines = [e for e in (cell.prefill, cell.decode) if e is not None]
    on_cuda = engines[0].device == "cuda"
    # Triton's interpreter, asked for by its own variable, runs the kernels on the CPU.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    backends = {"cpu", "cpu-torch"} if on_cuda else set() if interpreted else {"triton"}
    comms = {"shm"} if on_cuda else {"nccl"}
    for engine in engines:
        for name, value, wrong in (
            ("attention_backend", engine.attention_backend, backends),
            ("comm", engine.comm, comms if engine.tp > 1 else set()),
        ):
            if value in wrong:
                raise SpecError(
                    problem=f"{name}: {value} cannot run on device {engine.device}",
                    where=loaded.where(f"engine.{name}"),
                    mend=f"{name}: auto",
                )


def _check_kernel_blocks(cell: Cell, loaded: LoadedSpec) -> None:
    for side, engine in (("prefill", cell.prefill), ("decode", cell.decode)):
        if engine is None or engine.kernel_block_size is None:
            continue
        if engine.block_size % engine.kernel_block_size:
            raise SpecError(
                problem=f"{side}: kernel_block_size {engine.kernel_block_size} does not divide "
                f"block_size {engine.block_size}",
                where=loaded.where("engine.kernel_block_size"),
            )


def check_prompts(
    cell: Cell, prompts: Sequence[list[int]], config: DecoderConfig, loaded: LoadedSpec
) -> None:
    """Refuse prompts the model or an engine's KV pool cannot hold. Raises SpecError."""
    where = loaded.where("prompts")
    stop_where = f"{loaded.where('sampling.stop_token_ids')}: sampling.stop_token_ids"
    check_token_ids([0, *cell.sampling.stop_token_ids], config.vocab_size, stop_where)
    for fault in cell.faults:
        if fault.request is not None and fault.request >= len(prompts):
            raise SpecError(
                problem=f"fault {fault.kind}: request {fault.request} of {len(prompts)} prompts",
                where=loaded.where("faults"),
                mend=f"request: 0 to {len(prompts) - 1}",
            )
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    length, max_tokens = len(prompts[longest]), cell.sampling.max_tokens
    total = length + max_tokens
    ask = f"prompt {longest} of {length} + max_tokens {max_tokens} = {total} tokens"
    if total > config.max_positions:
        raise SpecError(problem=f"{ask}, over {config.positions_text}", where=where)
    for side, engine in (("prefill", cell.prefill), ("decode", cell.decode)):
        if engine is None:
            continue
        needed, held = blocks_needed(total, engine, config), engine.num_blocks - 1
        if needed > held:
            raise SpecError(
                problem=f"{ask} need {needed} KV blocks, over the {side} engine's pool of {held} "
                f"({engine.num_blocks} less the null block) of {engine.block_size} tokens",
                where=where,
                mend=f"engine: {{num_blocks: {needed + 1}}} or more",
            )


def blocks_needed(num_tokens: int, engine: EngineConfig, config: DecoderConfig) -> int:
    """Blocks of all KV groups that one request of `num_tokens` takes from an engine's pool."""
    specs = kv_cache_specs(
        config, block_size=engine.block_size, dtype=engine.dtype, hybrid_kv=engine.hybrid_kv
    )
    manager = KVCacheManager(group_layers(specs), engine.num_blocks)
    return manager.max_request_blocks(num_tokens, engine.max_batch_tokens)
