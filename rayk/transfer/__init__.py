"""Moving KV from a producer's ranks to a consumer's, and proving that it arrived.

`plan` (pure, free of torch) says which bytes each consumer rank reads from which producer rank;
`handshake` checks that both sides mean the same bytes; `agent` is the protocol of whatever moves them
(`local_agent` in memory, `nixl_agent` over NIXL). `session` (consumer) and `lease` (producer) are pure
state machines; `verify` computes and compares digests through the bound views; `rank` drives all of it
for one rank from the engine's loop, without threads. `faulty_agent` plants errors for tests and
experiments.

`connector` is the protocol that others implement to move KV; over our agents, `connectors` holds two that
pull and `push_connectors` two that push. The names below are imported on first use. `rayk conformance` tries
any of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayk.transfer.connector import BaseConnector, Connector, ConnectorCase, Finished, KVRequest
    from rayk.transfer.connectors import LocalConnector, NixlConnector
    from rayk.transfer.push_connectors import LocalPushConnector, NixlPushConnector

_HOMES = {
    "BaseConnector": "rayk.transfer.connector",
    "Connector": "rayk.transfer.connector",
    "ConnectorCase": "rayk.transfer.connector",
    "Finished": "rayk.transfer.connector",
    "KVRequest": "rayk.transfer.connector",
    "LocalConnector": "rayk.transfer.connectors",
    "LocalPushConnector": "rayk.transfer.push_connectors",
    "NixlConnector": "rayk.transfer.connectors",
    "NixlPushConnector": "rayk.transfer.push_connectors",
}

__all__ = [
    "BaseConnector",
    "Connector",
    "ConnectorCase",
    "Finished",
    "KVRequest",
    "LocalConnector",
    "LocalPushConnector",
    "NixlConnector",
    "NixlPushConnector",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
