"""What a worker becomes: one rank of an engine, as whoever owns the workers tells it. Picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayk.actors.push_flow import PushSettings
from rayk.handover.planted import PlantedFault
from rayk.transfer.staging import StagingSettings
from rayk.transfer.token_classes import ONE_CLASS, TokenClasses
from rayk.types.config import EngineConfig
from rayk.types.offload import OffloadSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """What a worker becomes. The coordinator or fleet fills it."""

    engine: str
    epoch: int
    role: str
    """One of aggregated, prefill, decode."""
    rank: int
    config: EngineConfig
    address: str
    """The host:port at which the ranks meet; it also names their shared memory."""
    secret: bytes = field(default=b"", repr=False)
    """A secret that only the ranks of this life of the engine know, drawn where it is formed."""
    comm_timeout_s: float
    lease_s: float
    """The longest time that a lease lasts."""
    renewed_lease_s: float | None = None
    """A lease that was not renewed for so long ends; None: it needs no renewal."""
    staging: StagingSettings = StagingSettings()
    push: PushSettings | None = None
    """None if the rank pushes nothing."""
    spans_nodes: bool = False
    """Whether the cell's engines are on several nodes."""
    notices_deaths: bool = False
    """Whether the transport must notice that a peer is gone, which makes its messages slower."""
    token_classes: TokenClasses = ONE_CLASS
    """How all engines of the deployment deal tokens over ranks, for their digests."""
    faults: tuple[PlantedFault, ...] = ()
    offload: OffloadSettings | None = None
    """How the engine uses a host tier; None without one."""
