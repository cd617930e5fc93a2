"""Notifications as bytes that say whether they are whole. Pure.

A release or an arrival that was changed under way must not pass for another one: blocks would be handed out
early. What cannot be read is not answered; leases and sessions end by their deadlines. Anybody who knows an
agent can send one: nothing in it is used before it was looked at.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 1 << 20
"""Longer notifications are not read."""


def pack(fields: Sequence[object]) -> bytes:
    """Write JSON behind its CRC-32 in 8 hexadecimal digits."""
    content = json.dumps(list(fields)).encode()
    return b"%08x" % zlib.crc32(content) + content


def unpack(message: bytes) -> list[Any] | None:
    """Return what was sealed; None for anything else."""
    check, content = message[:8], message[8:]
    if len(message) > MAX_BYTES or check != b"%08x" % zlib.crc32(content):
        return None
    try:
        fields = json.loads(content.decode())
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, list) else None


def is_count(value: object) -> bool:
    """Tell whether a peer sent a whole number that is not negative, and fits a table's column: JSON knows
    Infinity, true and numbers of any length, too."""
    return type(value) is int and 0 <= value < 1 << 63
