"""What `rayk explain` computes. Free of torch: configs, geometry and the transfer plan only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rayk.engine.plan import EnginePlan, plan_engine
from rayk.kv.geometry import RankGeometry
from rayk.kv.groups import wasted_bytes
from rayk.models.config import DecoderConfig
from rayk.models.families import load_config
from rayk.specs import Cell, expand, load_spec
from rayk.specs.checks import check_cell
from rayk.transfer.plan import consecutive_tables, plan_transfer
from rayk.types.errors import LayoutVetoed, SpecError, Unsupported, UserError

DEFAULT_TOKENS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """What one consumer rank reads from one producer rank for one KV group."""

    producer_rank: int
    consumer_rank: int
    group: int
    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    bytes: int
    num_descriptors: int
    num_descriptors_merged: int
    """Left when consecutive blocks of dense runs are read as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One engine's memory."""

    tp: int
    layout: str
    block_size: int
    kv_heads: tuple[tuple[int, ...], ...]
    """Global KV heads of each rank."""
    block_bytes: int
    """One block over all layers on one rank (the largest)."""
    buffer_bytes: int
    """A rank's whole buffer (the largest)."""
    wasted_bytes_per_block: tuple[int, ...]
    """Per KV group: canonical bytes of a block that no layer uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The answer. `reason` says why not, when not supported; then the rest is empty."""

    supported: bool
    reason: str
    num_tokens: int = 0
    bytes: int = 0
    num_descriptors: int = 0
    reads: tuple[Read, ...] = ()
    sides: Mapping[str, Side] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def explain_pair(model: str, settings: Mapping[str, Any], *, num_tokens: int | None = None) -> Explanation:
    """Explain the pair of engines that `settings` (a spec's mapping) describes.

    Raises UserError for bad input; what is merely not possible is an answer.
    """
    config = load_config(model)
    cell, refused = _cell(model, settings, config)
    if refused:
        return Explanation(supported=False, reason=refused)
    assert cell.decode is not None
    try:
        producer, consumer = plan_engine(cell.prefill, config), plan_engine(cell.decode, config)
    except (Unsupported, LayoutVetoed) as error:
        return Explanation(supported=False, reason=str(error))
    tokens = _num_tokens(num_tokens, config, producer, consumer)
    reads = _reads(producer, consumer, tokens)
    return Explanation(
        supported=True,
        reason="",
        num_tokens=tokens,
        bytes=sum(r.bytes for r in reads),
        num_descriptors=sum(r.num_descriptors for r in reads),
        reads=tuple(reads),
        sides={"prefill": _side(producer), "decode": _side(consumer)},
    )


def locate(
    model: str,
    settings: Mapping[str, Any],
    *,
    side: str,
    rank: int,
    byte: int | None,
    find: str | None,
) -> list[dict[str, Any]]:
    """Coordinates of a byte of a rank's buffer, or the bytes of a coordinate. Raises UserError."""
    config = load_config(model)
    cell, refused = _cell(model, settings, config)
    if refused:
        raise UserError(problem=refused)
    engines = {"prefill": cell.prefill, "decode": cell.decode}
    engine = engines.get(side)
    if engine is None:
        raise UserError(problem=f"no side {side!r}", where="--side", mend="prefill or decode")
    if rank >= engine.tp:
        raise UserError(problem=f"rank {rank} of a {side} engine of TP {engine.tp}", where="--rank")
    geometry = plan_engine(engine, config).ranks[rank]
    if find is not None:
        return _find(geometry, find)
    assert byte is not None
    if byte >= geometry.buffer_bytes:
        raise UserError(
            problem=f"byte {byte} is past the buffer's {geometry.buffer_bytes} bytes", where="--byte"
        )
    return [asdict(c) for c in geometry.describe(byte)]


def _cell(model: str, settings: Mapping[str, Any], config: DecoderConfig) -> tuple[Cell, str]:
    """The one cell, and why it is refused ("" when it is not)."""
    loaded = load_spec(
        {"model": model, "prompts": {"random": {}}, "checks": ["kv_bytes"], **settings}, source="options"
    )
    (cell,) = expand(loaded.spec, config, device="cpu")
    try:
        check_cell(cell, config, loaded)
    except SpecError as error:
        if not error.problem.startswith("not supported yet"):
            raise  # nonsense, which no version will do
        return cell, error.problem
    return cell, cell.unsupported or ""


def _num_tokens(asked: int | None, config: DecoderConfig, producer: EnginePlan, consumer: EnginePlan) -> int:
    """Tokens of the sequence: what was asked, else as many as fit up to 1024."""
    room = [_capacity_tokens(plan.ranks[0]) for plan in (producer, consumer)]
    most = min(config.max_positions, *room)
    if asked is not None and asked > most:
        raise UserError(
            problem=f"{asked} tokens: at most {config.positions_text}; the prefill "
            f"pool holds {room[0]} tokens, the decode pool {room[1]}",
            where="--num-tokens",
        )
    return asked or min(DEFAULT_TOKENS, most)


def _capacity_tokens(rank: RankGeometry) -> int:
    """Tokens of one sequence that fit if every group kept all of them (block 0 is the null block)."""
    share = (rank.num_blocks - 1) // len(rank.groups)
    return share * min(g.block_size for g in rank.groups)


def _reads(producer: EnginePlan, consumer: EnginePlan, num_tokens: int) -> list[Read]:
    reads = []
    source_tables = consecutive_tables(producer.ranks[0], num_tokens)
    for rank in consumer.ranks:
        plan = plan_transfer(producer.ranks, rank)
        sums: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
        tables = consecutive_tables(rank, num_tokens)
        for part in plan.lower(num_tokens, source_tables, tables):
            total = sums[part.producer_rank, part.group]
            total[0] += part.num_bytes
            total[1] += part.num_descriptors
            total[2] += part.num_coalesced
        for unit_reads in plan.reads:
            num_bytes, descriptors, merged = sums[unit_reads.producer_rank, unit_reads.group]
            reads.append(
                Read(
                    producer_rank=unit_reads.producer_rank,
                    consumer_rank=rank.tp_rank,
                    group=unit_reads.group,
                    layers=rank.groups[unit_reads.group].group.layers,
                    kv_heads=next(iter(unit_reads.units.values())),
                    bytes=num_bytes,
                    num_descriptors=descriptors,
                    num_descriptors_merged=merged,
                )
            )
    return reads


def _side(plan: EnginePlan) -> Side:
    ranks = plan.ranks
    return Side(
        tp=len(ranks),
        layout=plan.resolution.layout.name,
        block_size=ranks[0].groups[0].block_size,
        kv_heads=tuple(r.groups[0].fields[0].units for r in ranks),
        block_bytes=max(r.block_bytes for r in ranks),
        buffer_bytes=max(r.buffer_bytes for r in ranks),
        wasted_bytes_per_block=wasted_bytes(plan.groups),
    )


def _find(rank: RankGeometry, text: str) -> list[dict[str, Any]]:
    """First byte and length of the row of each field that a coordinate names."""
    wanted = _parse_find(text)
    layer, block, head, token = (int(wanted[k]) for k in ("layer", "block", "head", "token"))
    found = []
    for group in rank.groups:
        if layer not in group.group.layers or token >= group.block_size or block >= rank.num_blocks:
            continue
        position = group.group.layers.index(layer)
        kernel_block = block * group.kernel_blocks_per_block + token // group.kernel_block_size
        for item in group.fields:
            if head not in item.units or wanted.get("field", item.field.name) != item.field.name:
                continue
            slot, row = item.units.index(head), token % group.kernel_block_size
            address = item.address(position, kernel_block, slot, row)
            found.append(
                {"group": group.group.index, "field": item.field.name, "byte": address}
                | {"num_bytes": item.field.row_bytes}
            )
    if not found:
        raise UserError(problem=f"rank {rank.tp_rank} holds no such coordinate", where=f"--find {text}")
    return found


def _parse_find(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    wanted = {key.strip(): value.strip() for key, _, value in pairs}
    numbers = [wanted.get(k, "") for k in ("layer", "block", "head", "token")]
    extra = set(wanted) - {"layer", "block", "head", "token", "field"}
    if extra or not all(n.isdigit() for n in numbers):
        raise UserError(
            problem="not a coordinate",
            where=f"--find {text}",
            mend="layer=0,block=1,head=0,token=0 (and field=k or v)",
        )
    return wanted
