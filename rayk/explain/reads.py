"""Describe the reads of `rayk explain`: what each moves, and what the cost model expects. Free of torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.models.engine_plan import EnginePlan
from rayk.specs.experiment import TransferSpec
from rayk.transfer.costs import Option, choose_staged, transfer_costs
from rayk.transfer.extents import make_extents
from rayk.transfer.options import choose_layers, kept_layers, read_option
from rayk.transfer.plan import BlockReads, consecutive_tables, plan_pushes, plan_transfer
from rayk.transfer.wire_geometry import needs_conversion, wire_geometry

COSTS = transfer_costs("nixl/UCX", "cpu")
COSTS_OF = "NIXL between CPU processes of one host"
LAYER_NS = tuple(1 << n for n in range(10, 28))  # what a layer may take to compute: 1 us to 134 ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """Fields that have the same global units."""

    unit_name: str  # heads, groups, ...
    fields: tuple[str, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Describes what one consumer rank reads from one producer rank for one KV group."""

    producer_rank: int
    consumer_rank: int
    group: int
    kind: str  # of the group's layers (KVCacheSpec.kind)
    layers: tuple[int, ...]
    units: tuple[Units, ...]
    bytes: int
    num_descriptors: int
    num_descriptors_merged: int  # left when consecutive blocks of dense runs are read as one
    direct_us: float  # what the cost model expects, blocks straight into pages
    staged_us: float | None  # through the staging buffer; None for pushes and where it cannot be
    way: str  # what would be chosen: direct, staged, or mixed; a push: direct


@dataclass(frozen=True, kw_only=True, slots=True)
class PushLayers:
    """Layers per write where computing a layer takes at least this long, until the next entry."""

    from_layer_us: float
    layers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    mode: str  # pull or push
    staging: str  # auto, never or always; of pulls only
    costs: str  # what the expected times assume
    push_layers: tuple[PushLayers, ...]  # for a push, by the producer rank with fewest; a pull has none


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatChange:
    """Says that the consumer converts what arrives into another format."""

    producer_formats: tuple[str, ...]
    consumer_formats: tuple[str, ...]
    wire_bytes: int  # of converted rows, in the producer's format
    kept_bytes: int  # of the same rows, in the consumer's format


def _landing(producer: RankGeometry, consumer: RankGeometry) -> RankGeometry:
    """Find where a consumer rank's rows arrive: its own cache, or what is converted from."""
    if not needs_conversion(producer, consumer):
        return consumer
    return wire_geometry(producer, consumer, producer.num_blocks)


def explain_reads(
    producer: EnginePlan, consumer: EnginePlan, num_tokens: int, transfer: TransferSpec
) -> list[Read]:
    """List all reads of a sequence of consecutive blocks. Raises TransferError where a read must be staged
    and may not be."""
    reads = []
    source_tables = consecutive_tables(producer.ranks[0], num_tokens)
    for rank in (_landing(producer.ranks[0], r) for r in consumer.ranks):
        plan = plan_transfer(producer.ranks, rank)
        parts = list(plan.lower(num_tokens, source_tables, consecutive_tables(rank, num_tokens)))
        options = [_option(part, transfer) for part in parts]
        is_staged = [False] * len(parts)
        if transfer.mode == "pull":
            is_staged = choose_staged(transfer.staging, options)
        sums: dict[tuple[int, ...], list[tuple[BlockReads, Option, bool]]] = defaultdict(list)
        for part, option, staged in zip(parts, options, is_staged, strict=True):
            sums[part.producer_rank, part.source_group, part.group].append((part, option, staged))
        for read in plan.reads:
            found = sums[read.producer_rank, read.source_group, read.group]
            staged_ns = [option.staged_ns for _, option, _ in found if option.staged_ns is not None]
            ways = {staged for _, _, staged in found}
            reads.append(
                Read(
                    producer_rank=read.producer_rank,
                    consumer_rank=rank.rank,
                    group=read.group,
                    kind=rank.groups[read.group].group.spec.kind,
                    layers=read.layers,
                    units=units_of(rank.groups[read.group], read.units),
                    bytes=sum(part.num_bytes for part, _, _ in found),
                    num_descriptors=sum(part.num_descriptors for part, _, _ in found),
                    num_descriptors_merged=sum(part.num_coalesced for part, _, _ in found),
                    direct_us=sum(option.direct_ns for _, option, _ in found) / 1e3,
                    staged_us=sum(staged_ns) / 1e3 if found and len(staged_ns) == len(found) else None,
                    way="mixed" if len(ways) > 1 else "staged" if True in ways else "direct",
                )
            )
    return reads


def _option(read: BlockReads, transfer: TransferSpec) -> Option:
    num_bytes = transfer.staging_mib << 20
    extents = make_extents(read.pattern, COSTS.gap_bytes, num_bytes) if transfer.mode == "pull" else None
    return read_option(read, extents or (), COSTS, num_bytes)


def explain_transfer(producer: EnginePlan, consumer: EnginePlan, transfer: TransferSpec) -> Transfer:
    return Transfer(
        mode=transfer.mode,
        staging=transfer.staging,
        costs=COSTS_OF,
        push_layers=_push_layers(producer, consumer, transfer) if transfer.mode == "push" else (),
    )


def _push_layers(
    producer: EnginePlan, consumer: EnginePlan, transfer: TransferSpec
) -> tuple[PushLayers, ...]:
    most = max(len(kept_layers(rank)) for rank in producer.ranks)
    if transfer.push_layers != "auto":
        return (PushLayers(from_layer_us=0.0, layers=min(transfer.push_layers, most)),)
    landing = [_landing(producer.ranks[0], rank) for rank in consumer.ranks]
    plans = [(rank, plan_pushes(rank, producer.ranks, landing)) for rank in producer.ranks]
    found: list[PushLayers] = []
    for layer_ns in (0, *LAYER_NS):
        layers = min(choose_layers(COSTS, rank, plan, layer_ns) for rank, plan in plans if plan)
        if not found or found[-1].layers != layers:
            found.append(PushLayers(from_layer_us=layer_ns / 1e3, layers=layers))
    return tuple(found)


def explain_conversion(
    producer: EnginePlan, consumer: EnginePlan, reads: Sequence[Read], num_tokens: int
) -> FormatChange | None:
    if not needs_conversion(producer.ranks[0], consumer.ranks[0]):
        return None
    landing = _landing(producer.ranks[0], consumer.ranks[0])
    converted = [g.group.spec.has_token_rows for g in landing.groups]
    kept = 0
    for rank in consumer.ranks:
        tables = consecutive_tables(rank, num_tokens)
        own = plan_transfer(consumer.ranks, rank).lower(num_tokens, tables, tables)
        kept += sum(r.num_bytes for r in own if rank.groups[r.group].group.spec.has_token_rows)
    return FormatChange(
        producer_formats=_formats(producer),
        consumer_formats=_formats(consumer),
        wire_bytes=sum(read.bytes for read in reads if converted[read.group]),
        kept_bytes=kept,
    )


def _formats(plan: EnginePlan) -> tuple[str, ...]:
    """List the formats of token rows, in the order of groups."""
    specs = [g.group.spec for g in plan.ranks[0].groups]
    return tuple(dict.fromkeys(spec.dtype for spec in specs if spec.has_token_rows))


def units_of(group: GroupGeometry, by_field: Mapping[str, tuple[int, ...]]) -> tuple[Units, ...]:
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for f in group.fields:
        if f.field.name in by_field:
            alike.setdefault((f.field.unit_name, by_field[f.field.name]), []).append(f.field.name)
    return tuple(
        Units(unit_name=name, fields=tuple(fields), ids=ids) for (name, ids), fields in alike.items()
    )
