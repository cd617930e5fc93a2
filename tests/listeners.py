"""Who listens: somebody who says one thing to whoever connects, and this process itself."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
"""What servers of HTTP/2 say first."""


@contextmanager
def listening(says: bytes, *, closes: bool = False) -> Iterator[str]:
    """Its HOST:PORT. `closes`: connections, at once."""
    kept = []

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = server.accept()
                kept.append(connection)
                connection.sendall(says)
                if closes:
                    connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            for connection in kept:
                connection.close()


def listened_at() -> set[tuple[Any, ...]]:
    """The addresses at which this process listens."""
    found = set()
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # it is closed meanwhile
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as copy:
                    is_listening = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if is_listening and copy.family != socket.AF_UNIX:
                        found.add(copy.getsockname())
    return found
