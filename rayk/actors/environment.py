"""What can be said about Ray before `import ray`: settings it reads once, and where the cluster is."""

from __future__ import annotations

import os
import socket

from rayk.types.errors import DeviceError

RAY_DEFAULTS = {
    # A local `ray.init` would else turn token authentication on for every later cluster of this user.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_metrics_report_interval_ms": "1000",
    # Under `uv run`, Ray would start workers through uv inside the uploaded working directory.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # An actor without a GPU sees none; by default Ray leaves it all of the machine's.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # On a busy machine, five seconds are too few for a proxy to start in: Serve would kill it, and give up.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
"""Applied where the user has not set them."""


def prepare_environment() -> None:
    """Set the defaults. Call before the first `import ray`."""
    for name, value in RAY_DEFAULTS.items():
        os.environ.setdefault(name, value)


CONNECT_S = 5.0
"""How long a cluster's address may take to be connected to."""
ANSWER_S = 20.0
"""How long a cluster may take to say its first word there."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""What begins every connection of gRPC, which Ray speaks: the preface of HTTP/2 and SETTINGS without any
(RFC 9113, 3.4)."""
_FRAME_HEAD, _KIND_AT, _SETTINGS = 9, 3, 4
"""Of a frame of HTTP/2: bytes before its payload, where its type stands, and the type of the first."""


def wanted_address(address: str | None) -> str | None:
    """The cluster to join: `address`, else $RAY_ADDRESS; None means one of our own."""
    return address or os.environ.get("RAY_ADDRESS") or None


def check_address(address: str) -> None:
    """Refuse a HOST:PORT where nobody listens, or no Ray, which Ray would try for minutes. Raises
    DeviceError.

    Other forms of address (auto, ray://...) are Ray's to judge.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S) as connection:
            if not os.environ.get("RAY_USE_TLS"):
                _check_greeting(connection)
    except (OSError, OverflowError) as error:
        raise DeviceError(
            problem=f"no Ray cluster answers at {address!r}: {error}",
            where="the address",
            mend="start one with `ray start --head`, or leave the address out",
        ) from error


def _check_greeting(connection: socket.socket) -> None:
    """Raises OSError where who listens does not greet as HTTP/2 does."""
    connection.settimeout(ANSWER_S)
    connection.sendall(_HELLO)
    head = b""
    while len(head) < _FRAME_HEAD:
        part = connection.recv(_FRAME_HEAD - len(head))
        if not part:
            raise OSError("who listens there closes the connection")
        head += part
    if head[_KIND_AT] != _SETTINGS:
        raise OSError("who listens there is no Ray")
