"""What `rayk doctor` says of ports that listen, by servers of this process that ask for something or not."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
import pytest

from rayk.cli import checkup, listening
from rayk.cli.listening import GUARDED, LATE, OPEN, OTHER, Port, PortAnswer, ask
from rayk.lines.line import LineService, LineThread
from tests.listeners import listening as talkers
from tests.markers import thorough

UNKNOWN = grpc.StatusCode.UNIMPLEMENTED


@contextmanager
def http_server(status: int, body: bytes = b"") -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(60)


@contextmanager
def grpc_server(service: str, code: grpc.StatusCode) -> Iterator[int]:
    """It has one service, as Ray's processes do, where each call ends with `code`."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            if service not in details.method:
                return None
            return grpc.unary_unary_rpc_method_handler(answer)

    def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
        if code is not grpc.StatusCode.OK:
            context.abort(code, "")
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait(60)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [(401, b"", GUARDED), (403, b"", GUARDED), (404, b"", OPEN), (200, b"# HELP ray_x", OTHER)],
)
def test_http(status: int, body: bytes, expected: str) -> None:
    with http_server(status, body) as port:
        assert ask("127.0.0.1", port).status == expected


@pytest.mark.parametrize(
    "service",
    ["NodeInfoGcs", "NodeManager", "CoreWorker", "ObjectManager", "Reporter", "RayletDriver", "ASGI"],
)
@pytest.mark.parametrize(
    ("code", "expected"), [(grpc.StatusCode.UNAUTHENTICATED, GUARDED), (grpc.StatusCode.OK, OPEN)]
)
def test_grpc(service: str, code: grpc.StatusCode, expected: str) -> None:
    with grpc_server(service, code) as port:
        assert ask("127.0.0.1", port).status == expected


@thorough
def test_who_greets_and_answers_no_more_is_not_told_as_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "PROBE_S", 2.0)
    with talkers(b"\0\0\0\4\0\0\0\0\0", closes=False) as address:
        assert ask("127.0.0.1", int(address.partition(":")[2])).status == LATE
    for code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
        with grpc_server("NodeInfoGcs", code) as port:
            assert ask("127.0.0.1", port).status == LATE
    monkeypatch.setattr(listening, "_ask_http", lambda *_: None)  # as when its time is over
    with talkers(b"HTTP/1.1 400 Bad Request", closes=False) as address:
        assert ask("127.0.0.1", int(address.partition(":")[2])).status == LATE


def test_a_line_asks_for_its_secret_and_others_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineThread(LineService(calls={"echo": asyncio.sleep}))
    try:
        assert ask("127.0.0.1", lines.open("127.0.0.1").port).status == GUARDED
    finally:
        lines.close()
    with talkers(b"no known word", closes=True) as address:
        assert ask("127.0.0.1", int(address.partition(":")[2])).status == OTHER


def test_ipv4_in_ipv6_clothes_is_loopback() -> None:
    with socket.socket(socket.AF_INET6) as mapped:
        mapped.bind(("::ffff:127.0.0.1", 0))
        host = listening._plain(mapped.getsockname()[0])
    assert host == "127.0.0.1"
    for bound, is_loopback in ((host, True), ("::1", True), ("::", False), ("0.0.0.0", False)):
        assert Port(host=bound, port=1, program="x", pid=1).is_loopback == is_loopback


def test_doctor_says_who_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        1: PortAnswer(status=GUARDED, text="asks"),
        2: PortAnswer(status=GUARDED, text="asks"),
        3: PortAnswer(status=OPEN, text="serves"),
        4: PortAnswer(status=OTHER, text="metrics"),
        5: PortAnswer(status=LATE, text="late"),
    }
    ports = [Port(host="127.0.0.1", port=n, program="raylet", pid=1) for n in said]
    ports.append(Port(host="0.0.0.0", port=4, program="ray::ProxyActor", pid=2))
    monkeypatch.setattr(checkup, "ray_ports", lambda: ports)
    monkeypatch.setattr(listening, "ask", lambda host, port: said[port])
    found = [(f.status, f.found, bool(f.mend)) for f in checkup._listening()]
    assert found == [
        (
            "note",
            "0.0.0.0 4: metrics; bounds no slow heads and, where rayk did not start the cluster, no clients "
            "that never read",
            True,
        ),
        ("ok", "127.0.0.1 1, 2: asks", False),
        ("note", "127.0.0.1 5: late", True),
        ("ok", "127.0.0.1 4: metrics", False),
        ("note", "127.0.0.1 3: serves", True),
    ]


@pytest.mark.parametrize("address", ["auto", "nonsense", "ray://h", "127.0.0.1:1", "127.0.0.1:99999999"])
def test_no_address_crashes_the_doctor(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_running_clusters", list)
    found = checkup._cluster(address)
    assert found.status == ("ok" if address == "auto" else "note")


def test_this_machine_is_looked_through() -> None:
    assert all(isinstance(port, Port) for port in listening.ray_ports())
