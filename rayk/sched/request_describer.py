"""Describe requests to policies where their tokens are: a policy never sees a prompt. It knows a prompt by
keyed digests of its beginnings. Whoever chooses prompts cannot tell the key, so can neither aim at an engine
nor pass for somebody else's prompt."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

from rayk.sched.policies import heeds
from rayk.sched.policy import PlacementRequest, PolicySettings, PrefixKeys
from rayk.types.cache_salt import salting

SECRET_BYTES = 32
TOKEN = Struct("<i")


def new_secret() -> bytes:
    """Make a secret for those whose keys are to be compared, and for nobody else."""
    return secrets.token_bytes(SECRET_BYTES)


class RequestDescriber:
    """Describes requests to one policy. All who ask it share a secret."""

    def __init__(self, policy: str, settings: PolicySettings, secret: bytes) -> None:
        remembers = settings.index_blocks or settings.host_blocks
        needs_keys = heeds(policy, "block_tokens", hands_over=True) and remembers
        self._block_tokens = settings.block_tokens if needs_keys else None
        self._secret = secret

    def describe(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        max_tokens: int = 0,
        session: str | None = None,
    ) -> PlacementRequest:
        """Describe a request. Token ids fit into 32 bits."""
        keys: PrefixKeys = ()
        if self._block_tokens is not None:
            keys = prefix_keys(prompt_token_ids, self._block_tokens, self._secret, cache_salt)
        return PlacementRequest(
            request_id=request_id,
            num_prompt_tokens=len(prompt_token_ids),
            prefix_keys=keys,
            max_tokens=max_tokens,
            session=session,
        )


def prefix_keys(
    prompt_token_ids: Sequence[int], block_tokens: int, secret: bytes, cache_salt: str | None = None
) -> PrefixKeys:
    """Make a key per full block of a prompt, which depends on every token up to the block's end and on the
    request's salt."""
    digest = blake2b(digest_size=8, key=secret, **salting(cache_salt))
    num_tokens = len(prompt_token_ids) // block_tokens * block_tokens
    packed = Struct(f"<{num_tokens}i").pack(*prompt_token_ids[:num_tokens])
    size = block_tokens * TOKEN.size
    keys = []
    for start in range(0, len(packed), size):
        digest.update(packed[start : start + size])
        keys.append(int.from_bytes(digest.digest(), "little"))
    return tuple(keys)
