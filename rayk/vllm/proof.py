"""What P holds of a request, as it keeps, serves and tells of it, and as D fetches it.

P's worker keeps the digests of a request (and its raw rows, where asked to) in `ProofRecords` and serves them
by `serve_records`; a `Ticket` in `kv_transfer_params` tells D where. None of it knows vLLM.
"""

from __future__ import annotations

import ipaddress
import json
import struct
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeGuard

import numpy as np

from rayk.transfer.verify import CanonicalViews, Digests, Rows
from rayk.types.errors import TransferError
from rayk.vllm.proof_wire import MAX_ANSWER_BYTES, Address, ProofServer, ask

BlockIds = Sequence[Sequence[int]]
PartRows = Mapping[tuple[int, str], Rows]
"""(layer, part) -> raw rows."""
MAX_RECORDS = 4096
MAX_RECORD_BYTES = 1 << 30
"""Bytes of all records of a worker: the oldest go first."""
MAX_WAIT_S = 60.0
"""A server waits no longer for a record that is still to come."""
MAX_RANKS = 1024
VERSION = 2
"""Counts the forms of tickets, and of what D asks by them."""
_ANSWER_S = 0.1
"""Left to an answer that says that there is none."""


class Caches(Protocol):
    """The part of `caches.ProvenCaches` that the proof uses."""

    description: dict[str, Any]

    def digests(self, block_ids: BlockIds, num_tokens: int, first_row: int = 0) -> Digests:
        """Compute the digests of a request's live rows."""
        ...

    def rows(self, block_ids: BlockIds, num_tokens: int, first_row: int = 0) -> dict[tuple[int, str], Rows]:
        """Copy the raw live rows, by (layer, part)."""
        ...

    def views(self, block_ids: BlockIds) -> CanonicalViews:
        """Copy a request's blocks."""
        ...


def num_row_bytes(parts: PartRows | None) -> int:
    """Add up the bytes of kept rows."""
    return sum(values.nbytes for rows in (parts or {}).values() for values in rows.values())


def is_sampled(request_id: str, rate: float) -> bool:
    """Return whether a request is proven: the same answer wherever the same id and rate are asked for."""
    number = int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "big")
    return number < rate * 2**64


# What P keeps, and how it is served


@dataclass(frozen=True, eq=False)
class ProofRecord:
    """What one P rank held of a request when its prefill was done."""

    num_tokens: int
    digests: Digests
    rows: PartRows | None = None
    """The raw rows, kept where a mismatch is to be classified."""
    request_id: str = ""

    @property
    def num_bytes(self) -> int:
        return self.digests.nbytes + num_row_bytes(self.rows)


class ProofRecords:
    """Keeps the last requests' records of one P rank, each under its ticket's nonce: a client may send one
    request id twice. Any thread may use it."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._max_records, self._max_bytes = max_records, max_bytes
        self._records: OrderedDict[str, ProofRecord] = OrderedDict()
        self._num_bytes = 0
        self._changed = threading.Condition()

    def put(self, nonce: str, record: ProofRecord) -> None:
        """Keep a record, in place of an older one; the oldest go where there are too many."""
        with self._changed:
            self._pop(nonce)
            self._records[nonce] = record
            self._num_bytes += record.num_bytes
            while len(self._records) > 1 and (
                len(self._records) > self._max_records or self._num_bytes > self._max_bytes
            ):
                self._pop(next(iter(self._records)))
            self._changed.notify_all()

    def get(self, nonce: str, wait_s: float = 0.0) -> ProofRecord | None:
        """Return a ticket's record, after waiting up to `wait_s` for it; None where it does not come."""
        with self._changed:
            self._changed.wait_for(lambda: nonce in self._records, timeout=max(0.0, wait_s))
            return self._records.get(nonce)

    def pop_last(self, request_id: str) -> ProofRecord | None:
        """Return and forget the last record of a request of this id."""
        with self._changed:
            found = (n for n, record in reversed(self._records.items()) if record.request_id == request_id)
            nonce = next(found, None)
            return None if nonce is None else self._pop(nonce)

    def clear(self) -> None:
        """Forget all records."""
        with self._changed:
            self._records.clear()
            self._num_bytes = 0

    def _pop(self, nonce: str) -> ProofRecord | None:
        record = self._records.pop(nonce, None)
        if record is not None:
            self._num_bytes -= record.num_bytes
        return record


_DESCRIBE, _DIGESTS, _ROWS = 1, 2, 3
_OK, _UNKNOWN, _NOT_KEPT, _TOO_LONG, _NOT_UNDERSTOOD, _OTHER_LIFE = range(6)
_STATUS = {
    _UNKNOWN: "P has no digest of it",
    _NOT_KEPT: "P keeps no rows (keep_rows)",
    _TOO_LONG: "P's answer would be too long",
    _NOT_UNDERSTOOD: "P does not understand the question",
    _OTHER_LIFE: "P was started anew since",
}
# what, layer, milliseconds to wait, bytes of the ticket's nonce; then the nonce, and the part or the life
_REQUEST = struct.Struct("<BIIH")
_DIGEST_HEAD = struct.Struct("<BII16s")  # status, tokens, words, the server's life
_ENTRY = struct.Struct("<HIII")  # bytes of the field's name, unit, rows, bytes of a row


def serve_records(
    host: str, port: int, secret: bytes, records: ProofRecords, description: Mapping[str, Any]
) -> tuple[ProofServer, str]:
    """Serve one P rank's records; returns the server and the name of this life of it."""
    life = uuid.uuid4()
    description_answer = bytes([_OK]) + json.dumps(description).encode()

    def answer(request: bytes) -> bytes:
        if len(request) < _REQUEST.size:
            return bytes([_NOT_UNDERSTOOD])
        what, layer, wait_ms, length = _REQUEST.unpack_from(request)
        rest = request[_REQUEST.size :]
        try:
            nonce, part = rest[:length].decode(), rest[length:].decode()
        except UnicodeDecodeError:
            return bytes([_NOT_UNDERSTOOD])
        if what == _DESCRIBE:
            return description_answer
        if what == _DIGESTS and part and part != life.hex:
            return bytes([_OTHER_LIFE])  # At once: its record will never come.
        record = records.get(nonce, min(wait_ms / 1000, MAX_WAIT_S))
        if what == _DIGESTS:
            return _pack_digests(record, life.bytes)
        return _pack_rows(record, layer, part) if what == _ROWS else bytes([_NOT_UNDERSTOOD])

    return ProofServer(host, port, secret, answer), life.hex


def _ask_for(what: int, nonce: str = "", *, layer: int = 0, part: str = "", wait_s: float = 0.0) -> bytes:
    name = nonce.encode()
    return _REQUEST.pack(what, layer, int(wait_s * 1000), len(name)) + name + part.encode()


def _pack_digests(record: ProofRecord | None, life: bytes) -> bytes:
    if record is None:
        return bytes([_UNKNOWN])
    words = np.ascontiguousarray(record.digests, dtype="<i8")
    if _DIGEST_HEAD.size + words.nbytes > MAX_ANSWER_BYTES:
        return bytes([_TOO_LONG])
    return _DIGEST_HEAD.pack(_OK, record.num_tokens, len(words), life) + words.tobytes()


def _pack_rows(record: ProofRecord | None, layer: int, part: str) -> bytes:
    if record is None:
        return bytes([_UNKNOWN])
    rows = None if record.rows is None else record.rows.get((layer, part))
    if rows is None:
        return bytes([_NOT_KEPT])
    if sum(values.nbytes + 64 for values in rows.values()) > MAX_ANSWER_BYTES:
        return bytes([_TOO_LONG])
    packed = [bytes([_OK])]
    for (name, unit), values in rows.items():
        packed.append(_ENTRY.pack(len(name), unit, *values.shape) + name.encode() + values.tobytes())
    return b"".join(packed)


def _check_status(address: Address, answer: bytes) -> None:
    status = answer[0] if answer else _NOT_UNDERSTOOD
    if status != _OK:
        raise TransferError("", _STATUS.get(status, f"status {status}"), producer=_name(address))


def _unpack_digests(address: Address, life: str, answer: bytes) -> tuple[int, Digests]:
    """Read (tokens, digests) from an answer. Raises TransferError if it is none of this life of P."""
    _check_status(address, answer)
    if len(answer) < _DIGEST_HEAD.size:
        raise TransferError("", "a truncated answer", producer=_name(address))
    _, num_tokens, num_words, theirs = _DIGEST_HEAD.unpack_from(answer)
    if theirs.hex() != life:
        raise TransferError("", _STATUS[_OTHER_LIFE], producer=_name(address))
    if len(answer) != _DIGEST_HEAD.size + 8 * num_words:
        raise TransferError("", "a truncated answer", producer=_name(address))
    return num_tokens, np.frombuffer(answer, dtype="<i8", offset=_DIGEST_HEAD.size).astype(np.int64)


def _unpack_rows(address: Address, answer: bytes) -> Rows:
    """Read rows from an answer. Raises TransferError if it is malformed."""
    _check_status(address, answer)
    rows: Rows = {}
    at = 1
    try:
        while at < len(answer):
            name_bytes, unit, num_rows, row_bytes = _ENTRY.unpack_from(answer, at)
            at += _ENTRY.size
            name = answer[at : at + name_bytes].decode()
            at += name_bytes
            values = np.frombuffer(answer, dtype=np.uint8, count=num_rows * row_bytes, offset=at)
            rows[name, unit] = values.reshape(num_rows, row_bytes)
            at += num_rows * row_bytes
    except (struct.error, ValueError) as error:
        raise TransferError("", f"rows that cannot be read: {error}", producer=_name(address)) from error
    return rows


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


# What travels in kv_transfer_params


@dataclass(frozen=True)
class Ticket:
    """Where P's proof of a request can be fetched, with one entry per P rank."""

    request_id: str
    """The request's id at P."""
    nonce: str
    """The key under which P keeps the proof."""
    ranks: tuple[tuple[str, int, str], ...]
    """(IP address, port, life) in rank order."""
    sampled: bool = True
    """False if P did not sample the request."""

    def to_params(self) -> dict[str, Any]:
        """Write the ticket as JSON."""
        told = {"version": VERSION, "request": self.request_id, "nonce": self.nonce}
        return {**told, "ranks": [list(rank) for rank in self.ranks], "sampled": self.sampled}


def read_ticket(params: Mapping[str, Any] | None) -> Ticket | None:
    """Read the ticket in `kv_transfer_params`; None where there is no readable one."""
    told = (params or {}).get("rayk_proof")
    if not isinstance(told, Mapping) or told.get("version") != VERSION:
        return None
    request_id, nonce, ranks = told.get("request"), told.get("nonce"), told.get("ranks")
    if not _is_text(request_id, 1024) or not _is_text(nonce, 64) or not nonce:
        return None
    sampled = told.get("sampled", True)
    if not isinstance(ranks, list) or len(ranks) > MAX_RANKS or not isinstance(sampled, bool):
        return None
    for rank in ranks:
        if not isinstance(rank, list) or [type(part) for part in rank] != [str, int, str]:
            return None
        if not _is_ip_address(rank[0]) or not 0 < rank[1] < 1 << 16 or not _is_text(rank[2], 64):
            return None
    return Ticket(request_id, nonce, tuple((host, port, life) for host, port, life in ranks), sampled)


def _is_text(told: object, max_characters: int) -> TypeGuard[str]:
    """Return whether this is text that can be encoded: JSON may hold halves of surrogate pairs."""
    if not isinstance(told, str) or len(told) > max_characters:
        return False
    return told.encode(errors="ignore").decode() == told


def _is_ip_address(told: str) -> bool:
    """Return whether this is an address that needs no looking up, and means the same on every host."""
    try:
        ipaddress.ip_address(told)
    except ValueError:
        return False
    return "%" not in told


# What D fetches


def fetch_digests(
    peer: tuple[str, int, str],
    nonce: str,
    secret: bytes,
    deadline: float,
    description: Mapping[str, Any] | None = None,
) -> tuple[Mapping[str, Any], int, Digests]:
    """Fetch (description, tokens, digests) of one P rank; `description`: where it is known already.
    Raises TransferError where they do not come by the deadline."""
    host, port, life = peer
    address = host, port
    left = max(0.0, deadline - time.monotonic() - _ANSWER_S)
    requests = [_ask_for(_DIGESTS, nonce, part=life, wait_s=left)]
    if description is None:
        requests.append(_ask_for(_DESCRIBE))
    answers = ask(address, secret, requests, deadline)
    num_tokens, digests = _unpack_digests(address, life, answers[0])
    if description is None:
        _check_status(address, answers[1])
        description = read_description(address, answers[1][1:])
    return description, num_tokens, digests


def fetch_rows(
    peer: tuple[str, int, str], nonce: str, layer: int, part: str, secret: bytes, deadline: float
) -> Rows:
    """Fetch one P rank's raw rows of one cache of a layer. Raises TransferError."""
    address = peer[0], peer[1]
    request = _ask_for(_ROWS, nonce, layer=layer, part=part)
    return _unpack_rows(address, ask(address, secret, [request], deadline)[0])


def canonical_shape(description: Mapping[str, Any]) -> list[Any]:
    """Return what two ranks must share for their words to mean the same, whatever their TP sizes."""
    return sorted(
        [
            c["layer"],
            c["part"],
            c["kind"],
            [[f["name"], f["of"], f["row_bytes"], f["dtype"]] for f in c["fields"]],
        ]
        for c in description["layers"]
    )


def read_description(address: Address, text: bytes) -> Mapping[str, Any]:
    """Read a description as a server sent it. Raises TransferError if it is malformed."""
    try:
        told = json.loads(text)
        canonical_shape(told)
        for cache in told["layers"]:
            for each in cache["fields"]:
                each["units"] = [int(unit) for unit in each["units"]]
        for name in ("rows_per_group", "tp_rank", "tp_size"):
            told[name] = int(told[name])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TransferError(
            "", f"a description that cannot be read: {error}", producer=_name(address)
        ) from error
    return dict(told)
