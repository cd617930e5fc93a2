"""What a cell leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayk.handover.commands import CapturedRows
from rayk.kv.usage import Ledger
from rayk.types.errors import RaykError
from rayk.types.rows import RequestRow, TransferRow


@dataclass(kw_only=True)
class CellOutcome:
    """Everything a cell left behind. Filled by the coordinator; judged elsewhere."""

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
    """Engine name -> what came of its blocks; of those that lived to tell."""
    offload: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine name -> what it stored, loaded and swapped; of those that lived to tell."""
    tiers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Host tier -> what it says of itself; of those that live to tell."""
    tiers_before: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The same before the first request: tiers outlive cells, and count on."""
    tier_losses: list[str] = field(default_factory=list)
    """What host tiers died of."""
    num_kv_bytes_checked: int = 0
    wall_ns: int = 0
