"""Placement policies: which engines a request runs on. One file each.

A policy sees engines as `EngineLoad`s, which the coordinator keeps up to date, and is told what became of the
requests it placed. What a decision costs depends on the number of engines, not of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rayk.types.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a policy knows of a request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int = 0
    session: str | None = None


@dataclass(kw_only=True, slots=True)
class EngineLoad:
    """One engine as policies see it. Filled by whoever places requests."""

    name: str
    tp: int = 1
    num_requests: int = 0
    """Placed here and not over."""
    num_prompt_tokens: int = 0
    """Of prompts that are to be computed here and are not yet."""
    num_output_tokens: int = 0
    """That requests decoding here, or about to, may still generate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where a request goes, by names of engines."""

    prefill: str | None
    """None: the decode engine computes the prompt itself."""
    decode: str | None
    """None: there are no decode engines; the prefill engine does it all."""


class Policy(Protocol):
    """Chooses engines. All calls come from one thread."""

    def place(self, asked: Asked, prefill: Sequence[EngineLoad], decode: Sequence[EngineLoad]) -> Placed:
        """Engines for a request, of those that take requests now. `prefill` is never empty; `decode` is where
        engines do both."""
        ...

    def ended(self, asked: Asked, placed: Placed) -> None:
        """A request that was placed is over: its KV may be in these engines' prefix caches."""
        ...

    def lost(self, engine: str) -> None:
        """An engine died: whatever was known of its caches is no more."""
        ...


POLICIES = ("round_robin",)
"""Names that `get_policy` knows."""


def get_policy(name: str) -> Policy:
    """A new policy of this name. Raises UserError naming the choices."""
    if name == "round_robin":
        from rayk.sched.policies.round_robin import RoundRobin

        return RoundRobin()
    raise UserError(f"unknown policy {name!r}", mend=f"one of {', '.join(POLICIES)}")
