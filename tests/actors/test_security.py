"""Who gets into a Ray cluster that rayk starts: its own processes and nobody else."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from rayk.actors.environment import (
    AUTH_MODE,
    BEYOND_LOOPBACK,
    TOKEN,
    is_protected,
    open_channel,
    own_cluster,
)
from tests.markers import ray, thorough

LISTENS = "0A"
"""A listening socket's state in /proc/net/tcp."""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, also as IPv6 writes it, and ::1, as the kernel does."""
AGENTS = {b"ray::DashboardA", b"ray::RuntimeEnv"}
"""What the kernel calls them."""


def content(path: Path) -> bytes:
    """Of a file, which may be gone, or another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def processes_with(token: str) -> list[Path]:
    """Folders in /proc of the processes that were started with this token in their environment.

    Ray's agents write their titles over what the kernel shows of theirs, or over a part of it, in which the
    token may be: they count as the raylet's children.
    """
    stats = {p: content(p / "stat").rpartition(b")")[2].split() for p in Path("/proc").glob("[0-9]*")}
    parents = {p: stat[1].decode() for p, stat in stats.items() if stat}
    named = {p for p in parents if token.encode() in content(p / "environ")}
    raylets = {p.name for p in named if b"raylet" in content(p / "comm")}
    return [p for p in parents if p in named or parents[p] in raylets]


def listening(processes: list[Path]) -> dict[int, str]:
    """Ports that they listen at, and the addresses, as the kernel writes them."""
    inodes = set()
    for folder in processes:
        try:
            links = [str(link.readlink()) for link in (folder / "fd").iterdir()]
        except OSError:
            continue
        inodes |= {found[1] for link in links if (found := re.match(r"socket:\[(\d+)\]", link))}
    tables = [Path("/proc/net", table).read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [line.split() for lines in tables for line in lines]
    ours = [row[1] for row in rows if row[3] == LISTENS and row[9] in inodes]
    return {int(where.partition(":")[2], 16): where.partition(":")[0] for where in ours}


def status_of(port: int, token: str | None = None, answer_s: float = 60) -> int | None:
    """What a job agent's port answers to who asks for its jobs; None: no HTTP is spoken there in time."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/api/job_agent/jobs/x/logs", headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=answer_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return None


def refusals(address: str, token: str) -> set[Any]:
    """What the GCS answers to the first calls of who joins, or who stores a function to be run; by Ray's own
    stubs."""
    found = set()
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with open_channel(address) as channel:
        for call, request in (
            (gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).GetAllNodeInfo, "GetAllNodeInfoRequest"),
            (gcs_service_pb2_grpc.JobInfoGcsServiceStub(channel).GetNextJobID, "GetNextJobIDRequest"),
            (gcs_service_pb2_grpc.InternalKVGcsServiceStub(channel).InternalKVPut, "InternalKVPutRequest"),
        ):
            try:
                call(getattr(gcs_service_pb2, request)(), metadata=metadata, timeout=60)
            except grpc.RpcError as error:
                found.add(error.code())
            else:
                found.add(grpc.StatusCode.OK)
    return found


@thorough
@ray
def test_strangers_are_refused_and_nothing_is_left_behind() -> None:
    from rayk.actors import launch
    from rayk.actors.ray_private import ray_environment

    users = {AUTH_MODE: "disabled", TOKEN: None, "RAY_ADDRESS": None}  # for other clusters
    with ray_environment(users), socket.socket() as other:
        with suppress(OSError):  # another cluster's agent has it
            other.bind(("127.0.0.1", DEFAULT_DASHBOARD_AGENT_LISTEN_PORT))
            other.listen()
        before = dict(os.environ)
        with launch.connect(None) as joined:
            assert joined.is_own
            assert joined.is_protected
            check(joined.address, os.environ[TOKEN])
        assert dict(os.environ) == before


def check(address: str, token: str) -> None:
    """That who does not know the token comes in nowhere, and finds it nowhere."""
    from ray._private import worker

    assert is_protected(address)
    ours = processes_with(token)
    assert any(b"gcs_server" in content(p / "cmdline") for p in ours)
    agents: list[int] = []  # of jobs, of environments: the latter listens a little after the cluster is there
    until = time.monotonic() + 120
    while len(agents) < len(AGENTS) and time.monotonic() < until:
        ours = processes_with(token)
        ports = listening(ours)
        assert set(ports.values()) <= LOOPBACK, ports
        # Ray leaves metrics to everybody, whatever is asked for; whoever has jobs asks for the token.
        # One that takes connections and says nothing, while the others start, must not take all the time.
        statuses = {port: status_of(port, answer_s=5) for port in ports}
        agents = [port for port, status in statuses.items() if status == 401]
    assert {content(p / "comm").strip() for p in ours for port in agents if port in listening([p])} == AGENTS
    assert not {status_of(port, token) for port in agents} & {None, 401, 403}
    assert set(statuses.values()) <= {None, 401, 404, 200}
    assert refusals(address, "") == refusals(address, "x" * 64) == {grpc.StatusCode.UNAUTHENTICATED}
    assert grpc.StatusCode.UNAUTHENTICATED not in refusals(address, token)

    node: Any = worker._global_node
    session = Path(node.get_session_dir_path())
    assert session.parent.parent.stat().st_mode & 0o777 == 0o700
    files = [*Path("/proc").glob("[0-9]*/cmdline"), *(p for p in session.rglob("*") if p.is_file())]
    assert not [path for path in files if token.encode() in content(path)]


def test_ray_goes_by_what_is_set_and_then_by_what_was() -> None:
    from ray import _raylet
    from ray.util import get_node_ip_address

    from rayk.actors.ray_private import ray_environment

    def sent() -> str:
        headers = _raylet.AuthenticationTokenLoader.instance().get_token_for_http_header()
        return str(headers.get("authorization", ""))

    before, host = dict(os.environ), get_node_ip_address()
    with ray_environment({AUTH_MODE: "disabled", TOKEN: None, BEYOND_LOOPBACK: None}):
        assert not sent()
        for values in (own_cluster(), own_cluster()):
            with ray_environment(values):
                assert sent() == f"Bearer {values[TOKEN]}"
                assert get_node_ip_address() == "127.0.0.1"
            assert not sent()
    assert dict(os.environ) == before
    assert get_node_ip_address() == host


@thorough
def test_importing_rayk_leaves_nothing_in_the_environment(tmp_path: Path) -> None:
    code = (
        "import os, ray, ray.serve; before = dict(os.environ)\n"
        "import rayk, rayk.actors.launch, rayk.serve.ray_serve, rayk.serve.llm\n"
        "assert dict(os.environ) == before, set(os.environ) ^ set(before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
