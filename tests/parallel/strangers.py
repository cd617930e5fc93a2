"""What another user of the machine does at the sockets of a shared-memory group, in a process of his own."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection

NOBODY = 65534
CONNECT_S = 60.0


def call_silently(name: str, pipe: Connection) -> None:
    """Call rank 0 and say nothing."""
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX) as sock:
        until = time.monotonic() + CONNECT_S
        while sock.connect_ex(name) and time.monotonic() < until:
            time.sleep(0.01)
        pipe.send("called")
        pipe.recv()


def listen(name: str, pipe: Connection) -> None:
    """Take rank 0's name, and hand whoever calls a memory of mine. Sends on what was heard."""
    os.setuid(NOBODY)
    memory = os.memfd_create("stranger")
    os.ftruncate(memory, 1 << 16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        pipe.send("listens")
        peer, _ = listener.accept()
        with peer:
            heard = peer.recv(64)
            if heard:
                socket.send_fds(peer, [b"\0"], [memory])
            pipe.send(heard)
