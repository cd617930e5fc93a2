"""Proofs on what the ranks of a group send each other: who does not know their secret is not listened to."""

from __future__ import annotations

import hmac

from rayk.types.errors import CommError

PROOF_BYTES = 32


class Proofs:
    """One rank's count of the group's messages, which all ranks send in one order: none can be repeated.

    A message is HMAC-SHA256 of the operation, its number, the sender's rank and the payload; then that.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._operation, self._number = "", 0

    def begin(self, operation: str) -> None:
        """The next message of the group."""
        self._operation = operation
        self._number += 1

    def prove(self, rank: int, payload: bytes) -> bytes:
        """The message of this rank."""
        return self._proof(rank, payload) + payload

    def check(self, rank: int, message: bytes) -> bytes:
        """The payload. Raises CommError where it is not what this rank sent."""
        proof, payload = message[:PROOF_BYTES], message[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(rank, payload)):
            raise CommError(self._operation, f"what came in the name of rank {rank} was not sent by it")
        return payload

    def _proof(self, rank: int, payload: bytes) -> bytes:
        about = f"{self._operation} {self._number} {rank} ".encode()
        return hmac.digest(self._secret, about + payload, "sha256")
