"""What each rank tells about its cache, and the field-by-field check before the first byte moves.

TP size, layout, block size and number of blocks may differ between the sides: the plan bridges them.
Everything that gives bytes their meaning must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rayk.kv.caches import CanonicalKVCaches
from rayk.kv.fields import PageField
from rayk.kv.geometry import RankGeometry
from rayk.transfer.agent import TransferAgent
from rayk.types.errors import HandshakeMismatch

PROTOCOL_VERSION = 2
DIGEST_VERSION = 2
ROWS_PER_GROUP = 256
"""Token rows that one digest word covers."""


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
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the engine that decide what its groups keep, where the model heeds them."""
    protocol_version: int = PROTOCOL_VERSION
    digest_version: int = DIGEST_VERSION
    rows_per_group: int = ROWS_PER_GROUP

    @property
    def tp_rank(self) -> int:
        """Rank within the engine."""
        return self.geometry.tp_rank

    @property
    def tp_size(self) -> int:
        """Ranks of the engine."""
        return self.geometry.tp_size


def describe_cache(
    agent: TransferAgent,
    caches: CanonicalKVCaches,
    *,
    engine: str,
    epoch: int = 0,
    fingerprint: Mapping[str, str],
    settings: Mapping[str, str] | None = None,
) -> CacheDescription:
    """Register a rank's buffer with its agent (one region) and describe it. Call once per buffer."""
    address = agent.register(caches.buffer)
    return CacheDescription(
        engine=engine,
        epoch=epoch,
        geometry=caches.geometry,
        fingerprint=dict(fingerprint),
        settings=dict(settings or {}),
        device=_device_name(caches.buffer.device),
        transport=agent.transport,
        agent_name=agent.name,
        agent_metadata=agent.metadata(),
        base_address=address,
    )


def check(producer: CacheDescription, consumer: CacheDescription) -> None:
    """Raises HandshakeMismatch listing every field that differs."""
    ours, theirs = dict(_facts(producer)), dict(_facts(consumer))
    names = [*ours, *(name for name in theirs if name not in ours)]
    differing = tuple(
        (name, ours.get(name, "absent"), theirs.get(name, "absent"))
        for name in names
        if ours.get(name) != theirs.get(name)
    )
    if differing:
        raise HandshakeMismatch(differing)


def check_engine(descriptions: Sequence[CacheDescription]) -> None:
    """All ranks of one life of one engine are there, in order. Raises HandshakeMismatch."""
    first = descriptions[0]
    wanted = [str(r) for r in range(first.tp_size)]
    found = [str(d.tp_rank) for d in descriptions]
    if found != wanted:
        raise HandshakeMismatch(((f"ranks of {first.engine}", ",".join(found), ",".join(wanted)),))
    for other in descriptions[1:]:
        named = [
            (f"{name} of {first.engine} rank {other.tp_rank}", str(a), str(b))
            for name, a, b in (
                ("engine", first.engine, other.engine),
                ("epoch", first.epoch, other.epoch),
                ("num_blocks", first.geometry.num_blocks, other.geometry.num_blocks),
            )
            if a != b
        ]
        if named:
            raise HandshakeMismatch(tuple(named))


def _facts(description: CacheDescription) -> Iterator[tuple[str, str]]:
    """(name, value) of everything that must agree, most telling first."""
    yield "protocol_version", str(description.protocol_version)
    yield "transport", description.transport
    for name, value in description.fingerprint.items():
        yield f"model.{name}", value
    # Before the groups that come of them: whoever reads of those must know what to set.
    for name, value in description.settings.items():
        yield f"engine.{name}", value
    yield "num_groups", str(len(description.geometry.groups))
    for geometry in description.geometry.groups:
        group = geometry.group
        name = f"group {group.index}"
        yield f"{name}.layers", ",".join(map(str, group.layers))
        yield f"{name}.kind", group.spec.kind
        yield f"{name}.kv_dtype", group.spec.dtype
        # Which rows are live names a window or chunk without asking for the kind of spec: not at the very
        # end of so many tokens, where chunks of many sizes have none.
        yield f"{name}.live_rows(1000000)", str(group.spec.live_rows(group.spec.fullest_at(1_000_000)))
        for f in group.spec.fields():
            yield f"{name}.{f.name}", _describe_field(f)
    yield "digest_version", str(description.digest_version)
    yield "rows_per_group", str(description.rows_per_group)


def _describe_field(field: PageField) -> str:
    """What its bytes mean, whatever the layout. Rows per block may differ where a row is a token."""
    taps = f", {field.taps} taps" if field.taps else ""
    return f"{field.units} units x {field.row_bytes} bytes of {field.dtype}{taps}"


def _device_name(device: torch.device) -> str:
    return device.type if device.index is None else f"{device.type}:{device.index}"
