"""Compute `rayk explain` from configs, geometry and the transfer plan, free of torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rayk.explain.places import counted, find_coordinate, name_byte
from rayk.explain.reads import (
    FormatChange,
    Read,
    Transfer,
    Units,
    explain_conversion,
    explain_reads,
    explain_transfer,
    units_of,
)
from rayk.kv.formats import engine_format
from rayk.kv.geometry import RankGeometry
from rayk.kv.groups import measure_waste, waste_tokens, wasted_bytes
from rayk.kv.riders import Riders
from rayk.kv.specs import page_bytes
from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import find_drafter
from rayk.models.drafters.draft_kv import draft_kv_costs, draft_kv_of
from rayk.models.drafters.riders import engine_riders
from rayk.models.engine_plan import EnginePlan, plan_engine
from rayk.models.families import read_config
from rayk.models.formats import DEQUANTISED
from rayk.models.hub import config_file
from rayk.models.kv_specs import group_chunks
from rayk.models.tensor_parallel import why_shape_unsupported
from rayk.parallel.shard import TokenShard
from rayk.specs import Cell, expand, load_spec
from rayk.specs.checks import check_cell
from rayk.specs.load import with_pinned_drafters
from rayk.transfer.costs import transfer_costs
from rayk.transfer.drafts import left_out
from rayk.types.config import EngineConfig, parallel_text
from rayk.types.errors import SpecError, TransferError, UserError
from rayk.types.speculative import SpeculativeConfig

DEFAULT_TOKENS = 1024
NO_RIDERS: Mapping[str, Riders] = MappingProxyType({})
FP8_IS = {
    "auto": "fp8 is kept where a GPU multiplies it and no check compares values",
    "kept": "fp8 is kept, but for the matrices that docs/gpu.md names",
    "dequantised": "fp8 too",
}
"""`engine.weights` -> what becomes of weights in fp8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """Layers of a KV group that do not see every earlier position, whatever the group keeps."""

    layers: tuple[int, ...]
    window: int | None  # the last so many positions are seen, the token's own counted
    chunk: int | None  # seen from the start of the run of so many positions that holds the token


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    kind: str
    layers: tuple[int, ...]
    num_positions: int
    block_size: int  # tokens, after growing towards the largest page
    readers: tuple[int, ...]  # layers that keep nothing and use the pages of one of `layers`
    chunks: tuple[int, ...]  # chunk sizes of its layers, in positions; kernel blocks divide them
    sights: tuple[Sight, ...]  # for its windowed and chunked layers
    covers_request: bool  # whether a block covers all of the model's positions: a request then has one
    rows: int  # a block's tokens, or 1 for a state
    kernel_block_size: int  # rows
    page_bytes: int  # one layer's of a block, before tensor parallelism
    wasted_bytes_per_block: int  # bytes of a block that no layer uses, before tensor parallelism
    # by rank: bytes of its block that no layer uses there, other groups' replicas included
    unused_bytes_per_block: tuple[int, ...]
    units: tuple[tuple[Units, ...], ...]  # by rank
    rank_layers: tuple[tuple[int, ...], ...]  # by rank, those of `layers` that it keeps
    tokens: tuple[TokenShard, ...]  # by rank, whose rows it keeps
    rides: int | None = None  # the group whose blocks these layers of a drafter share
    draft_layers: tuple[int, ...] = ()  # which of the drafter's layers they are


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    tp: int
    pp: int
    dcp: int
    num_ranks: int
    parallel: str  # all of these in words
    layout: str
    block_bytes: int  # one block over all layers on one rank (the largest)
    buffer_bytes: int  # a rank's whole buffer (the largest)
    kv_waste_bytes: int  # for `waste_tokens` tokens, before tensor parallelism
    kv_waste_percent: float
    waste_tokens: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """A layer that keeps and sends nothing."""

    layer: int
    uses: int  # the layer whose pages it uses


@dataclass(frozen=True, kw_only=True, slots=True)
class FastPrefill:
    """Says what `fast_prefill` changes for a prompt of `num_tokens` whose last token alone needs logits. A
    token-layer is one layer's computation of one token."""

    layers: tuple[int, ...]  # the trailing sharing layers: they compute only tokens whose logits are wanted
    sides: tuple[str, ...]  # engines that were asked for it
    num_token_layers: int  # with it
    num_token_layers_without: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The answer. Where it is not supported, `reason` says why and the rest is empty."""

    supported: bool
    reason: str
    model: str  # its folder's name
    engines: Mapping[str, str]  # side -> what was asked for, in words
    num_tokens: int  # as asked for, or as many as fit
    bytes: int = 0
    num_descriptors: int = 0
    reads: tuple[Read, ...] = ()
    transfer: Transfer | None = None
    conversion: FormatChange | None = None  # None where both sides keep one format
    left_out: tuple[str, ...] = ()  # draft layers of either side that do not move, and why
    sharing: tuple[Sharing, ...] = ()
    fast_prefill: FastPrefill | None = None
    notes: tuple[str, ...] = ()  # sentences on numbers that may surprise
    sides: Mapping[str, Side] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain_pair(
    model: str,
    settings: Mapping[str, Any],
    *,
    num_tokens: int | None = None,
    riders: Mapping[str, Riders] = NO_RIDERS,
) -> Explanation:
    """Explain the engines that `settings` (a spec's mapping) describes. `riders`: what the drafter of a side
    keeps, if not what its settings name. What is not possible is an answer; bad input raises UserError."""
    name, file = config_file(model)
    config = read_config(file)
    cell, refused = _cell(model, settings, config)
    assert cell.decode is not None
    about: dict[str, Any] = {"model": _name(file.resolve()) if name == model else name}
    about["engines"] = {"prefill": _engine_text(cell.prefill), "decode": _engine_text(cell.decode)}
    intended = num_tokens or min(DEFAULT_TOKENS, config.max_positions)
    if refused:
        return Explanation(supported=False, reason=refused, num_tokens=intended, **about)
    producer = _planned(cell.prefill, config, riders.get("prefill"))
    consumer = _planned(cell.decode, config, riders.get("decode"))
    tokens = _num_tokens(num_tokens, config, producer, consumer)
    notes = _weights_note(config, {"prefill": cell.prefill, "decode": cell.decode})
    if num_tokens is None:
        notes += _length_note(tokens, config, producer)
    notes += _dtype_note(cell.prefill, config)
    notes += _drafts_note({"prefill": cell.prefill, "decode": cell.decode})
    out = left_out(producer.ranks[0], consumer.ranks[0])
    notes += _draft_kv_note(cell.decode, config, tokens) if out else []
    try:
        reads = explain_reads(producer, consumer, tokens, cell.spec.transfer)
    except TransferError as error:
        return Explanation(supported=False, reason=error.reason, num_tokens=tokens, **about)
    return Explanation(
        supported=True,
        reason="",
        num_tokens=tokens,
        bytes=sum(r.bytes for r in reads),
        num_descriptors=sum(r.num_descriptors for r in reads),
        reads=tuple(reads),
        transfer=explain_transfer(producer, consumer, cell.spec.transfer),
        conversion=explain_conversion(producer, consumer, reads, tokens),
        left_out=tuple(out.values()),
        sharing=tuple(Sharing(layer=n, uses=source) for n, source in _sources(config).items()),
        fast_prefill=_fast_prefill(cell, config, tokens),
        notes=(*notes, *_border_notes(consumer, config, tokens)),
        sides={"prefill": _side(producer, config), "decode": _side(consumer, config)},
        **about,
    )


def _engine_text(engine: EngineConfig) -> str:
    """Name an engine, e.g. `TP 2`, with the layout and KV format if they were asked for."""
    texts = [engine.parallel_text]
    texts += [engine.layout] if engine.layout != "auto" else []
    texts += [engine_format("", engine.kv_dtype, engine.kv_scales)] if engine.kv_dtype != "auto" else []
    return ", ".join(texts)


def locate(
    model: str, settings: Mapping[str, Any], *, side: str, rank: int, byte: int | None, find: str | None
) -> list[dict[str, Any]]:
    """Find the coordinates of a byte of a rank's buffer, or the bytes of a coordinate. Raises UserError."""
    config = read_config(config_file(model)[1])
    cell, refused = _cell(model, settings, config)
    if refused:
        raise UserError(problem=refused)
    engines = {"prefill": cell.prefill, "decode": cell.decode}
    engine = engines.get(side)
    if engine is None:
        raise UserError(problem=f"no side {side!r}", where="--side", mend="prefill or decode")
    if rank >= engine.num_ranks:
        raise UserError(problem=f"rank {rank} of a {side} engine of {engine.parallel_text}", where="--rank")
    ranks = _planned(engine, config, None).ranks
    geometry = ranks[rank]
    if find is not None:
        return find_coordinate(ranks, rank, find, _sources(config))
    assert byte is not None
    if byte >= geometry.buffer_bytes:
        raise UserError(
            problem=f"byte {byte} is past the buffer's {geometry.buffer_bytes} bytes", where="--byte"
        )
    return name_byte(geometry, byte, _sources(config))


def _planned(engine: EngineConfig, config: DecoderConfig, riders: Riders | None) -> EnginePlan:
    """Plan an engine, with these riders, or else those of its drafter."""
    drafts = engine.speculative
    draft_tp = 1 if drafts is None else drafts.tp or 1
    return plan_engine(engine, config, riders=riders or engine_riders(engine, config), draft_tp=draft_tp)


def _sources(config: DecoderConfig) -> dict[int, int]:
    """Map each layer that keeps nothing to the one whose pages it uses."""
    return {n: s for n in config.sharing_layers if (s := config.layers[n].kv_source) is not None}


def _name(model: Path) -> str:
    return (model if model.is_dir() else model.parent).name


def _cell(model: str, settings: Mapping[str, Any], config: DecoderConfig) -> tuple[Cell, str]:
    """Plan the one cell, and say why it is refused ("" when it is not)."""
    loaded = load_spec(
        {"model": model, "prompts": {"random": {}}, "checks": ["kv_bytes"], **settings}, source="options"
    )
    loaded = with_pinned_drafters(loaded)
    (cell,) = expand(loaded.spec, config, device="cpu")
    try:
        check_cell(cell, config, loaded)
    except SpecError as error:
        if not error.problem.startswith("not supported yet"):
            raise  # nonsense, which no version will do
        return cell, error.problem
    return cell, cell.unsupported or _why_not_computed(cell, config)


def _why_not_computed(cell: Cell, config: DecoderConfig) -> str:
    """Say what `rayk run` refuses of an engine that divides tokens or layers, and what would do."""
    for side, engine in (("prefill", cell.prefill), ("decode", cell.decode)):
        why = None if engine is None else why_shape_unsupported(config, engine)
        if why is not None:
            return f"{side}: {why}"
    return ""


def _fast_prefill(cell: Cell, config: DecoderConfig, num_tokens: int) -> FastPrefill:
    layers = tuple(config.fast_prefill_layers)
    engines = {"prefill": cell.prefill, "decode": cell.decode}
    return FastPrefill(
        layers=layers,
        sides=tuple(side for side, engine in engines.items() if engine and engine.fast_prefill),
        num_token_layers=num_tokens * (config.num_layers - len(layers)) + len(layers),
        num_token_layers_without=num_tokens * config.num_layers,
    )


def _weights_note(config: DecoderConfig, engines: Mapping[str, EngineConfig]) -> list[str]:
    if config.quantisation is None:
        return []
    texts = {FP8_IS[engine.weights] for engine in engines.values()}
    if len(texts) > 1:
        texts = {"; ".join(f"{side}: {FP8_IS[engine.weights]}" for side, engine in engines.items())}
    return [
        f"the weights are stored as {config.quantisation.text}, and dequantised in {DEQUANTISED} while they "
        f"are loaded, then rounded to the engine's dtype ({texts.pop()}: engine.weights); KV is as for others"
    ]


def _length_note(num_tokens: int, config: DecoderConfig, producer: EnginePlan) -> list[str]:
    if num_tokens == DEFAULT_TOKENS:
        return []
    why = f"the model has {config.max_positions:,} positions"
    if num_tokens < config.max_positions:
        num_blocks = producer.num_blocks
        why = f"--num-blocks {num_blocks:,} hold no more, if every KV group keeps all of a sequence"
    return [f"{num_tokens:,} tokens instead of the default {DEFAULT_TOKENS:,}: {why}"]


def _dtype_note(engine: EngineConfig, config: DecoderConfig) -> list[str]:
    if engine.kv_dtype != "auto" or engine.dtype == config.dtype:
        return []
    return [f"KV counts in {engine.dtype}, and the model is in {config.dtype}: --dtype auto counts in that"]


def _drafts_note(engines: Mapping[str, EngineConfig]) -> list[str]:
    """Say who proposes tokens, and what of it moves."""
    drafting = {
        side: drafts for side, engine in engines.items() if (drafts := engine.speculative) is not None
    }
    alike = len(drafting) == len(engines) and len(set(drafting.values())) == 1
    whose = {"both engines": next(iter(drafting.values()))} if alike else drafting
    return [
        f"{side}: up to {drafts.num_tokens} tokens are proposed at once, {_source_of(drafts)}"
        for side, drafts in whose.items()
    ]


def _draft_kv_note(engine: EngineConfig, config: DecoderConfig, num_tokens: int) -> list[str]:
    """Say how a decode engine's drafter gets its KV of a prompt that comes without, and at what cost."""
    drafter = find_drafter(engine, config)
    if drafter is None:
        return []
    assert engine.speculative is not None
    costs = draft_kv_costs(drafter, config, engine.dtype, num_tokens)
    how = draft_kv_of(engine.speculative, drafter, config, engine.dtype)
    does = {
        "recompute": "it computes them from the tokens (draft_kv: recompute), and proposes from then on",
        "none": "requests that were handed over are not drafted for (draft_kv: none)",
    }
    if costs.hidden_bytes:
        moved_ns = transfer_costs("nixl/UCX", engine.device).move_ns(1, 1, costs.hidden_bytes)
        hidden = (
            f"{costs.hidden_bytes:,} bytes of hidden states (about {moved_ns / 1e6:,.2f} ms by the costs of "
            "transfers as coded), which do not travel yet"
        )
    else:
        hidden = "no hidden states, of which a smaller model takes none"
    return [
        f"decode: the drafter's rows of {num_tokens:,} tokens do not come over: {does[how]}. To compute them "
        f"takes {costs.recompute_flops / 1e9:,.3g} GFLOP, where the model's own prefill took "
        f"{costs.model_flops / 1e9:,.3g}; to have them otherwise, {hidden}"
    ]


def _source_of(drafts: SpeculativeConfig) -> str:
    if drafts.method == "ngram":
        return (
            f"what followed the last {drafts.prompt_lookup_max} to {drafts.prompt_lookup_min} tokens earlier "
            "in the request (ngram): that keeps no KV, and hands nothing over"
        )
    whose = "" if drafts.model is None else f" of {drafts.model}"
    return (
        f"by a drafter on the ranks ({drafts.method}{whose}): its layers keep KV beside the model's, handed "
        "over between engines with the same drafter"
    )


def _border_notes(consumer: EnginePlan, config: DecoderConfig, num_tokens: int) -> list[str]:
    """Say why 0 bytes of some groups are read."""
    groups = [g for g in consumer.groups if not g.spec.live_rows(num_tokens)]
    alike: dict[int, list[int]] = defaultdict(list)
    for group, chunks in zip(groups, group_chunks(groups, config), strict=True):
        for chunk in chunks:
            alike[chunk].append(group.index)
    return [
        f"0 bytes of {counted('KV group', indices)}: after {num_tokens:,} tokens the next one begins a chunk "
        f"of {chunk:,} positions, and sees nothing before it"
        for chunk, indices in alike.items()
    ]


def _num_tokens(asked: int | None, config: DecoderConfig, producer: EnginePlan, consumer: EnginePlan) -> int:
    """Choose the sequence's tokens: as asked, else as many as fit up to 1024."""
    plans = {"prefill": producer, "decode": consumer}
    capacity = {side: _capacity_tokens(plan) for side, plan in plans.items()}
    if asked is None:
        return min(DEFAULT_TOKENS, config.max_positions, *capacity.values())
    problem = mend = ""
    num_blocks = producer.num_blocks
    most = min(config.max_positions, *capacity.values())
    if asked > config.max_positions:
        problem = f"at most {config.positions_text}"
        mend = f"--num-tokens {config.max_positions} or fewer"
        if most < config.max_positions:
            mend = f"--num-tokens {most} or fewer, which is what --num-blocks {num_blocks} hold"
    elif asked > most:
        small = [f"the {side} pool holds {tokens}" for side, tokens in capacity.items() if asked > tokens]
        blocks = 1 + max(_num_blocks(plan.ranks[0], asked) for plan in plans.values())
        problem = f"{' and '.join(small)} in --num-blocks {num_blocks}"
        mend = f"--num-blocks {blocks} or more, or --num-tokens {most} or fewer"
    if problem:
        raise UserError(problem=f"{asked} tokens: {problem}", where="--num-tokens", mend=mend)
    return asked


def _num_blocks(rank: RankGeometry, num_tokens: int) -> int:
    """Count blocks of a sequence if every group kept all of it."""
    return sum(-(-num_tokens // g.block_size) for g in rank.groups if g.group.rides is None)


def _capacity_tokens(plan: EnginePlan) -> int:
    """Count tokens of one sequence that fit if every group kept all of them (block 0 is the null block)."""
    rank, num_blocks = plan.ranks[0], plan.num_blocks
    most = (num_blocks - 1) * max(g.block_size for g in rank.groups)
    return bisect_right(range(most + 1), num_blocks - 1, key=partial(_num_blocks, rank)) - 1


def _side(plan: EnginePlan, config: DecoderConfig) -> Side:
    ranks, shape = plan.ranks, plan.ranks[0].shape
    num_tokens = waste_tokens(config.max_positions)
    waste = measure_waste(plan.groups, num_tokens)
    return Side(
        tp=shape.tp,
        pp=shape.pp,
        dcp=shape.dcp,
        num_ranks=shape.num_ranks,
        parallel=parallel_text(shape.tp, shape.dcp, shape.dcp_interleave, shape.pp),
        layout=plan.resolution.layout.name,
        block_bytes=max(r.block_bytes for r in ranks),
        buffer_bytes=max(r.buffer_bytes for r in ranks),
        kv_waste_bytes=waste.bytes,
        kv_waste_percent=waste.percent,
        waste_tokens=num_tokens,
        groups=tuple(_group(ranks, i, wasted, config) for i, wasted in enumerate(wasted_bytes(plan.groups))),
    )


def _group(ranks: Sequence[RankGeometry], index: int, wasted: int, config: DecoderConfig) -> Group:
    shares = [rank.groups[index] for rank in ranks]
    first = shares[0]
    has_rows, is_draft = first.group.spec.has_token_rows, first.group.rides is not None
    sources = _sources(config).items() if has_rows else ()
    (chunks,) = group_chunks([first.group], config)
    return Group(
        kind=first.group.spec.kind,
        layers=first.group.layers,
        readers=tuple(n for n, source in sources if source in first.group.layers),
        chunks=chunks,
        sights=_sights(first.group.layers, config) if has_rows and not is_draft else (),
        num_positions=first.group.num_positions,
        block_size=first.block_size,
        covers_request=first.block_size >= config.max_positions,
        rows=first.rows,
        kernel_block_size=first.kernel_block_size,
        page_bytes=page_bytes(first.group.spec),
        wasted_bytes_per_block=wasted,
        unused_bytes_per_block=tuple(
            rank.region_of(index).block_bytes - len(share.layers) * share.page_bytes
            for rank, share in zip(ranks, shares, strict=True)
        ),
        units=tuple(units_of(share, {f.field.name: f.units for f in share.fields}) for share in shares),
        rank_layers=tuple(share.layers for share in shares),
        tokens=tuple(share.tokens for share in shares),
        rides=first.group.rides,
        draft_layers=tuple(n - first.group.first_draft for n in first.group.layers) if is_draft else (),
    )


def _sights(layers: Sequence[int], config: DecoderConfig) -> tuple[Sight, ...]:
    alike: dict[tuple[int | None, int | None], list[int]] = defaultdict(list)
    for n in layers:
        alike[config.layers[n].window, config.layers[n].chunk].append(n)
    alike.pop((None, None), None)
    return tuple(Sight(layers=tuple(ns), window=window, chunk=chunk) for (window, chunk), ns in alike.items())
