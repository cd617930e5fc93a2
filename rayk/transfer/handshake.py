"""What each rank tells about its cache, and the field-by-field check before the first byte moves.

TP size, layout, block size, number of blocks and which layers share a group may differ between the sides: the
plan bridges them. Everything that gives a layer's bytes their meaning must agree, or be convertible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from rayk.kv.caches import CanonicalKVCaches
from rayk.kv.fields import PageField
from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import KVCacheSpec
from rayk.parallel.shard import WHOLE, EngineShape, Ranges, Stripe, TokenShard
from rayk.transfer.agent import TransferAgent
from rayk.transfer.drafts import left_out
from rayk.transfer.meaning import Facts, differences, kept_as, meaning
from rayk.transfer.token_classes import ONE_CLASS, TokenClasses
from rayk.types.errors import HandshakeMismatch

PROTOCOL_VERSION = 5
DIGEST_VERSION = 3
ROWS_PER_GROUP = 256
"""Token rows that one digest word covers."""
MAX_BLOCK_ROWS = 1 << 20
"""Rows of a block: what is planned takes memory by the row."""
MAX_RANKS = 1 << 12
"""Ranks of an engine: every one is listed."""
MAX_READERS = 1 << 16
"""Readers of a field, such as query heads: which of its units a rank holds is told by reader."""
MAX_BLOCKS = 1 << 31
"""Descriptors are counted in int32."""


def row_group_blocks(groups: Sequence[KVCacheGroup]) -> int:
    """Tokens after which a row group ends, and a block of every group where tokens have rows: a prefix of so
    many is digested apart from what follows, and lies in blocks of its own."""
    return math.lcm(ROWS_PER_GROUP, *(g.spec.block_size for g in groups if g.spec.has_token_rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class CacheDescription:
    """One rank of one engine, as its peers need to know it. Picklable. Filled by `describe_cache`."""

    engine: str
    epoch: int
    """Counts the lives of the engine: a description of an earlier life is void."""
    geometry: RankGeometry
    fingerprint: Mapping[str, str]
    """models.fingerprint: one entry per fact that must agree."""
    device: str
    transport: str
    agent_name: str
    agent_metadata: bytes
    base_address: int
    """Address of the buffer's first byte in its own process."""
    kv_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Layer -> (k, v), what its quantised keys and values are multiplied by, beside the scales in pages."""
    protocol_version: int = PROTOCOL_VERSION
    digest_version: int = DIGEST_VERSION
    rows_per_group: int = ROWS_PER_GROUP
    token_classes: TokenClasses = ONE_CLASS
    """What all sides of the deployment divide tokens into: digests are laid out by it."""
    slot_tokens: tuple[TokenShard, ...] = ()
    """By KV group, the tokens that the rank's steps compute slots for, which should be the geometry's: when
    digests differ, what the rank takes its rows for. Empty: the geometry's."""

    @property
    def rank(self) -> int:
        """Rank within the engine."""
        return self.geometry.rank

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.geometry.num_ranks


def describe_cache(
    agent: TransferAgent,
    caches: CanonicalKVCaches,
    *,
    engine: str,
    epoch: int = 0,
    fingerprint: Mapping[str, str],
    kv_scales: Mapping[int, tuple[float, float]] | None = None,
    token_classes: TokenClasses = ONE_CLASS,
    slot_tokens: tuple[TokenShard, ...] = (),
) -> CacheDescription:
    """Register a rank's buffer with its agent (one region) and describe it. Call once per buffer."""
    address = agent.register(caches.buffer)
    return CacheDescription(
        engine=engine,
        epoch=epoch,
        geometry=caches.geometry,
        fingerprint=dict(fingerprint),
        kv_scales=dict(kv_scales or {}),
        token_classes=token_classes,
        slot_tokens=slot_tokens,
        device=_device_name(caches.buffer.device),
        transport=agent.transport,
        agent_name=agent.name,
        agent_metadata=agent.metadata(),
        base_address=address,
    )


def check(
    producer: CacheDescription,
    consumer: CacheDescription,
    can_convert: Callable[[KVCacheSpec, KVCacheSpec], bool] = lambda ours, theirs: False,
) -> None:
    """Raises HandshakeMismatch listing every field that differs.

    `can_convert(ours, theirs)`: whether rows as the producer keeps them can be made rows of the consumer's;
    asked only of layers whose formats differ.
    """
    differing = differences(_facts(producer), _facts(consumer))
    differing += _layer_differences(producer.geometry, consumer.geometry, can_convert)
    differing += _scale_differences(producer, consumer)
    # After the layers that come of them.
    differing += differences(_digest_facts(producer), _digest_facts(consumer))
    if differing:
        raise HandshakeMismatch(tuple(differing))


def check_sides(
    me: CacheDescription,
    producers: Sequence[CacheDescription],
    consumers: Sequence[CacheDescription],
    can_convert: Callable[[KVCacheSpec, KVCacheSpec], bool],
) -> None:
    """Two engines are whole, and `me`, a rank of either, agrees with all ranks of the other; see `check`.
    Raises HandshakeMismatch."""
    check_engine(producers)
    check_engine(consumers)
    for producer, consumer in itertools.product(producers, consumers):
        if me.agent_name in (producer.agent_name, consumer.agent_name):
            check(producer, consumer, can_convert)


def check_engine(descriptions: Sequence[CacheDescription]) -> None:
    """All ranks of one life of one engine are there, in order, and each tells of a cache that there can be.
    Raises HandshakeMismatch."""
    first = descriptions[0]
    for description in descriptions:
        impossible = list(_impossible(description.geometry)) or list(_impossible_slots(description))
        if impossible:
            where = f"of {description.engine} rank {description.rank}"
            raise HandshakeMismatch(tuple((f"{name} {where}", a, b) for name, a, b in impossible))
    wanted = [str(r) for r in range(first.num_ranks)]
    found = [str(d.rank) for d in descriptions]
    if found != wanted:
        raise HandshakeMismatch(((f"ranks of {first.engine}", ",".join(found), ",".join(wanted)),))
    for other in descriptions[1:]:
        named = [
            (f"{name} of {first.engine} rank {other.rank}", str(a), str(b))
            for name, a, b in (
                ("engine", first.engine, other.engine),
                ("epoch", first.epoch, other.epoch),
                ("num_blocks", first.geometry.num_blocks, other.geometry.num_blocks),
                ("num_pool_blocks", first.geometry.num_pool_blocks, other.geometry.num_pool_blocks),
                ("shape", first.geometry.shape, other.geometry.shape),
                ("tokens of blocks", _block_sizes(first.geometry), _block_sizes(other.geometry)),
            )
            if a != b
        ]
        if named:
            raise HandshakeMismatch(tuple(named))


def _impossible(rank: RankGeometry) -> Iterator[tuple[str, str, str]]:
    """Yield (name, found, allowed) of what would be planned with, or read outside of the rank's pages."""
    if not 2 <= rank.num_blocks <= MAX_BLOCKS:
        yield "num_blocks", str(rank.num_blocks), f"2 .. {MAX_BLOCKS}"
    num_scratch, most = rank.num_scratch_blocks, rank.num_blocks - 2
    if type(num_scratch) is not int or not 0 <= num_scratch <= most:
        yield "num_scratch_blocks", str(num_scratch), f"0 .. {most}"
    if not _is_shape(rank.shape):
        yield "shape", str(rank.shape), f"at most {MAX_RANKS} ranks, dcp of at most tp"
        return
    if type(rank.rank) is not int or not 0 <= rank.rank < rank.num_ranks:
        yield "rank", str(rank.rank), f"0 .. {rank.num_ranks - 1}"
        return
    if not _are_regions(rank):
        yield "regions", str(rank.regions), "the model's groups, then each that rides"
        return
    for index, group in enumerate(rank.groups):
        for name, found, allowed in _impossible_group(rank, group):
            yield f"{name} group {index}", found, allowed


def _are_regions(rank: RankGeometry) -> bool:
    """Tell whether groups that ride come last, on groups with tables, and regions have bytes of their own."""
    groups, end = [g.group for g in rank.groups], 0
    num_own = sum(g.rides is None for g in groups)
    parts = [range(num_own), *(range(i, i + 1) for i in range(num_own, len(groups)))]
    if [region.groups for region in rank.regions] != parts:
        return False
    for region in rank.regions:
        if not (type(region.offset) is type(region.block_bytes) is int and end <= region.offset):
            return False
        end = region.offset + rank.num_blocks * max(1, region.block_bytes)
    if any(g.rides is not None for g in groups[:num_own]):
        return False
    carriers = [groups[int(g.rides or 0)] for g in groups[num_own:] if g.rides in range(num_own)]
    sizes = [g.spec.block_size for g in groups[num_own:]]
    return [g.spec.block_size for g in carriers if g.spec.has_token_rows] == sizes


def _impossible_group(rank: RankGeometry, group: GroupGeometry) -> Iterator[tuple[str, str, str]]:
    """Yield the same of one group. What is asked first keeps small what is asked then."""
    stages, layers = rank.shape.stages, _layers_of(rank, group)
    if not 1 <= group.block_rows <= MAX_BLOCK_ROWS:
        yield "rows of a block in", str(group.block_rows), f"1 .. {MAX_BLOCK_ROWS}"
    elif stages and max(group.group.layers) >= sum(stages):
        yield "layers of", str(group.group.layers), f"those of stages {stages}"
    elif group.layers != layers:
        yield "layers of", str(group.layers), str(layers)
    elif not _is_share(rank, group):
        yield "tokens of", str(group.tokens), f"{rank.share.tokens}, or parts of whole blocks"
    elif group.kernel_block_size < 1 or group.rows % group.kernel_block_size:
        yield "rows of a kernel block in", str(group.kernel_block_size), f"parts of {group.rows}"
    elif unlike := list(_impossible_fields(rank, group)):
        yield from unlike
    else:
        last = len(group.layers) - 1, rank.num_blocks * group.kernel_blocks_per_block - 1
        for f in group.fields:
            end = f.address(*last, len(f.units) - 1, group.kernel_block_size - 1) + f.field.row_bytes
            strides = f.offset, f.layer_stride, f.block_stride, f.unit_stride, f.row_stride
            if min(strides) < 0 or end > rank.pages_bytes:
                yield f"end of {f.field.name} in", str(end), f"at most {rank.pages_bytes}"


def _impossible_fields(rank: RankGeometry, group: GroupGeometry) -> Iterator[tuple[str, str, str]]:
    """Yield the same of fields that are not the spec's, which alone is compared with the other side's, and of
    units that are not the rank's."""
    wanted, found = group.group.spec.fields(), [f.field for f in group.fields]
    if len(found) != len(wanted) or not all(field in wanted for field in found):
        yield "fields of", str(found), str(list(wanted))
        return
    for f in group.fields:
        is_draft = group.group.rides is not None
        units = _units_of(rank, f.field, is_draft=is_draft)
        if units is None:
            tp_size = rank.shape.draft_tp if is_draft else rank.tp_size
            allowed = f"at most {MAX_READERS}, that TP {tp_size} and {f.field.units} units divide"
            yield f"{f.field.reader_name} of {f.field.name} in", str(f.field.readers), allowed
        elif f.units != units:
            yield f"units of {f.field.name} in", str(f.units), str(units)


def _units_of(rank: RankGeometry, field: PageField, *, is_draft: bool) -> tuple[int, ...] | None:
    """List the units of a field that a rank holds; None where its engine cannot divide them."""
    is_bounded = 1 <= field.units <= field.readers <= MAX_READERS
    tp_size, tp_rank = rank.shape.unit_share(rank.tp_rank, is_draft=is_draft)
    if not is_bounded or field.readers % field.units or field.readers % tp_size:
        return None
    return field.shard(tp_size, tp_rank)


def _impossible_slots(rank: CacheDescription) -> Iterator[tuple[str, str, str]]:
    """Yield the same of the tokens of slots: they may be wrong, and are looked at then."""
    tokens, groups = rank.slot_tokens, rank.geometry.groups
    is_tuple = type(tokens) is tuple and len(tokens) in (0, len(groups))
    if not (is_tuple and all(_is_stripe(t) for t in tokens)):
        yield "tokens of slots", str(tokens), f"stripes of each of {len(groups)} groups"


def _is_stripe(tokens: TokenShard) -> bool:
    if not isinstance(tokens, Stripe):
        return False
    numbers = tokens.num_shards, tokens.index, tokens.interleave
    return all(type(n) is int for n in numbers) and 0 <= numbers[1] < numbers[0] and numbers[2] >= 1


def _is_shape(shape: EngineShape) -> bool:
    """Tell whether an engine can be divided like this: a class checks nothing of what comes pickled."""
    if not isinstance(shape, EngineShape) or type(shape.stages) is not tuple:
        return False
    numbers = shape.tp, shape.dcp, shape.dcp_interleave, shape.draft_tp, *shape.stages
    if not all(type(n) is int and 1 <= n <= MAX_BLOCK_ROWS for n in numbers):
        return False
    is_short = shape.dcp * shape.dcp_interleave <= MAX_BLOCK_ROWS
    is_divided = shape.dcp <= shape.tp and shape.tp % shape.draft_tp == 0
    return is_short and is_divided and shape.num_ranks <= MAX_RANKS


def _layers_of(rank: RankGeometry, group: GroupGeometry) -> tuple[int, ...]:
    """List the layers of a group that the rank's stage has."""
    stage = rank.share.layers
    return tuple(n for n in group.group.layers if stage is None or n in stage)


def _is_share(rank: RankGeometry, group: GroupGeometry) -> bool:
    """Tell whether a rank of its engine can hold these tokens of each block."""
    tokens = group.tokens
    if tokens == WHOLE:
        return True
    if not group.group.spec.has_token_rows:
        return False
    if isinstance(tokens, Ranges):
        if type(tokens.spans) is not tuple or not all(type(s) is tuple and len(s) == 2 for s in tokens.spans):
            return False
        ends = [0, *(end for span in tokens.spans for end in span), tokens.period]
        are_apart = all(type(end) is int for end in ends) and ends == sorted(ends)
        if not (are_apart and tokens.spans and all(start < stop for start, stop in tokens.spans)):
            return False
    elif tokens != rank.share.tokens:
        return False
    return group.block_size % tokens.period == 0


def _block_sizes(rank: RankGeometry) -> tuple[int, ...]:
    return tuple(g.block_size for g in rank.groups)


def _facts(description: CacheDescription) -> Facts:
    model = {f"model.{name}": value for name, value in description.fingerprint.items()}
    versions = {"protocol_version": str(description.protocol_version), "transport": description.transport}
    return versions | model


def _digest_facts(description: CacheDescription) -> Facts:
    return {
        "digest_version": str(description.digest_version),
        "rows_per_group": str(description.rows_per_group),
        "token_classes": str(description.token_classes.deals),
    }


def _layer_differences(
    producer: RankGeometry,
    consumer: RankGeometry,
    can_convert: Callable[[KVCacheSpec, KVCacheSpec], bool],
) -> list[tuple[str, str, str]]:
    """Return what differs between the caches of a layer, once for all layers where it is the same."""
    kept = [
        {(part, layer): g.group for g in side.groups for layer, part in g.group.keys}
        for side in (producer, consumer)
    ]
    found: dict[tuple[str, str, str, str], list[int]] = {}
    out = left_out(producer, consumer)
    for part, layer in sorted({*kept[0], *kept[1]}):
        if (layer, part) in out:
            continue
        ours, theirs = (side.get((part, layer)) for side in kept)
        if ours is None or theirs is None:
            here, there = ("absent" if group is None else "kept" for group in (ours, theirs))
            found.setdefault((part, "cache", here, there), []).append(layer)
            continue
        differing = differences(meaning(ours.seen_by(layer)), meaning(theirs.seen_by(layer)))
        formats = differences(kept_as(ours.spec), kept_as(theirs.spec))
        if formats and not can_convert(ours.spec, theirs.spec):
            differing += formats
        for name, here, there in differing:
            found.setdefault((part, name, here, there), []).append(layer)
    return [(f"{_layers(n)}.{part}.{name}", a, b) for (part, name, a, b), n in found.items()]


def engine_scales(ranks: Iterable[CacheDescription]) -> dict[int, tuple[float, float]]:
    """Layer -> its scales (k, v), where no page holds them, of all stages of an engine."""
    return {layer: scales for rank in ranks for layer, scales in rank.kv_scales.items()}


def like_engine(ranks: Sequence[CacheDescription]) -> CacheDescription:
    """Return what is told of an engine's whole KV: rank 0's description, with the scales of all stages."""
    return replace(ranks[0], kv_scales=engine_scales(ranks))


def _scale_differences(producer: CacheDescription, consumer: CacheDescription) -> list[tuple[str, str, str]]:
    """List scales that no page holds, of layers that both ranks keep in one format: where formats differ,
    rows are made with both."""
    formats = [
        {
            layer: g.group.spec.dtype
            for g in side.geometry.groups
            for layer in g.layers
            if g.group.spec.has_token_rows
        }
        for side in (producer, consumer)
    ]
    out = {layer for layer, _ in left_out(producer.geometry, consumer.geometry)}
    facts = [
        {
            f"layer {layer}.attention.kv_scales": f"k {k!r}, v {v!r}"
            for layer, (k, v) in sorted(side.kv_scales.items())
            if formats[0].get(layer) == formats[1].get(layer) and layer not in out
        }
        for side in (producer, consumer)
    ]
    return differences(*facts)


def _layers(layers: Sequence[int]) -> str:
    """Name layers, e.g. `layer 3`, `layers 0-2, 5`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return f"layer{'s' if len(layers) > 1 else ''} " + ", ".join("-".join(map(str, run)) for run in runs)


def _device_name(device: torch.device) -> str:
    return device.type if device.index is None else f"{device.type}:{device.index}"
