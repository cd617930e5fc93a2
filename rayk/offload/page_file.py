"""The format of a page file: a header of `HEADER_BYTES`, then the page.

The header says what the file should be (whose pages, which group, which key, how long) and carries a digest
of the page and one of itself. A file that is not exactly what its reader asked for is never served: it is
shorter or longer, its bytes changed, or it is somebody else's.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

FORMAT_VERSION = 1  # goes up with every change of the header or of what a page holds
KEY_BYTES = 32
_MAGIC = b"RAYKPAGE"
_DIGEST_BYTES = 32
_START = struct.Struct("<8sI")  # magic and version, which stand here in every version
_FIELDS = struct.Struct("<8sIIQ32s32s32s")
"""Magic, version, group, page bytes, identity, key, digest of the page. The header's own digest follows."""
HEADER_BYTES = _FIELDS.size + _DIGEST_BYTES
_FILE_NAME = re.compile(rf"g(\d{{1,4}})-([0-9a-f]{{{2 * KEY_BYTES}}})((?:-\d{{1,12}})*)\.page")

MISSING, UNREADABLE = "missing", "unreadable"
TRUNCATED, OVERLONG, FLIPPED, FOREIGN = "truncated", "overlong", "flipped", "foreign"
REASONS = (MISSING, UNREADABLE, TRUNCATED, OVERLONG, FLIPPED, FOREIGN)
"""Why a page is not served. `foreign` is a whole file, of another model, format, version, group or key."""


@dataclass(frozen=True, slots=True)
class PageName:
    """A block of a group and of all tokens up to its end."""

    group: int
    key: bytes  # digest of the prefix, `KEY_BYTES` long
    since: tuple[int, ...] = ()
    """Token positions from which on rows are there, by lane of the group; empty: all rows are."""

    @property
    def file_name(self) -> str:
        some = "".join(f"-{row}" for row in self.since)
        return f"g{self.group}-{self.key.hex()}{some}.page"

    @property
    def header_key(self) -> bytes:
        """The header has this in place of key and rows."""
        if not self.since:
            return self.key
        rows = np.array(self.since, dtype="<i8").tobytes()
        return blake2b(self.key + rows, digest_size=KEY_BYTES).digest()


def parse_file_name(file_name: str) -> PageName | None:
    """Return the page that a file of that name should hold; None for a name that no page file has."""
    match = _FILE_NAME.fullmatch(file_name)
    if match is None:
        return None
    return PageName(int(match[1]), bytes.fromhex(match[2]), tuple(map(int, match[3].split("-")[1:])))


@dataclass(frozen=True)
class PageIdentity:
    facts: Mapping[str, str]
    """The model's fingerprint, the cache's dtype or format, fields and block size of each group."""
    page_bytes: tuple[int, ...]  # by group

    @cached_property
    def text(self) -> str:
        """Everything the digest covers, for people to read."""
        facts = {"facts": dict(self.facts), "page_bytes": self.page_bytes, "format_version": FORMAT_VERSION}
        return json.dumps(facts, sort_keys=True, indent=1)

    @cached_property
    def digest(self) -> bytes:
        """It is the same in every process."""
        return blake2b(self.text.encode(), digest_size=_DIGEST_BYTES).digest()

    @property
    def folder_name(self) -> str:
        """The subfolder of this name holds these pages and no others."""
        return self.digest[:16].hex()


def make_header(identity: PageIdentity, name: PageName, page: Bytes) -> Bytes:
    """Return what stands before a page in its file, as bytes that are nobody else's."""
    page_digest = blake2b(page, digest_size=_DIGEST_BYTES).digest()
    fields = _FIELDS.pack(
        _MAGIC, FORMAT_VERSION, name.group, page.nbytes, identity.digest, name.header_key, page_digest
    )
    own = blake2b(fields, digest_size=_DIGEST_BYTES).digest()
    return np.frombuffer(bytearray(fields + own), np.uint8)


def check_length(identity: PageIdentity, name: PageName, num_bytes: int, header: bytes) -> str:
    """Say why a file of `num_bytes` cannot be the page's, "" where its length is right.

    header: its first bytes, as far as there are any: a whole file of something else is told from a cut one.
    """
    expected = HEADER_BYTES + identity.page_bytes[name.group]
    if num_bytes == expected:
        return ""
    if len(header) == HEADER_BYTES and (reason := _check_header(identity, name, header)):
        return reason
    return TRUNCATED if num_bytes < expected else OVERLONG


def check_page(identity: PageIdentity, name: PageName, header: bytes, page: Bytes) -> str:
    """Say why this is not the page, "" where it is, byte for byte."""
    if reason := _check_header(identity, name, header):
        return reason
    page_digest = _FIELDS.unpack_from(header)[-1]
    return "" if blake2b(page, digest_size=_DIGEST_BYTES).digest() == page_digest else FLIPPED


def _check_header(identity: PageIdentity, name: PageName, header: bytes) -> str:
    magic, version = _START.unpack_from(header)
    if magic == _MAGIC and version != FORMAT_VERSION:
        return FOREIGN  # Nothing else is known of another version's header.
    fields, own = header[: _FIELDS.size], header[_FIELDS.size :]
    if magic != _MAGIC or blake2b(fields, digest_size=_DIGEST_BYTES).digest() != own:
        return FLIPPED
    _, _, group, num_bytes, digest, key, _ = _FIELDS.unpack(fields)
    asked = (name.group, identity.page_bytes[name.group], identity.digest, name.header_key)
    return "" if (group, num_bytes, digest, key) == asked else FOREIGN
