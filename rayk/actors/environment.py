"""What can be said about Ray before `import ray`: its environment, where a cluster is, and who gets in."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

from rayk.types.errors import DeviceError

FOLLOW_UV = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
RAY_DEFAULTS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_metrics_report_interval_ms": "1000",
    # Under `uv run`, Ray would start workers through uv inside the uploaded working directory.
    FOLLOW_UV: "0",
    # An actor without a GPU sees none; by default Ray leaves it all of the machine's.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # On a busy machine, five seconds are too few for a proxy to start in: Serve would kill it, and give up.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Its proxy waits for ever for clients who read nothing.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "rayk.serve.unread.middlewares",
}
"""Variables of clusters and drivers, where the user has not set them."""
BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""0: Ray takes 127.0.0.1 for this node's address, and listens there alone. Ray means it for other systems."""
AUTH_MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
BREAKPOINT = "PYTHONBREAKPOINT"
_TOKEN_BYTES = 32
_LOOPBACK = ("localhost", "127.0.0.1")
CONNECT_S = 5.0
"""How long a cluster's address may take to be connected to."""
ANSWER_S = 20.0
"""How long a cluster may take to say its first word there."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""What begins every connection of gRPC, which Ray speaks: the preface of HTTP/2 and SETTINGS without any
(RFC 9113, 3.4)."""
_FRAME_HEAD, _KIND_AT, _SETTINGS = 9, 3, 4
"""A frame of HTTP/2: bytes before its payload, where its type stands, and the type of the first."""

Environment = dict[str, str | None]
"""Variables and their values; None: not set."""


def own_cluster(*, is_one_node: bool = True) -> Environment:
    """Return the environment that starts a cluster of our own, with a token that only its processes know. A
    cluster of one node listens on loopback alone."""
    return {
        **_defaults(),
        AUTH_MODE: "token",
        TOKEN: secrets.token_hex(_TOKEN_BYTES),
        TOKEN_FILE: None,
        "RAY_ENABLE_K8S_TOKEN_AUTH": None,
        BEYOND_LOOPBACK: "0" if is_one_node else None,
    }


def joined_cluster(address: str, own_host: str, *, protected: bool | None) -> Environment:
    """Return the environment that a driver needs to join the cluster at HOST:PORT; others reach this machine
    as `own_host`.

    Tokens are sent exactly where the cluster asks for them, whatever the user's mode is: Ray only half works
    where the two differ.
    """
    host, _, port = address.rpartition(":")
    is_hidden = host in _LOOPBACK and not _answers(own_host, int(port))
    return {
        **_defaults(),
        **({} if protected is None else {AUTH_MODE: "token" if protected else "disabled"}),
        BEYOND_LOOPBACK: "0" if is_hidden else None,
    }


def _defaults() -> Environment:
    values: Environment = {name: os.environ.get(name, value) for name, value in RAY_DEFAULTS.items()}
    # Ray sets it for this process, and leaves it.
    return values | {BREAKPOINT: os.environ.get(BREAKPOINT)}


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def is_protected(address: str, token: str = "") -> bool | None:
    """Return whether the cluster at HOST:PORT refuses callers without a token, or with this one; None where
    TLS hides it.

    Raises DeviceError where no Ray answers.
    """
    if os.environ.get("RAY_USE_TLS"):
        return None
    import grpc

    with open_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            ask(b"", timeout=ANSWER_S, metadata=[("authorization", f"Bearer {token}")] if token else None)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return True
            raise _nobody(address, f"{error.code().name}: {error.details()}") from error
    return False


def open_channel(address: str) -> Any:
    """Open a gRPC channel as Ray's own: never by way of http_proxy, which would be shown tokens."""
    import grpc

    return grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])


def wanted_address(address: str | None) -> str | None:
    """Return the cluster to join: `address`, else $RAY_ADDRESS; None means one of our own."""
    return address or os.environ.get("RAY_ADDRESS") or None


def is_host_and_port(address: str) -> bool:
    """Return whether an address is HOST:PORT, and not `auto` or `ray://...`."""
    host, colon, port = address.rpartition(":")
    return bool(colon) and port.isdigit() and "/" not in host


def check_address(address: str) -> None:
    """Refuse a HOST:PORT where nobody listens or something other than Ray does; Ray itself would try for
    minutes. Raises DeviceError.

    Other forms of address (auto, ray://...) are left to Ray.
    """
    if not is_host_and_port(address):
        return
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S) as connection:
            if not os.environ.get("RAY_USE_TLS"):
                _check_greeting(greeting(connection, ANSWER_S))
    except (OSError, OverflowError) as error:
        raise _nobody(address, error) from error


def _nobody(address: str, why: object) -> DeviceError:
    return DeviceError(
        problem=f"no Ray cluster answers at {address!r}: {why}",
        where="the address",
        mend="start one with `ray start --head`, or leave the address out",
    )


def greeting(connection: socket.socket, within_s: float) -> bytes:
    """Return the first bytes of a server's answer to a gRPC client. Raises OSError where none come."""
    connection.settimeout(within_s)
    connection.sendall(_HELLO)
    head = b""
    while len(head) < _FRAME_HEAD:
        part = connection.recv(_FRAME_HEAD - len(head))
        if not part:
            raise OSError("who listens there closes the connection")
        head += part
    return head


def is_grpc(head: bytes) -> bool:
    """Return whether a greeting is HTTP/2, as gRPC's is."""
    return head[_KIND_AT] == _SETTINGS


def _check_greeting(head: bytes) -> None:
    if not is_grpc(head):
        raise OSError("who listens there is no Ray")
