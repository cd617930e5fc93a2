"""What a cell leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayk.handover.commands import CapturedRows
from rayk.kv.usage import Ledger
from rayk.types.errors import RaykError
from rayk.types.rows import RequestRow, TransferRow
from rayk.types.steps import StepRow


@dataclass(kw_only=True)
class CellOutcome:
    """Everything a cell leaves behind. The coordinator fills it; the judge reads it."""

    requests: list[RequestRow] = field(default_factory=list)
    transfers: list[TransferRow] = field(default_factory=list)
    errors: list[RaykError] = field(default_factory=list)
    """Errors of requests and engines, in order of appearance."""
    survived: list[RaykError] = field(default_factory=list)
    """Errors of engines that died or were lost while all their requests were saved."""
    captured: dict[int, list[CapturedRows]] = field(default_factory=dict)
    """Prompt index -> the prefill engine's rows, where kv_values is checked."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> backend, comm, layout, block sizes..."""
    ledgers: dict[str, Ledger] = field(default_factory=dict)
    """Engine name -> what became of its blocks, for engines that lived until the end."""
    offload: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> what it stored, loaded and swapped, for engines that lived until the end."""
    tiers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host tier -> its own status, for tiers that still live."""
    tiers_before: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Their status before the first request: tiers outlive cells, so their counters go on."""
    tier_losses: list[str] = field(default_factory=list)
    """What host tiers died of."""
    moments: dict[str, int] = field(default_factory=dict)
    """What had to be done before the first request -> when it was done, in ns of the coordinator's monotonic
    clock; in their order."""
    steps: list[StepRow] = field(default_factory=list)
    """The steps of engines with `record_steps` that lived until the end."""
    num_kv_bytes_checked: int = 0
    wall_ns: int = 0
