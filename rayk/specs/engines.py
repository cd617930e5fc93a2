"""What is refused of an engine's own settings: backends, kernel blocks, a pool too small."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from rayk.kv.groups import KVCacheGroup, max_request_blocks
from rayk.kv.kernel_blocks import bad_kernel_blocks
from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import engine_groups, group_chunks
from rayk.models.tensor_parallel import bad_division, bad_shape, why_tp_unsupported
from rayk.specs.cells import Cell
from rayk.specs.load import LoadedSpec
from rayk.types.config import EngineConfig
from rayk.types.errors import SpecError
from rayk.types.paced_tokens import why_not_paced


def check_fits_device(engine: EngineConfig, where: Callable[[str], str]) -> None:
    """Refuse a backend or comm that an engine's device cannot have. `where`: the place of a setting. Raises
    SpecError."""
    if engine.device == "auto":
        return  # the cluster that decides it is not joined yet
    on_cuda = engine.device == "cuda"
    # Triton's interpreter, asked for by its own variable, runs the kernels on the CPU.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    backends = {"cpu", "cpu-torch"} if on_cuda else set() if interpreted else {"triton"}
    comms = {"shm"} if on_cuda else {"nccl"}
    given = [("attention_backend", engine.attention_backend, backends)]
    given += [("layer_backends", backend, backends) for _, backend in engine.layer_backends]
    given += [("comm", engine.comm, comms if engine.num_ranks > 1 else set())]
    for name, value, wrong in given:
        if value in wrong:
            raise SpecError(
                problem=f"{name}: {value} cannot run on device {engine.device}",
                where=where(name),
                mend=f"{name}: auto",
            )


def check_cell_device(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse a backend or comm that the cell's device cannot have. Raises SpecError."""
    for side, engine in _engines(cell):
        check_fits_device(engine, partial(_where, cell, side, loaded=loaded))


def check_division(cell: Cell, config: DecoderConfig, loaded: LoadedSpec) -> None:
    """Refuse to divide tokens or layers as the model does not let them be. Raises SpecError."""
    for side, engine in _engines(cell):
        bad = None if why_tp_unsupported(config, engine.tp) else bad_division(config, engine)
        if bad is not None:
            raise SpecError(
                problem=f"{side}: {bad.problem}",
                where=_where(cell, side, bad.setting, loaded),
                mend=f"{bad.mend}; in a matrix, `exclude` leaves such cells out",
            )


def check_shape_runs(cell: Cell, config: DecoderConfig, loaded: LoadedSpec) -> None:
    """Refuse engines whose tokens or layers are divided as rayk's cannot compute. Raises SpecError."""
    for side, engine in _engines(cell):
        bad = bad_shape(config, engine)
        if bad is not None and bad.setting != "tp":  # a cell of that TP is UNSUPPORTED
            section = _section(cell, side, bad.setting)
            raise SpecError(
                problem=f"{side}: {bad.problem}",
                where=_where(cell, side, bad.setting, loaded),
                mend=f"{section}.{bad.mend}; docs/sharding.md lists what is refused",
            )


def with_compared_weights(cell: Cell, config: DecoderConfig, loaded: LoadedSpec) -> Cell:
    """Return the cell whose weights are dequantised where it is compared with a reference whose weights are.
    Raises SpecError if they were to be kept."""
    compared = [check for check in cell.checks if check in ("tokens", "logprobs", "kv_values")]
    if config.quantisation is None or not compared or not cell.is_rayks:
        return cell
    for side, engine in _engines(cell):
        if engine.weights == "kept":
            raise SpecError(
                problem=f"{side}: weights: kept, and check `{compared[0]}` compares with dequantised weights",
                where=_where(cell, side, "weights", loaded),
                mend="weights: dequantised, or checks: [kv_bytes]",
            )
    decode = None if cell.decode is None else replace(cell.decode, weights="dequantised")
    return replace(cell, prefill=replace(cell.prefill, weights="dequantised"), decode=decode)


def check_kernel_blocks(cell: Cell, config: DecoderConfig, loaded: LoadedSpec) -> None:
    """Refuse kernel blocks that do not divide a group's or its layers' chunks, or of kinds the model lacks.
    Raises SpecError."""
    for side, engine in _engines(cell):
        groups = engine_groups(engine, config)
        bad = bad_kernel_blocks(
            groups,
            engine.kernel_block_size,
            dict(engine.kernel_block_sizes),
            group_chunks(groups, config),
            engine.block_size,
            engine.dcp,
        )
        if bad is not None:
            raise SpecError(
                problem=f"{side}: {bad.problem}",
                where=_where(cell, side, bad.setting, loaded),
                mend=bad.mend,
            )


def check_layer_backends(cell: Cell, config: DecoderConfig, loaded: LoadedSpec) -> None:
    """Refuse attention backends of layers that have no attention. Raises SpecError."""
    layers = ", ".join(map(str, config.attending_layers))
    for side, engine in _engines(cell):
        for layer, _ in engine.layer_backends:
            if layer not in config.attending_layers:
                raise SpecError(
                    problem=f"{side}: layer_backends names layer {layer}, and that has no attention",
                    where=_where(cell, side, "layer_backends", loaded),
                    mend=f"layers with attention: {layers}" if layers else "the model has no attention",
                )


def check_paced(cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse engines to be paced that lack what they need, and what needs engines that compute. Raises
    SpecError."""
    varied = {key.rpartition(".")[2] for matrix in loaded.spec.matrix for key in matrix}
    for side, engine in _engines(cell):
        asked = ("costs", engine.costs != ""), ("pace", engine.pace != 1)
        given = [name for name, is_given in asked if is_given]
        if engine.compute == "real" and given and "compute" not in varied:
            raise SpecError(
                problem=f"{side}: {given[0]} is of engines that compute nothing, and these compute",
                where=_where(cell, side, given[0], loaded),
                mend="engine: {compute: paced}, or leave it out",
            )
        if engine.compute == "paced" and not engine.costs:
            raise SpecError(
                problem=f"{side}: compute: paced without cost tables",
                where=_where(cell, side, "compute", loaded),
                mend="engine: {costs: FOLDER}, which `rayk costs` writes",
            )
        if engine.compute == "paced" and engine.pp > 1:
            raise SpecError(
                problem=f"{side}: compute: paced with pp: {engine.pp}: stages do not take their turns",
                where=_where(cell, side, "pp", loaded),
                mend="pp: 1",
            )
        if engine.compute == "paced" and engine.async_scheduling == "always":
            raise SpecError(
                problem=f"{side}: compute: paced with async_scheduling: always: steps follow their tokens",
                where=_where(cell, side, "async_scheduling", loaded),
                mend="async_scheduling: auto",
            )
    if cell.prefill.compute == "real":  # `engine.compute` is of both sides
        return
    wants = why_not_paced(cell.sampling) or ", ".join(
        c for c in cell.checks if c in ("logprobs", "kv_values")
    )
    if wants:
        section = "sampling" if why_not_paced(cell.sampling) else "checks"
        raise SpecError(
            problem=f"compute: paced with {wants}: there are no logits, and KV has no values",
            where=loaded.where(section),
            mend="checks: [tokens, kv_bytes]" if section == "checks" else f"leave out {wants}",
        )


def check_pool(
    request: str, num_tokens: int, side: str, engine: EngineConfig, config: DecoderConfig, where: str
) -> None:
    """Refuse a request that an engine's pool cannot hold when it is alone. Raises SpecError.

    `request`: the request of `num_tokens` in words.
    """
    groups = engine_groups(engine, config)
    needed = max_request_blocks(groups, num_tokens, engine.max_batch_tokens)
    num_usable = engine.num_blocks - 1
    if needed > num_usable:
        raise SpecError(
            problem=f"{request} need {needed} KV blocks, over the {side} engine's pool of {num_usable} "
            f"({engine.num_blocks} less the null block) of {_block_sizes_text(groups)}",
            where=where,
            mend=f"engine: {{num_blocks: {needed + 1}}} or more",
        )


def _block_sizes_text(groups: tuple[KVCacheGroup, ...]) -> str:
    """`16 tokens`, or `48 tokens (full), 2048 tokens (mamba2)` where they differ."""
    sizes = {g.spec.kind: g.spec.block_size for g in groups}
    if len(set(sizes.values())) == 1:
        return f"{groups[0].spec.block_size} tokens"
    return ", ".join(f"{size} tokens ({kind})" for kind, size in sizes.items())


def _engines(cell: Cell) -> Iterator[tuple[str, EngineConfig]]:
    yield "prefill", cell.prefill
    if cell.decode is not None:
        yield "decode", cell.decode


def _where(cell: Cell, side: str, name: str, loaded: LoadedSpec) -> str:
    """Tell where a setting that both sides share, or one has of its own, was given."""
    return loaded.where(f"{_section(cell, side, name)}.{name}")


def _section(cell: Cell, side: str, name: str) -> str:
    own = getattr(getattr(cell.spec, side), name, None) is not None
    return side if own else "engine"
