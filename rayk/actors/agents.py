"""The NIXL agents of a process that Ray runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

if TYPE_CHECKING:
    from rayk.transfer.nixl_agent import NixlAgent


def make_agent(name: str, error_handling: str) -> NixlAgent:
    """See NixlAgent. It listens on loopback alone where this node does: its cluster then has no other."""
    # NIXL loads UCX: only processes that move KV pay for it.
    from rayk.transfer.nixl_agent import NixlAgent

    own: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    is_one_node = own.startswith("127.")
    return NixlAgent(name, error_handling=error_handling, is_one_node=is_one_node)
