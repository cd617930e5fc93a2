"""What a worker asks NIXL for."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.actors.worker import RankSpec, Worker
from rayk.types.config import EngineConfig


class _Asked(Exception):
    pass


@pytest.mark.parametrize(
    ("spans_nodes", "address", "expected"),
    [(False, "127.0.0.1", "none True"), (False, "10.0.0.7", "none False"), (True, "10.0.0.7", "peer False")],
)
def test_nixl_watches_peers_of_other_nodes_and_listens_where_they_can_be(
    monkeypatch, spans_nodes, address, expected
):
    def agent(name: str, *, error_handling: str, is_one_node: bool) -> Any:
        raise _Asked(f"{error_handling} {is_one_node}")

    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: address)
    monkeypatch.setattr("rayk.transfer.nixl_agent.NixlAgent", agent)
    spec = RankSpec(
        engine="decode0",
        epoch=1,
        role="decode",
        rank=0,
        config=EngineConfig(model="m"),
        address="",
        comm_timeout_s=1.0,
        lease_s=1.0,
        spans_nodes=spans_nodes,
    )
    with pytest.raises(_Asked, match=expected):
        Worker("w")._make_extension(None, spec)  # type: ignore[arg-type]
