"""Which error handling a worker asks NIXL for."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.actors.worker import RankSpec, Worker
from rayk.types.config import EngineConfig


class _Asked(Exception):
    pass


@pytest.mark.parametrize(("spans_nodes", "expected"), [(False, "none"), (True, "peer")])
def test_only_engines_on_several_nodes_have_nixl_watch_their_peers(monkeypatch, spans_nodes, expected):
    def agent(name: str, *, error_handling: str) -> Any:
        raise _Asked(error_handling)

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
