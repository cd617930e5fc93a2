"""Where a server listens: checked before anything starts, and its address for people."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from rayk.types.errors import UserError

QUIET_PORTS = range(20_000, 32_768)
"""Neither systems' ephemeral ports nor those of Ray's workers: processes that start between the choice of a
port and its use take hundreds of those."""
NUM_TRIES = 32


def claim_port(host: str, port: int) -> int:
    """Find a port that a server of this machine can listen at: `port` itself, or a free one for 0. It is
    given back at once: if somebody else takes it before the server does, the server says so. Raises
    UserError."""
    for candidate in random.sample(QUIET_PORTS, NUM_TRIES) if port == 0 else ():
        with contextlib.suppress(OSError), listen(host, candidate):
            return candidate
    try:
        with listen(host, port) as found:
            return int(found.getsockname()[1])
    except OSError as error:
        raise _refusal(host, port, error) from error


def listen(host: str, port: int) -> socket.socket:
    """Bind a TCP socket and listen. Raises OSError. A port whose last server has just ended may be taken, one
    that somebody listens at may not."""
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )[0]
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        # Two sockets may be bound to one port as long as neither listens.
        found.listen(1024)
    except OSError:
        found.close()
        raise
    return found


def url_of(host: str, port: int) -> str:
    """Make http://HOST:PORT, with IPv6 addresses in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reachable_host(host: str) -> str:
    """Tell where a server that listens at `host` answers on its own machine."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def _refusal(host: str, port: int, error: OSError) -> UserError:
    if isinstance(error, socket.gaierror):
        return UserError(f"{host!r} is no address: {error.strerror}", where="--host", mend="--host 127.0.0.1")
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(
            f"this machine has no address {host}", where="--host", mend="127.0.0.1, or 0.0.0.0 for all of its"
        )
    problem = f"port {port} of {host}: {error.strerror}"
    return UserError(problem, where="--port", mend="another port, or 0 for any free one")
