"""Planted faults: what of them is refused before any actor starts."""

from __future__ import annotations

from collections.abc import Sequence

from rayk.kv.fields import twin_taps
from rayk.kv.kernel_blocks import kernel_block_sizes
from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import find_drafter
from rayk.models.kv_specs import engine_groups, group_chunks, kv_cache_specs
from rayk.parallel.shard import engine_shape
from rayk.specs.cells import Cell
from rayk.specs.experiment import FaultSpec
from rayk.specs.load import LoadedSpec
from rayk.types.errors import SpecError
from rayk.types.fault_table import (
    DRAFT_POINTS,
    MESSAGE_KINDS,
    POINTS,
    RANK_KINDS,
    REQUEST_POINTS,
    STATE_POINTS,
)
from rayk.types.speculative import METHODS

TRANSFER_POINTS = tuple(POINTS)
RANK_POINTS = (*REQUEST_POINTS, *TRANSFER_POINTS)

FAULT_POINTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(MESSAGE_KINDS, TRANSFER_POINTS),
    **dict.fromkeys(RANK_KINDS, RANK_POINTS),
    "kill_node": REQUEST_POINTS,
    "flip_bit": ("transfer",),
    "early_reuse": ("transfer",),
    "wrong_kv": ("k_norm", "rope", "store_kv", *STATE_POINTS),
    "wrong_drafts": DRAFT_POINTS,
}
"""Fault kinds and where each can strike: at points of a request's life, of its transfer's, or in a layer's
computation.

kill ends the worker process of a rank, stop leaves it there without a sign of life, restart ends it and has
its engine formed again; kill_node ends its whole Ray node: the raylet, and with it every worker there, of any
job. drop, delay, reorder, duplicate and corrupt strike one message, read or write; see types.fault_table.
wrong_kv: a rank of the prefill engine rolls a layer's k-norm weight by one channel, takes
tokens to stand one position later, or stores them one slot later in their block; in a recurrent layer it
exchanges the taps of B and C (of q and k), moves all taps one place on, writes the state as bfloat16 where
float32 is read, or starts a request from what its page held before. wrong_drafts: the ranks of the decode
engine lose a drafter's rows of a prompt that came right, move them one token on, or exchange those of layers.
"""

FAULT_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*RANK_KINDS, "kill_node"), ("step", "engine")),
    **dict.fromkeys(("drop", "reorder", "duplicate"), ("step", "engine")),
    "delay": ("step", "engine", "delay_s"),
    "corrupt": ("step", "engine", "seed"),
    "flip_bit": ("request", "seed", "engine"),
    "early_reuse": ("request", "engine"),
    "wrong_kv": ("layer", "engine"),
    "wrong_drafts": ("request", "engine"),
}
"""What each kind heeds beside kind, point, role, rank and expect; anything else would be ignored."""

MAX_LISTED = 8
"""Layers that a mend names."""


def check_fault(fault: FaultSpec, cell: Cell, loaded: LoadedSpec) -> None:
    """Refuse a fault that cannot be meant in this cell. Raises SpecError."""
    where = loaded.where("faults")
    if fault.kind not in FAULT_POINTS:
        raise SpecError(
            problem=f"unknown fault kind {fault.kind!r}",
            where=where,
            mend=f"supported: {', '.join(FAULT_POINTS)}",
        )
    points = FAULT_POINTS[fault.kind]
    if fault.point is not None and fault.point not in points:
        raise SpecError(
            problem=f"fault {fault.kind} cannot strike at {fault.point!r}",
            where=where,
            mend=f"point: {', '.join(points)}",
        )
    _check_fault_fields(fault, where)
    kills = fault.kind in (*RANK_KINDS, "kill_node")
    if fault.point is None and fault.kind not in ("flip_bit", "early_reuse"):
        raise SpecError(
            problem=f"fault {fault.kind} needs a point", where=where, mend=f"point: {', '.join(points)}"
        )
    if fault.kind == "wrong_kv":
        _check_wrong_kv(fault, cell, where)
    elif cell.decode is None and (not kills or fault.point not in ("prefill", "decode")):
        raise SpecError(
            problem=f"fault {fault.kind} strikes a transfer, and aggregated cells have none",
            where=where,
            mend="mode: disaggregated",
        )
    if fault.kind == "wrong_drafts":
        _check_wrong_drafts(fault, cell, where)
    _check_lease(fault, cell, loaded)
    _check_fault_place(fault, cell, where)


def _check_lease(fault: FaultSpec, cell: Cell, loaded: LoadedSpec) -> None:
    needs_renewal = fault.point == "lease_renewal"
    needs_end = fault.point == "free" and fault.kind in ("drop", "corrupt")
    if (needs_renewal or needs_end) and cell.spec.transfer.lease_s is None:
        raise SpecError(
            problem=f"fault {fault.kind} at {fault.point}: without transfer.lease_s leases are not renewed, "
            "and last as long as a request may",
            where=loaded.where("faults"),
            mend="transfer: {lease_s: 2}",
        )


def _check_fault_fields(fault: FaultSpec, where: str) -> None:
    heeded = FAULT_FIELDS[fault.kind]
    given = fault.model_dump(exclude_defaults=True)
    heeds = ("point", "rank" if fault.kind in MESSAGE_KINDS else "role, rank", *heeded)
    for name in ("request", "layer", "step", "seed", "engine", "delay_s", "role"):
        if name == "role" and fault.kind not in MESSAGE_KINDS:
            continue
        if name in given and name not in heeded:
            raise SpecError(
                problem=f"fault {fault.kind} does not heed `{name}`",
                where=where,
                mend=f"it heeds {', '.join(heeds)}",
            )


def _check_fault_place(fault: FaultSpec, cell: Cell, where: str) -> None:
    """Refuse an engine, a rank or a step at which nothing could ever strike."""
    role = committing_role(fault, cell.spec.transfer.mode)
    engine, num_engines = cell.prefill, cell.num_prefill_engines
    if role == "decode" and cell.decode:
        engine, num_engines = cell.decode, cell.num_decode_engines
    if fault.engine is not None and fault.engine >= num_engines:
        raise SpecError(
            problem=f"fault {fault.kind}: engine {fault.engine} of {num_engines} {role} engines "
            f"(cell {cell.cell_id})",
            where=where,
            mend=f"engine: 0 to {num_engines - 1}" if num_engines > 1 else "engine: 0, the only one",
        )
    if fault.step == 0:
        raise SpecError(
            problem=f"fault {fault.kind}: step 0 never comes: steps are counted from 1",
            where=where,
            mend="step: 1, or leave `step` out, which is the first as well",
        )
    if fault.rank is not None and fault.rank >= engine.num_ranks:
        raise SpecError(
            problem=f"fault {fault.kind}: rank {fault.rank} of a {role} engine of {engine.parallel_text} "
            f"(cell {cell.cell_id})",
            where=where,
            mend=f"rank: 0 to {engine.num_ranks - 1}",
        )


def committing_role(fault: FaultSpec, mode: str) -> str:
    """Return the side that a fault strikes at: of one that strikes a rank its own; else where its point
    happens."""
    if fault.kind not in MESSAGE_KINDS:
        return fault.engine_role
    return side_of(fault.point or "", mode) if (fault.kind, fault.point) != CORRUPT_HANDSHAKE else "prefill"


CORRUPT_HANDSHAKE = ("corrupt", "handshake")
"""What the prefill engine says of itself is changed; everything else of a handshake is done by the other."""


def side_of(point: str, mode: str) -> str:
    """Return the side at whose ranks a point of a transfer's life is passed."""
    pushes = mode == "push" and point in ("post", "mid_transfer", "notify")
    return "prefill" if pushes else "decode"


def _check_wrong_kv(fault: FaultSpec, cell: Cell, where: str) -> None:
    if fault.engine_role == "decode":
        raise SpecError(
            problem="fault wrong_kv at the decode engine: kv_values compares what the prefill engine holds",
            where=where,
            mend="role: prefill",
        )
    if "kv_values" not in cell.checks and fault.expect is None:
        raise SpecError(
            problem="fault wrong_kv is named by check kv_values, which this cell does not have",
            where=where,
            mend="checks: [tokens, kv_bytes, kv_values], or say what to `expect`",
        )


def _check_wrong_drafts(fault: FaultSpec, cell: Cell, where: str) -> None:
    assert cell.decode is not None, "aggregated cells were refused"
    drafts = cell.decode.speculative
    if fault.role == "prefill":
        raise SpecError(
            problem="fault wrong_drafts at the prefill engine: drafts are made where a request decodes",
            where=where,
            mend="role: decode, or leave it out",
        )
    if drafts is None or drafts.method == "ngram":
        raise SpecError(
            problem="fault wrong_drafts: the decode engine has no drafter that keeps KV",
            where=where,
            mend=f"speculative: {{method: {' or '.join(METHODS[1:])}}}",
        )
    if "drafts" not in cell.checks and fault.expect is None:
        raise SpecError(
            problem="fault wrong_drafts is named by check drafts, which this cell does not have",
            where=where,
            mend="checks: [tokens, kv_bytes, drafts], or say what to `expect`",
        )


def check_fits_model(cell: Cell, config: DecoderConfig, loaded: LoadedSpec) -> None:
    """Refuse a fault or check that the model has no place for. Raises SpecError."""
    for fault in cell.faults:
        if fault.point == "wrong_layer" and _num_draft_layers(cell, config) == 1:
            raise SpecError(
                problem="fault wrong_drafts at wrong_layer: the drafter has one layer",
                where=loaded.where("faults"),
                mend="point: not_moved or shifted",
            )
        if fault.kind == "wrong_kv":
            refused = _no_place(fault, config) or _other_stage(fault, cell, config)
            refused = refused or _one_slot(fault, cell, config)
            problem, mend = refused or _not_judged(fault, cell, config) or ("", "")
            if problem:
                raise SpecError(
                    problem=f"fault wrong_kv at {fault.point}: {problem}",
                    where=loaded.where("faults"),
                    mend=mend,
                )
    if "tokens" in cell.checks and config.is_routed and cell.prefill.dtype != "float32":
        raise SpecError(
            problem=f"check tokens of a model that routes experts, in {cell.prefill.dtype}: rounding flips "
            "routes, and no tolerance tells that from an error",
            where=loaded.where("checks"),
            mend="checks: [logprobs, kv_bytes], or dtype: float32",
        )


def _num_draft_layers(cell: Cell, config: DecoderConfig) -> int:
    drafter = None if cell.decode is None else find_drafter(cell.decode, config)
    return 0 if drafter is None else drafter.decoder.num_layers


def fitting_points(config: DecoderConfig, layer: int) -> tuple[str, ...]:
    """List points of wrong_kv that a layer of the model has."""
    own = config.layers[layer]
    points: list[str] = []
    if "attention" in own.parts:
        points += ["k_norm"] if config.qk_norm and "attention" in own.mixers else []
        points += ["rope"] if own.rope is not None else []
        points += ["store_kv"]
    if "state" in own.parts:
        spec = kv_cache_specs(config, block_size=1, dtype=config.dtype)[layer, "state"]
        points += [p for p in STATE_POINTS if p != "swap_taps" or twin_taps(spec.fields()) is not None]
    return tuple(points)


def _no_place(fault: FaultSpec, config: DecoderConfig) -> tuple[str, str] | None:
    """Return (what the model lacks, how to mend it), or None."""
    layer, point = fault.layer or 0, fault.point or ""
    layers = [i for i in range(config.num_layers) if point in fitting_points(config, i)]
    if layer in layers:
        return None
    if layer >= config.num_layers:
        problem = f"there is no layer {layer}: the model has layers 0 to {config.num_layers - 1}"
        return problem, _mend((), layers)
    own = config.layers[layer]
    if point in STATE_POINTS and "state" in own.parts:
        lacks = f"{'+'.join(own.mixers)} keeps no taps of B and C, nor of q and k"
    elif point in STATE_POINTS:
        lacks = f"layer {layer} of {config.num_layers} keeps no state"
    elif "attention" not in own.parts:
        lacks = f"layer {layer} of {config.num_layers} keeps no keys and values"
    elif "attention" not in own.mixers:
        lacks = f"layer {layer} keeps latents, whose keys are not normed"
    elif point == "k_norm":
        lacks = f"{config.architecture} does not norm its keys"
    else:
        lacks = f"layer {layer} has no positions"
    return lacks, _mend(fitting_points(config, layer), layers)


def _other_stage(fault: FaultSpec, cell: Cell, config: DecoderConfig) -> tuple[str, str] | None:
    """Judge as `_no_place` a fault in a layer of another pipeline stage than its rank's."""
    engine, layer = cell.prefill, fault.layer or 0
    rank = engine.num_ranks - 1 if fault.rank is None else fault.rank
    shape = engine_shape(engine, config.num_layers)
    layers = {r: shape.share(r).layers for r in range(engine.num_ranks)}
    able = [str(r) for r, own in layers.items() if own is None or layer in own]
    if str(rank) in able:
        return None
    return f"rank {rank} has no layer {layer}, which is of another stage", f"rank: {', '.join(able)}"


def _one_slot(fault: FaultSpec, cell: Cell, config: DecoderConfig) -> tuple[str, str] | None:
    """Judge as `_no_place` a fault that moves tokens within kernel blocks of one token."""
    engine, key = cell.prefill, (fault.layer or 0, "attention")
    if fault.point != "store_kv":
        return None
    groups = engine_groups(engine, config)
    by_kind, chunks = dict(engine.kernel_block_sizes), group_chunks(groups, config)
    sizes = kernel_block_sizes(groups, engine.kernel_block_size, by_kind, chunks, engine.dcp)
    if min(size for g, size in zip(groups, sizes, strict=True) if key in g.keys) > 1:
        return None
    return (
        f"it moves tokens within a kernel block, which has one slot in the group of layer {key[0]}",
        "block_size: 16, with kernel blocks of more than one token; where chunks do not begin with such, "
        "another layer",
    )


def _not_judged(fault: FaultSpec, cell: Cell, config: DecoderConfig) -> tuple[str, str] | None:
    """Judge as `_no_place` a fault in a state that check kv_values lets pass whatever it holds."""
    layer, dtype = fault.layer or 0, cell.prefill.dtype
    if fault.point not in STATE_POINTS or fault.expect is not None or dtype == "float32":
        return None
    if not config.is_behind_experts(layer):
        return None
    judged = [
        i
        for i in range(config.num_layers)
        if fault.point in fitting_points(config, i) and not config.is_behind_experts(i)
    ]
    return (
        f"kv_values does not judge the state of layer {layer} in {dtype}: it follows routed experts",
        "dtype: float32" + (f", or {_mend((), judged)}" if judged else ""),
    )


def _mend(points: Sequence[str], layers: Sequence[int]) -> str:
    """What to write instead: a point of the same layer, or a layer that has the point."""
    parts = []
    if points:
        parts.append(f"point: {', '.join(points)}")
    if layers:
        more = ["..."] if len(layers) > MAX_LISTED else []
        parts.append(f"layer: {', '.join([*map(str, layers[:MAX_LISTED]), *more])}")
    return "; or ".join(parts) or "another point, or another model"
