"""How the ranks of a ShmComm meet, wait for each other, and notice that one is gone."""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable

from rayk.types.errors import CommError

_HELLO = struct.Struct("<qqq")
_CREDENTIALS = struct.Struct("3i")
_RETRY_S = 0.005

_NUM_SPINS = 50
_YIELD_S = 0.0005
"""Waits shorter than this never sleep: ranks of one step are a few hundred microseconds apart."""
_FIRST_PAUSE_S = 0.00005
_LONG_PAUSE_MS = 1
_IDLE_S = 0.2
_IDLE_PAUSE_MS = 2
"""The ranks of an idle engine wake this rarely, so that each costs about 1% of a core."""


class Link:
    """One rank's end: the shared memory and sockets to the ranks it watches.

    Rank 0 watches everybody; the others watch rank 0, which tells them who else is gone.
    """

    def __init__(self, rank: int, memory: mmap.mmap, sockets: dict[int, socket.socket]) -> None:
        self.memory = memory
        self._rank = rank
        self._sockets = sockets
        self._poll = select.poll()
        self._by_fd = {s.fileno(): rank for rank, s in sockets.items()}
        self._gone: set[int] = set()
        for sock in sockets.values():
            sock.setblocking(False)
            self._poll.register(sock, select.POLLIN)

    def wait_for(self, flags: memoryview, index: int, number: int, timeout_s: float) -> None:
        """Wait until flags[index] >= number: spin, then yield, then sleep for growing times up to 2 ms.

        Raises TimeoutError, and ConnectionError if a rank whose flag is still low is gone.
        """
        for _ in range(_NUM_SPINS):
            if flags[index] >= number:
                return
        start = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while flags[index] < number:
            waited_s = time.monotonic() - start
            if waited_s < _YIELD_S:
                os.sched_yield()
            elif waited_s > timeout_s:
                raise TimeoutError
            elif pause_s < _LONG_PAUSE_MS / 1000:
                time.sleep(pause_s)
                pause_s *= 1.5
            else:
                self._look_for_gone(_LONG_PAUSE_MS if waited_s < _IDLE_S else _IDLE_PAUSE_MS)
                # A rank that left may have raised its flag first.
                missing = [r for r in self._gone if flags[r * 8] < number]
                if missing and flags[index] < number:
                    raise ConnectionError(f"rank {missing[0]} is gone (killed, or left the group)")

    def _look_for_gone(self, wait_ms: int) -> None:
        for fd, _ in self._poll.poll(wait_ms):
            rank = self._by_fd[fd]
            try:
                told = self._sockets[rank].recv(64)
            except BlockingIOError:
                continue
            except OSError:
                told = b""
            if not told:
                self._poll.unregister(fd)
            newly = set(told or bytes([rank])) - self._gone
            self._gone |= newly
            if self._rank == 0:
                self._tell(bytes(newly))

    def _tell(self, gone: bytes) -> None:
        for rank, sock in self._sockets.items():
            if rank not in self._gone:
                try:
                    sock.send(gone)
                except OSError:
                    continue  # The next poll finds that it is gone too.

    def close(self) -> None:
        """Close the sockets, which tells the others."""
        for sock in self._sockets.values():
            sock.close()


def connect(rank: int, size: int, address: str, num_bytes: int, timeout_s: float) -> Link:
    """Meet the other ranks. Raises CommError if they have not all come within the timeout."""
    assert 0 <= rank < size <= 255, (rank, size)
    # A leading NUL makes an abstract name, gone with the socket; any user may bind or connect to it.
    key = hashlib.blake2b(f"{os.geteuid()} {address}".encode(), digest_size=16).hexdigest()
    name = f"\0rayk-shm-{key}"
    deadline = time.monotonic() + timeout_s
    try:
        if rank == 0:
            return _host(size, name, num_bytes, deadline)
        return _join(rank, size, name, num_bytes, deadline)
    except TimeoutError as error:
        raise CommError(
            "connect", f"rank {rank} of {size}: {error} within {timeout_s:g} s at {address}"
        ) from None


def _host(size: int, name: str, num_bytes: int, deadline: float) -> Link:
    peers: dict[int, socket.socket] = {}
    fd = os.memfd_create("rayk-shm")
    try:
        os.ftruncate(fd, num_bytes)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _retry(lambda: listener.bind(name), deadline, "the address is in use")
            listener.listen(size)
            while len(peers) < size - 1:
                _accept(listener, peers, size, num_bytes, deadline)
        for peer in peers.values():
            socket.send_fds(peer, [b"\0"], [fd])
        return Link(0, mmap.mmap(fd, num_bytes), peers)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    finally:
        os.close(fd)


def _accept(
    listener: socket.socket,
    peers: dict[int, socket.socket],
    size: int,
    num_bytes: int,
    deadline: float,
) -> None:
    """Accept one peer, or turn it away if it does not belong to the group."""
    missing = sorted(set(range(1, size)) - set(peers))
    listener.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        peer, _ = listener.accept()
    except TimeoutError:
        raise TimeoutError(f"ranks {missing} did not come") from None
    if _user_of(peer) != os.geteuid():
        peer.close()
        return
    peer.settimeout(max(0.001, deadline - time.monotonic()))
    hello = peer.recv(_HELLO.size)
    if len(hello) < _HELLO.size:
        peer.close()
        return
    rank, their_size, their_bytes = _HELLO.unpack(hello)
    if (their_size, their_bytes) != (size, num_bytes) or not 0 < rank < size:
        peer.close()
        raise CommError("connect", f"rank {rank} wants a group of {their_size}, {their_bytes} bytes")
    if rank in peers:
        peers[rank].close()
    peers[rank] = peer


def _user_of(peer: socket.socket) -> int:
    """Ask the kernel for the peer's user id."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return int(uid)


def _join(rank: int, size: int, name: str, num_bytes: int, deadline: float) -> Link:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _retry(lambda: sock.connect(name), deadline, "rank 0 did not come")
        if (uid := _user_of(sock)) != os.geteuid():
            sock.close()
            raise CommError("connect", f"user {uid} listens where rank 0 should")
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.sendall(_HELLO.pack(rank, size, num_bytes))
        told, fds, _, _ = socket.recv_fds(sock, 1, 1)
    except TimeoutError as error:
        sock.close()
        raise TimeoutError(str(error) or "the group was not complete") from None
    except OSError:
        told, fds = b"", []
    if not told or not fds:
        sock.close()
        raise CommError("connect", f"rank 0 turned rank {rank} away, or was killed")
    try:
        return Link(rank, mmap.mmap(fds[0], num_bytes), {0: sock})
    finally:
        os.close(fds[0])


def _retry(call: Callable[[], object], deadline: float, complaint: str) -> None:
    """Call until it works; TimeoutError(complaint) at the deadline."""
    while True:
        try:
            call()
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(complaint) from None
            time.sleep(_RETRY_S)
        else:
            return
