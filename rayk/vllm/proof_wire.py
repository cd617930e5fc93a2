"""How D's workers ask P's workers for proofs: TCP, both sides prove that they know a secret, a fixed format.

The server greets with a nonce; the client answers with its own and an HMAC of both; the server answers with
another. After that each message is a length, an HMAC of (direction, number, body) under a key of this
connection alone, and the body: nothing that was recorded is worth anything on another connection. Lengths are
bounded before anything is read, waits have deadlines, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rayk.types.errors import TransferError, UserError

GREETING = b"RAYK-KV1"
NONCE_BYTES, TAG_BYTES = 32, 32
MIN_SECRET_CHARACTERS = 16
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 1 << 30
MAX_CONNECTIONS = 256
"""Connections that a server holds at a time; what comes beyond is closed at once."""
MAX_PORT = (1 << 16) - 1
HANDSHAKE_S = 20.0
IDLE_S = 60.0
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")

Address = tuple[str, int]
"""(IP address, port). No names: looking one up has no deadline."""


def read_secret(secret: object = None, secret_file: object = None) -> bytes:
    """Read the secret that P and D share. Raises UserError where there is none, or it is easily guessed."""
    where = "kv_connector_extra_config"
    if (secret is None) == (secret_file is None):
        raise UserError(
            "one of secret and secret_file is needed", where, "give P and D the same random text, or its file"
        )
    if secret_file is not None:
        try:
            secret = Path(str(secret_file)).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UserError(str(error), where, "name a file that vLLM can read") from error
    text = str(secret)
    if len(text) < MIN_SECRET_CHARACTERS:
        raise UserError(
            f"a secret of {len(text)} characters", where, f"take {MIN_SECRET_CHARACTERS} or more, at random"
        )
    return text.encode()


class Channel:
    """A connection on which both sides have proven that they know the secret."""

    def __init__(self, connection: socket.socket, key: bytes, sends: bytes, receives: bytes) -> None:
        self._connection, self._key = connection, key
        self._directions = {"send": sends, "receive": receives}
        self._numbers = {"send": 0, "receive": 0}

    def send(self, body: bytes, deadline: float) -> None:
        """Send one message. Raises OSError where it does not leave by the deadline."""
        _set_timeout(self._connection, deadline)
        self._connection.sendall(_LENGTH.pack(len(body)) + self._tag("send", body) + body)

    def receive(self, max_bytes: int, deadline: float) -> bytes:
        """Receive the next message. Raises ProtocolError if it is too long or not the peer's, OSError where
        none comes by the deadline."""
        (length,) = _LENGTH.unpack(receive_exactly(self._connection, _LENGTH.size, deadline))
        if length > max_bytes:
            raise ProtocolError(f"a message of {length} bytes, at most {max_bytes} are read")
        tag = receive_exactly(self._connection, TAG_BYTES, deadline)
        body = receive_exactly(self._connection, length, deadline)
        if not hmac.compare_digest(tag, self._tag("receive", body)):
            raise ProtocolError("a message that the peer did not send")
        return body

    def _tag(self, direction: str, body: bytes) -> bytes:
        number = self._numbers[direction]
        self._numbers[direction] = number + 1
        return hmac.digest(self._key, self._directions[direction] + _NUMBER.pack(number) + body, "sha256")


class ProtocolError(Exception):
    """The peer does not speak this protocol, or does not know the secret."""


def accept_channel(connection: socket.socket, secret: bytes, deadline: float) -> Channel:
    """Greet a client as the server. Raises ProtocolError where the client does not know the secret."""
    mine = os.urandom(NONCE_BYTES)
    _set_timeout(connection, deadline)
    connection.sendall(GREETING + mine)
    answer = receive_exactly(connection, NONCE_BYTES + TAG_BYTES, deadline)
    theirs, tag = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(tag, hmac.digest(secret, b"client" + mine + theirs, "sha256")):
        raise ProtocolError("the client does not know the secret")
    _set_timeout(connection, deadline)
    connection.sendall(hmac.digest(secret, b"server" + mine + theirs, "sha256"))
    key = hmac.digest(secret, b"session" + mine + theirs, "sha256")
    return Channel(connection, key, b"server", b"client")


def open_channel(connection: socket.socket, secret: bytes, deadline: float) -> Channel:
    """Greet a server as its client. Raises ProtocolError where the server does not know the secret."""
    greeting = receive_exactly(connection, len(GREETING) + NONCE_BYTES, deadline)
    if not greeting.startswith(GREETING):
        raise ProtocolError("no proof server answers there")
    theirs, mine = greeting[len(GREETING) :], os.urandom(NONCE_BYTES)
    _set_timeout(connection, deadline)
    connection.sendall(mine + hmac.digest(secret, b"client" + theirs + mine, "sha256"))
    tag = receive_exactly(connection, TAG_BYTES, deadline)
    if not hmac.compare_digest(tag, hmac.digest(secret, b"server" + theirs + mine, "sha256")):
        raise ProtocolError("the server does not know the secret")
    key = hmac.digest(secret, b"session" + theirs + mine, "sha256")
    return Channel(connection, key, b"client", b"server")


def receive_exactly(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receive this many bytes, however slowly they come. Raises OSError where they are not there by the
    deadline."""
    parts: list[bytes] = []
    missing = num_bytes
    while missing:
        _set_timeout(connection, deadline)
        part = connection.recv(min(missing, 1 << 20))
        if not part:
            raise ConnectionResetError("the peer hung up")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _set_timeout(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline is over")
    connection.settimeout(left)


def ask(address: Address, secret: bytes, requests: list[bytes], deadline: float) -> list[bytes]:
    """Send requests over one connection and return their answers; once more over another where the first
    broke, as the server ends one whose client a busy machine kept from greeting in time. Raises
    TransferError, naming the address, where answers do not come by the deadline."""
    try:
        try:
            return _ask_once(address, secret, requests, deadline)
        except (BrokenPipeError, ConnectionResetError):
            return _ask_once(address, secret, requests, deadline)
    except (OSError, UnicodeError, ProtocolError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        name = f"{address[0]}:{address[1]}"
        raise TransferError("", f"proof: {reason}", producer=name) from error


def _ask_once(address: Address, secret: bytes, requests: list[bytes], deadline: float) -> list[bytes]:
    left = max(0.001, deadline - time.monotonic())
    with socket.create_connection(address, timeout=left) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = open_channel(connection, secret, deadline)
        answers = []
        for request in requests:
            channel.send(request, deadline)
            answers.append(channel.receive(MAX_ANSWER_BYTES, deadline))
        return answers


def _listen(host: str, port: int) -> socket.socket:
    if port > MAX_PORT:
        raise OSError(f"there are {MAX_PORT} ports")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)


@dataclass
class ServerCounts:
    """Counts what a server was sent."""

    answered: int = 0
    refused: int = 0
    """Clients that did not know the secret, or spoke another protocol."""
    turned_away: int = 0
    """Connections above the limit."""


class ProofServer:
    """Answers requests of clients that know the secret, each connection in a thread of its own.

    `answer` makes the answer to one request; it must not wait longer than its asker would. `port` 0 takes a
    free one; `address` tells which.
    """

    def __init__(self, host: str, port: int, secret: bytes, answer: Callable[[bytes], bytes]) -> None:
        self._secret, self._answer = secret, answer
        self.counts = ServerCounts()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_closed = False
        try:
            self._listener = _listen(host, port)
        except OSError as error:
            raise UserError(
                f"no proof server at {host}:{port}: {error}",
                "kv_connector_extra_config",
                "choose another port (each tensor-parallel rank adds its number to it), or 0 for a free one",
            ) from error
        self.address: Address = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="rayk-proof-server", daemon=True).start()

    def close(self) -> None:
        """Stop answering; connections end."""
        with self._lock:
            self._is_closed = True
            connections = [self._listener, *self._open]
        for connection in connections:
            # Wakes the thread that waits on it; closing alone would not.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.05)  # No file descriptors left: some may come back.
                continue
            with self._lock:
                is_welcome = not self._is_closed and len(self._open) < MAX_CONNECTIONS
                if is_welcome:
                    self._open.add(connection)
                else:
                    self.counts.turned_away += 1
            if is_welcome:
                threading.Thread(
                    target=self._serve, args=(connection,), name="rayk-proof", daemon=True
                ).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = accept_channel(connection, self._secret, time.monotonic() + HANDSHAKE_S)
            while True:
                request = channel.receive(MAX_REQUEST_BYTES, time.monotonic() + IDLE_S)
                answer = self._answer(request)
                channel.send(answer, time.monotonic() + IDLE_S)
                with self._lock:
                    self.counts.answered += 1
        except ProtocolError:
            with self._lock:
                self.counts.refused += 1
        except OSError:
            pass  # It hung up, or took too long.
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
