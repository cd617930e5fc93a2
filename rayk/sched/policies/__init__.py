"""Placement policies: which prefill and which decode engine a request runs on. One file each."""

from __future__ import annotations

from typing import Protocol

from rayk.types.errors import UserError
from rayk.types.request import Request


class Policy(Protocol):
    """Chooses engines for one request. Engines are named by their index in each list."""

    def place(self, request: Request, num_prefill: int, num_decode: int) -> tuple[int, int]:
        """(prefill engine index, decode engine index)."""
        ...


POLICIES = ("round_robin",)
"""Names that `get_policy` knows."""


def get_policy(name: str) -> Policy:
    """A new policy of this name. Raises UserError naming the choices."""
    if name == "round_robin":
        from rayk.sched.policies.round_robin import RoundRobin

        return RoundRobin()
    raise UserError(f"unknown policy {name!r}", mend=f"one of {', '.join(POLICIES)}")
