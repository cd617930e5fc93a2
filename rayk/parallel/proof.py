"""Authenticates messages between the ranks of a group by their shared secret."""

from __future__ import annotations

import hmac

from rayk.types.errors import CommError

PROOF_BYTES = 32


class Proofs:
    """One rank's counter of the group's messages, which all ranks send in one order, so that none can be
    replayed.

    A message is the HMAC-SHA256 of operation, number, sender's rank and payload, followed by the payload.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._operation, self._number = "", 0

    def begin(self, operation: str) -> None:
        """Start the group's next message."""
        self._operation = operation
        self._number += 1

    def prove(self, rank: int, payload: bytes) -> bytes:
        """Put the proof before a payload of this rank."""
        return self._proof(rank, payload) + payload

    def check(self, rank: int, message: bytes) -> bytes:
        """Return the payload. Raises CommError if this rank did not send it."""
        proof, payload = message[:PROOF_BYTES], message[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(rank, payload)):
            raise CommError(self._operation, f"what came in the name of rank {rank} was not sent by it")
        return payload

    def _proof(self, rank: int, payload: bytes) -> bytes:
        about = f"{self._operation} {self._number} {rank} ".encode()
        return hmac.digest(self._secret, about + payload, "sha256")
