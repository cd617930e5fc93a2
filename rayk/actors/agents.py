"""The agents of a process that Ray runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from rayk.transfer import transports

if TYPE_CHECKING:
    from rayk.transfer.agent import TransferAgent


def make_agent(name: str, error_handling: str) -> TransferAgent:
    """Make an agent of the transport that engines use. It listens on loopback alone where this node does,
    because its cluster then has no other node."""
    own: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    settings = transports.AgentSettings(error_handling=error_handling, is_one_node=own.startswith("127."))
    return transports.make_agent(name, settings)
