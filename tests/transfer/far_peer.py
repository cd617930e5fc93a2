"""Two processes: on one host, or sharing no network but a cable, each in a namespace of its own, joined by a
veth pair.

with two_hosts() as (producer, consumer):
    producer("describe")        # a method of Producer or Consumer below, run in its process

The namespaces have no names: they end with their processes, however those end.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.213.0.1", "10.213.0.2")
# /sys lists network devices, to UCX as well: it must be that of the namespace.
ENTER = 'mount -t sysfs sysfs /sys && ip link set lo up && exec "$@"'
Call = Callable[..., Any]
TOO_LATE = "it was over before its middle"
Process = subprocess.Popen[bytes]


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"no `{tool}` here"
    test = ["unshare", "--net", "--mount", "sh", "-c", ENTER, "sh"]
    test += ["ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"]
    done = subprocess.run(test, capture_output=True, text=True, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


@contextmanager
def two_hosts(
    tls: str = "tcp", *, end: Callable[[Process], None] | None = None, staging: Any = None
) -> Iterator[tuple[Call, Call]]:
    """A producer and a consumer process. Both end with the block, by `end` (None: closing their agents)."""
    with ExitStack() as stack:
        calls, pids = [], []
        enter = ["unshare", "--net", "--mount", "sh", "-c", ENTER, "sh"]
        for role in ("Producer", "Consumer"):
            call, process = _start(stack, role, enter, tls, end or _end)
            calls.append(call)
            pids.append(process.pid)
        cable = f"rk{os.getpid()}"[-12:]
        _ip(f"link add {cable}p type veth peer name {cable}c")
        for pid, end, address in zip(pids, (f"{cable}p", f"{cable}c"), ADDRESSES, strict=True):
            _ip(f"link set {end} netns {pid}")
            _ip(f"link set {end} name cable up", pid)
            _ip(f"addr add {address}/24 dev cable", pid)
        for call in calls:
            call("start", None, staging)
        yield calls[0], calls[1]


@contextmanager
def two_processes(shape: Any, staging: Any = None) -> Iterator[tuple[Call, Call]]:
    """A producer and a consumer process of this host, holding engines of this shape; UCX finds its way."""
    with ExitStack() as stack:
        calls = [_start(stack, role, [], None, _end)[0] for role in ("Producer", "Consumer")]
        for call in calls:
            call("start", shape, staging)
        yield calls[0], calls[1]


def _start(
    stack: ExitStack, role: str, enter: list[str], tls: str | None, end: Callable[[Process], None]
) -> tuple[Call, Process]:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [*enter, sys.executable, "-m", "tests.transfer.far_peer", role, str(theirs.fileno())],
        cwd=ROOT,
        env=os.environ | ({"UCX_TLS": tls} if tls else {}) | {"UCX_WARN_UNUSED_ENV_VARS": "n"},
        pass_fds=[theirs.fileno()],
    )
    stack.callback(end, process)
    theirs.close()
    connection = stack.enter_context(Connection(ours.detach()))

    def call(method: str, *arguments: Any, timeout_s: float = 200.0) -> Any:
        connection.send((method, arguments))
        assert connection.poll(timeout_s), f"{role}.{method}: no answer within {timeout_s} s"
        answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert call("pid") == process.pid, "it is in its namespace"
    return call, process


def connect(producer: Call, consumer: Call) -> None:
    """Handshake between both."""
    sides = producer("describe"), consumer("describe")
    for call in (producer, consumer):
        call("connect", *sides)


def lose_power(process: Process) -> None:
    """End a host behind a cut cable. UCX crashes when an agent is closed, or its process ends, while reads
    are under way that nobody answers."""
    process.kill()
    process.wait()


def _end(process: Process) -> None:
    """Its connection is closed, which it takes as an end; one that cannot is killed. None may crash."""
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.returncode in (0, -signal.SIGKILL), process.returncode


def _ip(arguments: str, pid: int | None = None) -> None:
    inside = [] if pid is None else ["nsenter", "--net", "--target", str(pid)]
    subprocess.run([*inside, "ip", *arguments.split()], check=True)


class Peer:
    """One engine in one process. Its methods are called from afar; in between it is polled."""

    side: int

    def __init__(self) -> None:
        self.engine: Any = None

    def pid(self) -> int:
        return os.getpid()

    def start(self, shape: Any = None, staging: Any = None) -> None:
        """Once the cable is there."""
        import torch

        from rayk.transfer.nixl_agent import NixlAgent
        from tests.transfer.cluster import Shape, make_engine

        torch.set_num_threads(1)
        self.shape = shape or Shape(
            tp=(2, 1),
            layouts=("BLNHC", "LBHNC"),
            head_sizes=(64, 64),
            block_sizes=(64, 32),
            num_blocks=(600, 1200),
        )
        self.engine = make_engine(
            self.shape, self.side, lambda name: NixlAgent(name, error_handling="peer"), staging=staging
        )

    def describe(self) -> list[Any]:
        return self.engine.descriptions

    def connect(self, producers: list[Any], consumers: list[Any]) -> None:
        """Handshake; the consumer's comes second, with the wiring, while the producer is polled."""
        for rank in self.engine.ranks:
            rank.connect(producers, consumers)
            while self.side == 1 and not rank.wire("p", 100.0):
                pass

    def close(self) -> None:
        """Give back what the agents hold."""
        for rank in self.engine.ranks if self.engine is not None else ():
            rank.close()
        self.engine = None

    def poll(self) -> list[Any]:
        """Make progress; outcomes."""
        ranks = self.engine.ranks if self.engine is not None else []
        return [outcome for rank in ranks for outcome in rank.poll(time.monotonic_ns())]


class Producer(Peer):
    """Holds KV."""

    side = 0

    def ticket(self, num_tokens: int, request_id: str) -> Any:
        tables = self.engine.tables(num_tokens)
        self.engine.write(self.shape.values(num_tokens), tables)
        return self.engine.ticket(num_tokens, tables, request_id)

    def released(self) -> list[list[str]]:
        """Leases released at each rank."""
        return [rank.released() for rank in self.engine.ranks]


class Consumer(Peer):
    """Reads it."""

    side = 1

    def read(self, ticket: Any) -> tuple[float, Any]:
        """Seconds and outcome of a transfer, whose every byte is compared."""
        tables, seconds, outcome = self._read(ticket, 100.0)
        if outcome.error is None:
            self.engine.check_all(self.shape.values(ticket.num_tokens), tables)
        return seconds, outcome

    def read_until_some_landed(self, ticket: Any, pid: int | None, deadline_s: float) -> tuple[float, Any]:
        """In the middle of a transfer, end the producer (its process, or None: the cable). Seconds from then,
        and the outcome."""

        def lose() -> None:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            else:
                _ip("link set cable down")

        _, seconds, outcome = self._read(ticket, deadline_s, lose)
        return seconds, outcome

    def staging_in_use(self) -> list[tuple[int, int]]:
        """By rank: stretches of the staging buffer that are lent, and reads that wait for one."""
        buffers = [rank._staging.buffer for rank in self.engine.ranks]
        return [(b.num_lent, b.num_waiting) for b in buffers]

    def _read(
        self, ticket: Any, deadline_s: float, in_the_middle: Callable[[], None] | None = None
    ) -> tuple[Any, float, Any]:
        from tests.transfer.cluster import POISON

        tables = self.engine.tables(ticket.num_tokens)
        pages = self.engine.caches[0].buffer[: -(1 << 20) : 4099]
        began = time.monotonic()
        self.engine.ranks[0].start(ticket, tables, time.monotonic_ns() + int(deadline_s * 1e9))
        while not (outcomes := self.poll()):
            if in_the_middle is not None and bool((pages != POISON).any()):
                began = time.monotonic()
                in_the_middle()
                in_the_middle = None
        assert in_the_middle is None, TOO_LATE
        return tables, time.monotonic() - began, outcomes[0]


def main() -> None:
    """Answer calls until the other end closes."""
    peer: Peer = {"Producer": Producer, "Consumer": Consumer}[sys.argv[1]]()
    with Connection(int(sys.argv[2])) as connection:
        while True:
            while not connection.poll(0.0005):
                peer.poll()
            try:
                method, arguments = connection.recv()
            except EOFError:
                peer.close()
                os._exit(0)
            try:
                connection.send(getattr(peer, method)(*arguments))
            except Exception as error:  # noqa: BLE001 - the caller's to judge
                connection.send(error)


if __name__ == "__main__":
    main()
