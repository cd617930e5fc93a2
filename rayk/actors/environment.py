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
"""How long a cluster's address may take to answer."""


def wanted_address(address: str | None) -> str | None:
    """The cluster to join: `address`, else $RAY_ADDRESS; None means one of our own."""
    return address or os.environ.get("RAY_ADDRESS") or None


def check_address(address: str) -> None:
    """Refuse a HOST:PORT where nobody listens, which Ray would try for minutes. Raises DeviceError.

    Other forms of address (auto, ray://...) are Ray's to judge.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise DeviceError(
            problem=f"no Ray cluster answers at {address!r}: {error}",
            where="the address",
            mend="start one with `ray start --head`, or leave the address out",
        ) from error
