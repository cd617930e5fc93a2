"""The protocol by which the kit tries a store: a KV cache that finds pages by what they were computed of.

A store may be a prefix cache, a tier of host memory or files, or a KV connector of any engine
(`vllm_adapter.VllmStore`). The kit saves pages, one per whole block of tokens, and looks up which pages
answer for a key. A page holds what its key says up to its end, so a wrong answer shows whose page it was.
This module does without torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

FIELDS = ("adapter", "adapter_path", "adapter_revision", "salt", "revision", "multimodal")
"""A key's fields beside its tokens; `adapter_path` and `adapter_revision` belong to that adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter as a request names it, and where its weights come from."""

    name: str
    path: str = "adapters/one"
    revision: str = "1"
    """Stands for the weights that lie at the path: they change when an adapter is loaded again in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MultimodalItem:
    """An image, say, whose placeholders are tokens `offset` to `offset + length` of the prompt."""

    hash: str
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreKey:
    """All that the KV of a prompt depends on."""

    token_ids: tuple[int, ...]
    """Whole blocks."""
    adapter: Adapter | None = None
    salt: str | None = None
    revision: str = "main"
    """Revision of the model's weights."""
    multimodal: tuple[MultimodalItem, ...] = ()

    def up_to(self, num_tokens: int) -> StoreKey:
        """Return what the KV of the first `num_tokens` tokens depends on."""
        items = tuple(item for item in self.multimodal if item.offset < num_tokens)
        return replace(self, token_ids=self.token_ids[:num_tokens], multimodal=items)

    def __str__(self) -> str:
        """Name the fields in which keys of the kit differ; of the tokens, the first ones."""
        adapter = self.adapter
        parts = [f"{len(self.token_ids)} tokens {list(self.token_ids[:3])}.."]
        if adapter is not None:
            parts.append(f"adapter {adapter.name!r} of {adapter.path!r} revision {adapter.revision!r}")
        parts += [f"salt {_short(self.salt)}"] if self.salt is not None else []
        parts += [f"revision {self.revision!r}"] if self.revision != "main" else []
        parts += [f"{_short(item.hash)} at token {item.offset}" for item in self.multimodal]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreCase:
    """What a check asks of a store; see `Store.supports`."""

    fields: tuple[str, ...] = ()
    """Those of FIELDS in which its keys differ."""
    needs: str = ""
    """eviction, threads or restart; empty: none of them."""


class Store(Protocol):
    """Finds KV by content. The kit makes it with a folder, which holds what an earlier store left there, if
    there was one. A method that raises fails the check."""

    block_tokens: int
    """Tokens of a page; known once it is made."""
    max_blocks: int | None
    """Pages that it holds before it gives up old ones; None: it never does."""
    is_persistent: bool
    """Whether a store made in another process, with the same folder, finds what this one saved."""
    is_thread_safe: bool
    finds_prefixes: bool
    """Whether a prompt finds the blocks that it shares with others; else only those of an equal prompt."""

    @classmethod
    def supports(cls, case: StoreCase) -> str | None:
        """Say why a check is not for this store; None if it is. A field counts as unsupported if callers
        cannot tell it to the store at all, not if the store leaves it out of its keys."""
        ...

    def save(self, key: StoreKey, pages: Sequence[bytes]) -> None:
        """Keep the pages of a prompt's blocks, which may be there already. Returns when they can be found."""
        ...

    def look_up(self, key: StoreKey) -> Sequence[bytes]:
        """Give the pages of the prompt's first blocks, as many as are there without a gap."""
        ...

    def close(self) -> None:
        """Write what is to stay. Nothing is called afterwards."""
        ...


class BaseStore:
    """The protocol's defaults, for subclasses."""

    block_tokens: int = 16
    max_blocks: int | None = None
    is_persistent: bool = False
    is_thread_safe: bool = False
    finds_prefixes: bool = True

    @classmethod
    def supports(cls, case: StoreCase) -> str | None:
        """Support all that the attributes do not rule out."""
        return None

    def close(self) -> None:
        """Close nothing."""


def _short(text: str) -> str:
    return repr(text) if len(text) <= 24 else f"{text[:10]!r}..{text[-10:]!r}"


def pages_of(key: StoreKey, block_tokens: int) -> list[bytes]:
    """Make the pages of a key: digests of all that the KV up to each block's end depends on."""
    ends = range(block_tokens, len(key.token_ids) + 1, block_tokens)
    return [hashlib.sha256(json.dumps(asdict(key.up_to(end))).encode()).digest() for end in ends]
