"""What a worker becomes: one rank of an engine, as whoever owns the workers tells it. Picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayk.actors.push_flow import PushSettings
from rayk.handover.planted import PlantedFault
from rayk.transfer.staging import StagingSettings
from rayk.types.config import EngineConfig
from rayk.types.offload import OffloadSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """What a worker becomes. Filled by the coordinator."""

    engine: str
    epoch: int
    role: str
    """aggregated, prefill or decode."""
    rank: int
    config: EngineConfig
    address: str
    """host:port the ranks meet at; also names their shared memory."""
    secret: bytes = field(default=b"", repr=False)
    """What only the ranks of this life of the engine know. Drawn where it is formed."""
    comm_timeout_s: float
    lease_s: float
    """A lease lasts no longer than this."""
    renewed_lease_s: float | None = None
    """A lease that nobody has renewed for so long ends; None: it needs no renewal."""
    staging: StagingSettings = StagingSettings()
    push: PushSettings | None = None
    """None: it pushes nothing."""
    spans_nodes: bool = False
    """Whether the cell's engines are on several nodes."""
    notices_deaths: bool = False
    """Whether the transport must notice that a peer is gone, which costs messages their shortest way."""
    faults: tuple[PlantedFault, ...] = ()
    offload: OffloadSettings | None = None
    """How the engine uses a host tier; None: it has none."""
