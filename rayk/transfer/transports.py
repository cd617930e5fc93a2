"""Which agents move the bytes, by name: a transport is a row of `TRANSPORTS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayk.transfer.local_agent import LocalAgent, LocalNetwork

if TYPE_CHECKING:
    from rayk.transfer.agent import TransferAgent

LOCAL_NETWORK = LocalNetwork()
"""Where the local agents of this process find each other."""
LOCAL_DELAY_POLLS = 2
"""Polls that a copy within a process takes, as it would between processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """What the user of an agent knows of its peers. An agent takes of it what concerns it."""

    error_handling: str = "none"
    """peer: it is told of peers that die, at some cost; none: it is not."""
    is_one_node: bool = False
    """All peers are on this node."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One way to move bytes."""

    make: Callable[[str, AgentSettings], TransferAgent]
    """An agent of this name, unique among all that may meet. Raises DeviceError where it cannot be used."""
    is_cross_process: bool
    """Whether agents may be in unlike processes."""


def _make_local(name: str, settings: AgentSettings) -> TransferAgent:
    return LocalAgent(name, LOCAL_NETWORK, delay_polls=LOCAL_DELAY_POLLS)


def _make_nixl(name: str, settings: AgentSettings) -> TransferAgent:
    # NIXL loads UCX: only processes that move KV by it pay for that.
    from rayk.transfer.nixl_agent import NixlAgent

    return NixlAgent(name, error_handling=settings.error_handling, is_one_node=settings.is_one_node)


TRANSPORTS = {
    "local": Transport(_make_local, is_cross_process=False),
    "nixl": Transport(_make_nixl, is_cross_process=True),
}
ENGINES_USE = "nixl"
"""The transport between the engines of runs and servers."""


def make_agent(name: str, settings: AgentSettings, transport: str = ENGINES_USE) -> TransferAgent:
    """Make an agent of a transport. KeyError for one that is not in the table."""
    return TRANSPORTS[transport].make(name, settings)
