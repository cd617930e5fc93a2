"""Keep KV apart that is found by digests of tokens: that of requests with unlike salts is never shared."""

from __future__ import annotations

import hashlib
from typing import TypedDict


class Salting(TypedDict, total=False):
    """Parameters of `hashlib.blake2b`."""

    salt: bytes
    person: bytes


def salting(cache_salt: str | None) -> Salting:
    """Return parameters that make a digest another one for every salt, whatever is hashed; none without a
    salt."""
    if cache_salt is None:
        return {}
    digest = hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    return {"salt": digest[:16], "person": digest[16:]}
