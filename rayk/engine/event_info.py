"""What events of requests tell besides tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rayk.types.errors import RaykError
from rayk.types.rows import TransferRow


@dataclass(frozen=True, kw_only=True, slots=True)
class EventInfo:
    """Filled by rank 0 of an engine; None: this event does not tell it. Times are of this host's monotonic
    clock."""

    submitted_ns: int | None = None
    """When the request, or its ticket, came."""
    taken_ns: int | None = None
    """When the loop took the ticket up."""
    asked_ns: int | None = None
    """When the host tier was asked about the prompt."""
    found_ns: int | None = None
    """When it had answered, or was waited for no longer."""
    loaded_ns: int | None = None
    """When what it has was in the request's blocks."""
    first_step_ns: int | None = None
    """When a step first took the request."""
    stage_ns: Mapping[str, int] | None = None
    """How long the stages of a hand-over's arrival lasted."""
    transfers: Sequence[TransferRow] | None = None
    num_kv_bytes_checked: int | None = None
    failure: RaykError | None = None
    """Why the decode engine goes on by itself."""
    num_valid_tokens: int | None = None
    """Prompt tokens kept after a failed transfer; the engine computes the rest."""
    num_preemptions: int | None = None
    num_swaps: int | None = None
    num_recomputed_tokens: int | None = None
    num_cached_tokens: int | None = None
    seed: int | None = None
    drafted_at: Sequence[int] | None = None
    """How many tokens were proposed for it on this engine, by position in drafts; see DraftCounts."""
    accepted_at: Sequence[int] | None = None
    draft_kv: str | None = None
    """Where a drafter on the engine's ranks had its KV of the prompt from; see RequestRow."""
    num_draft_rows_recomputed: int | None = None
    proposals: Sequence[tuple[int, Sequence[int]]] | None = None
    """What such a drafter proposed; see RequestRow."""
    num_host_tokens: int | None = None
    num_disk_tokens: int | None = None
    load_ns: int | None = None
    swap_ns: int | None = None
    offload_failure: str | None = None
    captured: Sequence[Any] | None = None
    """Copies of the prompt's KV rows, by tensor-parallel rank (handover.commands.CapturedRows)."""

    def told(self) -> dict[str, Any]:
        """Returns what this event tells, by name."""
        return {name: value for name in _NAMES if (value := getattr(self, name)) is not None}


_NAMES = tuple(f.name for f in fields(EventInfo))
