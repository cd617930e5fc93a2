"""Where a server may listen."""

from __future__ import annotations

import socket

import pytest

from rayk.serve.ports import QUIET_PORTS, claim_port, listen, reachable_host, url_of
from rayk.types.errors import UserError


def test_a_free_port_is_given_back() -> None:
    port = claim_port("127.0.0.1", 0)
    assert claim_port("127.0.0.1", port) == port
    with listen("127.0.0.1", port) as listener:
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1: Address already in use"):
            claim_port("127.0.0.1", port)
        with socket.create_connection(listener.getsockname()), listener.accept()[0]:
            pass
    # The closed connection lingers in TIME_WAIT at this port: the next front must have it nevertheless.
    assert claim_port("127.0.0.1", port) == port


@pytest.mark.parametrize(
    ("host", "message"),
    [("192.0.2.1", "this machine has no address 192.0.2.1"), ("no host", "'no host' is no address")],
)
def test_other_addresses_are_refused(host: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        claim_port(host, 0)


def test_urls() -> None:
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert url_of("::1", 80) == "http://[::1]:80"
    assert [reachable_host(h) for h in ("0.0.0.0", "::", "10.0.0.1")] == ["127.0.0.1", "::1", "10.0.0.1"]


def test_any_free_port_is_none_that_others_are_given_at_random() -> None:
    """What starts between the choice and the use asks its system for ports, and gets ephemeral ones."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        ephemeral = other.getsockname()[1]
    found = {claim_port("127.0.0.1", 0) for _ in range(20)}
    assert len(found) > 1
    assert all(port in QUIET_PORTS for port in found)
    assert ephemeral not in QUIET_PORTS
