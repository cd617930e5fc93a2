"""Settings of a host tier. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Weighing = Literal["auto", "always", "never"]
"""auto: as the cost model says, and seldom after failed reads (see Backoff); always and never: whatever the
cost."""
GPU_OUTBOX_BYTES = 512 << 20
"""Size of a rank's outbox on a GPU, where no other is asked for."""
ENDED = "the engine ended"  # why an engine that had a host tier until its end has none any more


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadSettings:
    """Settings of one deployment's offloading, saved with the results."""

    host_bytes: int  # for the host tier's pages: as many whole blocks as fit
    layout: str = "BHLNC"
    """Says how the tier's pages lie. BHLNC: the canonical page, one run for each head slice of a rank. LBNHC
    and the like keep a page per layer, for comparison."""
    block_size: int = 16  # tokens of a tier's block of attention, before it grows as an engine's would
    state_block_size: int | None = None
    """Tokens per kept state of a recurrent layer; None: those of the tier's attention blocks, else
    `block_size`."""
    store: bool = True  # whether engines store what they compute
    # an engine stores a request after so many more tokens, after its prompt, and when it ends
    store_tokens: int = 512
    pending_share: float = 0.25  # the share of an engine's blocks that waiting stores may hold
    load: Weighing = "auto"  # whether what the tier holds of a prompt is loaded, or computed again
    swap: Weighing = "auto"  # whether a preempted request is swapped out, or computed again
    disk_folder: str | None = None  # where the disk tier keeps its pages; None: there is none
    disk_bytes: int = 1 << 30
    outbox_bytes: int | None = None
    """Host memory of each rank into which it copies what it stores, so that the tier reads it there and the
    rank's own blocks come free; 0: the tier reads the rank's own memory. None: see `on`."""
    transfer_s: float = 30.0  # deadline of one store or load
    lease_s: float = 120.0  # a load's pages are kept no longer for an engine that does not read them

    def on(self, device: str) -> OffloadSettings:
        """Return the settings of an engine on such a device. On a GPU there is an outbox, since what copies
        between devices does not reach a host's memory; on a CPU it would only be another copy."""
        if self.outbox_bytes is not None:
            return self
        return replace(self, outbox_bytes=GPU_OUTBOX_BYTES if device.startswith("cuda") else 0)
