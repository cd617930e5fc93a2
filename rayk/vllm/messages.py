"""Frames between a Ray actor and the process of a vLLM engine: a JSON header and bytes, both bounded.

A frame is `RYK1`, the header's length (uint32) and the body's length (uint64), little endian, then header and
body. Anything else, e.g. a line that somebody printed, is refused at its first bytes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

MAGIC = b"RYK1"
PREFIX = struct.Struct("<4sIQ")
MAX_HEADER_BYTES = 64 << 20
MAX_BODY_BYTES = 4 << 30


class BadFrame(ValueError):
    """What arrived is no frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    header: dict[str, Any]
    body: bytes = b""

    def encode(self) -> bytes:
        """Raises BadFrame where it is too long."""
        header = json.dumps(self.header, separators=(",", ":")).encode()
        _check(len(header), len(self.body))
        return PREFIX.pack(MAGIC, len(header), len(self.body)) + header + self.body


def decode_prefix(prefix: bytes) -> tuple[int, int]:
    """Read the lengths of the header and the body that follow. Raises BadFrame."""
    magic, num_header_bytes, num_body_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise BadFrame(f"{prefix[:16]!r} begins no frame")
    _check(num_header_bytes, num_body_bytes)
    return num_header_bytes, num_body_bytes


def decode_header(header: bytes) -> dict[str, Any]:
    """Raises BadFrame."""
    try:
        found = json.loads(header)
    except ValueError as error:
        raise BadFrame(f"a header is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadFrame(f"a header is no mapping but {type(found).__name__}")
    return found


def read_frame(stream: BinaryIO) -> Frame | None:
    """Read the next frame of a pipe; None at its end. Raises BadFrame."""
    prefix = stream.read(PREFIX.size)
    if not prefix:
        return None
    if len(prefix) < PREFIX.size:
        raise BadFrame("the pipe ended within a frame")
    num_header_bytes, num_body_bytes = decode_prefix(prefix)
    content = stream.read(num_header_bytes + num_body_bytes)
    if len(content) < num_header_bytes + num_body_bytes:
        raise BadFrame("the pipe ended within a frame")
    return Frame(decode_header(content[:num_header_bytes]), content[num_header_bytes:])


def _check(num_header_bytes: int, num_body_bytes: int) -> None:
    if num_header_bytes > MAX_HEADER_BYTES or num_body_bytes > MAX_BODY_BYTES:
        raise BadFrame(
            f"a frame of {num_header_bytes} + {num_body_bytes} bytes, where at most "
            f"{MAX_HEADER_BYTES} + {MAX_BODY_BYTES} may come"
        )
