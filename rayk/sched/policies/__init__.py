"""List the placement policies by name. Each has a file of its own; POLICIES says what it heeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rayk.sched.policies.conditional import Conditional
from rayk.sched.policies.least_loaded import LeastLoaded
from rayk.sched.policies.prefix_aware import PrefixAware
from rayk.sched.policies.round_robin import RoundRobin
from rayk.sched.policies.session_affinity import SessionAffinity
from rayk.sched.policy import Policy, PolicySettings
from rayk.types.errors import UserError


@dataclass(frozen=True)
class PolicyKind:
    make: Callable[[PolicySettings], Policy]
    heeds: tuple[str, ...]


_OF_PREFIXES = ("output_cost", "move_cost", "block_tokens", "index_blocks", "host_cost", "host_blocks")

POLICIES: Mapping[str, PolicyKind] = {
    "round_robin": PolicyKind(lambda _: RoundRobin(), ()),
    "least_loaded": PolicyKind(LeastLoaded, ("output_cost",)),
    "prefix_aware": PolicyKind(PrefixAware, _OF_PREFIXES),
    "conditional": PolicyKind(Conditional, (*_OF_PREFIXES, "local_prompt_tokens", "local_backlog_tokens")),
    "session_affinity": PolicyKind(SessionAffinity, ("output_cost",)),
}

# settings that say nothing where engines prefill and decode
OF_HAND_OVERS = ("move_cost", "local_prompt_tokens", "local_backlog_tokens")


def heeds(policy: str, setting: str, *, hands_over: bool) -> bool:
    return setting in POLICIES[policy].heeds and (hands_over or setting not in OF_HAND_OVERS)


def get_policy(name: str, settings: PolicySettings | None = None) -> Policy:
    """Make a policy. Raises UserError naming the choices."""
    if name not in POLICIES:
        raise UserError(f"unknown policy {name!r}", mend=f"one of {', '.join(POLICIES)}")
    return POLICIES[name].make(settings or PolicySettings())
