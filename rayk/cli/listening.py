"""Find what listens on the ports of this machine's processes of Ray's and rayk's. Every port is asked as a
stranger would: over HTTP, over gRPC, then as a caller of rayk's lines."""

from __future__ import annotations

import http.client
import ipaddress
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayk.actors.environment import greeting, is_grpc, open_channel
from rayk.lines.line import NONCE_BYTES, PROOF_BYTES

PROBE_S = 5.0
NUM_PROBES = 16  # at once
GUARDED, OPEN, OTHER, LATE = "guarded", "open", "other", "late"
_PATH = "/api/jobs/"  # Ray's dashboard and other HTTP servers ask for their token or key here
# calls without effect of Ray's services: a server asks for its token only in services that it has
_CALLS = (
    "ray.rpc.NodeInfoGcsService/CheckAlive", "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.CoreWorkerService/GetCoreWorkerStats", "ray.rpc.ObjectManagerService/Pull",
    "ray.rpc.ReporterService/ReportOCMetrics", "ray.rpc.RayletDriver/ClusterInfo",
    "ray.serve.ASGIService/HandleRequest",
)  # fmt: skip
_SCRIPTS = {"ray/dashboard/dashboard.py": "Ray's dashboard", "ray.util.client.server": "Ray's client server"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    host: str
    port: int
    program: str
    pid: int

    @property
    def is_loopback(self) -> bool:
        """Tell whether processes of this machine alone can reach it."""
        return ipaddress.ip_address(self.host).is_loopback


@dataclass(frozen=True, kw_only=True, slots=True)
class PortAnswer:
    """Records what a port said to somebody without token or key."""

    status: str
    """guarded; open (serves whoever comes); other (a protocol that asks nobody and runs nothing); late
    (speaks HTTP or gRPC, and whom it serves is not known)."""
    text: str


def ray_ports(root: int | None = None) -> list[Port]:
    """List the ports of Ray's processes, of what these started, and of their drivers; where root asks, also
    of other users'. `root` limits them to a process and its descendants."""
    import psutil

    found = []
    programs = _programs(psutil)
    if root is not None:
        of_root = {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}
        programs = {pid: program for pid, program in programs.items() if pid in of_root}
    for pid, program in sorted(programs.items()):
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.Error:  # it has ended, or is another user's
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN:
                host, port = connection.laddr
                found.append(Port(host=_plain(host), port=port, program=program, pid=pid))
    return found


def _programs(psutil: Any) -> dict[int, str]:
    processes = {p.pid: p for p in psutil.process_iter(["cmdline", "ppid"], ad_value=None)}
    named = {pid: name for pid, p in processes.items() if (name := _name(p.info["cmdline"] or []))}
    for pid in list(named):
        parent = processes.get(processes[pid].info["ppid"])
        if named[pid] in ("gcs_server", "raylet") and parent is not None and parent.pid > 1:
            named.setdefault(parent.pid, f"driver ({_short(parent.info['cmdline'] or [])})")
    for pid, process in processes.items():
        ancestor, seen = process.info["ppid"], {pid}
        while pid not in named and ancestor in processes and ancestor not in seen:
            if named.get(ancestor) == "raylet":
                named[pid] = _short(process.info["cmdline"] or [])
            seen.add(ancestor)
            ancestor = processes[ancestor].info["ppid"]
    return named


def _name(command: list[str]) -> str | None:
    """Name a process of Ray's or rayk's; None for anybody else's."""
    words = " ".join(command)
    first = Path(words.partition(" ")[0]).name
    if first in ("gcs_server", "raylet") or first.startswith("ray::"):
        return first
    for script, name in _SCRIPTS.items():
        if script in words:
            return name
    if any(Path(word).name == "rayk" for word in command[:2]):
        return f"driver ({_short(command)})"
    return None


def _short(command: list[str]) -> str:
    words = [Path(word).name if "/" in word else word for word in command[:3]]
    return " ".join(words)[:40]


def _plain(host: str) -> str:
    """Turn ::ffff:127.0.0.1 into 127.0.0.1."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def answers(ports: list[Port]) -> Iterator[tuple[Port, PortAnswer]]:
    with ThreadPoolExecutor(NUM_PROBES) as pool:
        yield from zip(ports, pool.map(lambda p: ask(p.host, p.port), ports), strict=True)


def ask(host: str, port: int) -> PortAnswer:
    """Ask a port without token or key."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - as it is listed
    return _ask_http(reached, port) or _ask_grpc(reached, port) or _ask_line(reached, port)


def _ask_http(host: str, port: int) -> PortAnswer | None:
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_S)
    try:
        connection.request("GET", _PATH)
        response = connection.getresponse()
        body = response.read(1 << 12)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    told = f"HTTP {response.status}"
    if response.status in (401, 403):
        return PortAnswer(status=GUARDED, text=f"asks for a token or key ({told})")
    if body.startswith(b"# HELP"):
        return PortAnswer(status=OTHER, text="metrics, for whoever asks")
    return PortAnswer(status=OPEN, text=f"serves whoever comes ({told})")


def _ask_grpc(host: str, port: int) -> PortAnswer | None:
    import grpc

    try:
        with socket.create_connection((host, port), timeout=PROBE_S) as connection:
            head = greeting(connection, PROBE_S)
    except OSError:
        return None
    if head.startswith(b"HTTP/"):
        return PortAnswer(status=LATE, text="HTTP that does not answer in time")
    if not is_grpc(head):
        return None
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with open_channel(where) as channel:
        for call in _CALLS:
            code = _code(grpc, channel, f"/{call}")
            if code is grpc.StatusCode.UNAUTHENTICATED:
                return PortAnswer(status=GUARDED, text="asks for a token (gRPC UNAUTHENTICATED)")
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return PortAnswer(status=LATE, text=f"gRPC that does not answer in time ({code.name})")
            if code is not grpc.StatusCode.UNIMPLEMENTED:
                return PortAnswer(status=OPEN, text=f"serves whoever comes (gRPC {code.name} to {call})")
    return PortAnswer(status=OPEN, text="gRPC of no service known here")


def _code(grpc: Any, channel: Any, method: str) -> Any:
    try:
        channel.unary_unary(method)(b"", timeout=PROBE_S)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _ask_line(host: str, port: int) -> PortAnswer:
    try:
        with socket.create_connection((host, port), timeout=PROBE_S) as connection:
            connection.sendall(bytes(NONCE_BYTES))
            told = connection.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
    except OSError:
        told = b""
    if len(told) == NONCE_BYTES + PROOF_BYTES:
        return PortAnswer(status=GUARDED, text="asks for proof of its secret (a line of rayk's)")
    return PortAnswer(status=OTHER, text="no HTTP, gRPC or line (torch's store, gloo or UCX)")
