"""What a server's fronts and its fleet of engines tell each other. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayk.kv.usage import Ledger
from rayk.lines.line import LineAddress
from rayk.types.config import EngineConfig
from rayk.types.errors import RaykError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCard:
    """One life of an engine as a front reaches it. The fleet fills it."""

    name: str
    role: str
    epoch: int
    config: EngineConfig
    workers: tuple[Any, ...]
    """Actor handles, rank 0 first."""
    line: LineAddress
    """The address of rank 0."""
    node: str = ""
    clock_offset_ns: int = 0
    """The fleet's clock minus rank 0's."""
    tier: Any = None
    """The actor of its host tier; None without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where one attempt of a request goes."""

    fleet: str
    """The life of the fleet; engine cards of another life are void."""
    prefill: tuple[str, int] | None
    """Name and epoch; None: the decode engine computes the prompt itself."""
    decode: tuple[str, int] | None
    """None: the prefill engine does it all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAccount:
    """What an engine left when it was stopped."""

    engine: str
    ledger: Ledger | None = None
    """None if the engine died before it could report."""
    num_free_blocks: int = 0
    num_blocks: int = 0
    """All its blocks, including the null block, which is never free."""
    leaked: tuple[str, ...] = ()
    """Leases that never ended."""
    errors: tuple[RaykError, ...] = field(default=())

    @property
    def is_clean(self) -> bool:
        """Return whether every block was given back."""
        return not self.leaked and not self.errors and self.num_free_blocks == self.num_blocks - 1
