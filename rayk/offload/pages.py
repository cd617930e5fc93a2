"""Between the host tier's blocks and pages on disk: which of a sequence's blocks become pages, and back.

A page is a block of one group as its canonical page: packed, without the padding of the tier's own blocks, so
that tiers of any layout read it. Of layers with windows a block may hold its last rows only; the page's name
then says from which on, by lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.caches import CanonicalKVCaches
from rayk.kv.geometry import GroupGeometry
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from rayk.kv.maps import Runs, block_strides, page_map
from rayk.kv.prefix_cache import Since
from rayk.offload.disk import DiskTier
from rayk.offload.page_file import PageIdentity, PageName

Bytes = npt.NDArray[np.uint8]
Place = tuple[int, bytes, int]
"""(group, key, block)."""


def identity_of(groups: Sequence[KVCacheGroup], fingerprint: dict[str, str]) -> PageIdentity:
    """What must agree so that pages mean the same."""
    facts = {f"model.{name}": value for name, value in fingerprint.items()}
    for g in groups:
        fields = ", ".join(
            f"{f.name} {f.units} x {f.rows} x {f.row_bytes} {f.dtype}" for f in g.spec.fields()
        )
        seen = ", ".join(lane.kind for lane in g.lanes)
        layers = ",".join(map(str, g.layers))
        facts[f"group.{g.index}"] = f"layers {layers}; {g.spec.block_size} tokens; {seen}; {fields}"
    sizes = tuple(sum(f.canonical_bytes for f in g.spec.fields()) * len(g.layers) for g in groups)
    return PageIdentity(facts=facts, page_bytes=sizes)


class DiskPages:
    """A DiskTier as the host tier sees it. `turn` it on the owner's thread."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._known: dict[tuple[int, bytes], Since] = {}
        """By group and key, from where on the page's rows are there; empty: all of them."""
        for name in disk.names():
            self._note(name)

    @property
    def secret(self) -> bytes:
        """What keys are made with: the same after a restart."""
        return self._disk.secret

    @property
    def is_readable(self) -> bool:
        """Whether pages may be asked for."""
        return bool(self._known)

    def since(self, group: int, key: bytes) -> Since | None:
        """From where on rows are on disk, by lane; None where there is no such page, () where all are."""
        found = self._known.get((group, key))
        if found is not None and PageName(group, key, found) not in self._disk:
            del self._known[group, key]  # it was evicted, or turned out damaged
            return None
        return found

    def write(
        self,
        caches: CanonicalKVCaches,
        manager: KVCacheManager,
        name: str,
        token_ids: Sequence[int],
        num_tokens: int,
        held_tokens: int,
    ) -> None:
        """Queue the named blocks of a sequence behind its first `held_tokens`, as far as the queue takes them
        and they are not there."""
        assert manager.prefixes is not None
        keys = manager.prefix_keys(name, token_ids, num_tokens)
        for g, table in zip(caches.geometry.groups, manager.block_tables(name), strict=True):
            size, index = g.block_size, g.group.index
            for i in range(held_tokens // size, num_tokens // size):
                block = table[i]
                if block == NULL_BLOCK or block not in manager.prefixes:
                    continue
                since = manager.prefixes.since_of(block)
                self._put(caches, g, index, keys[(i + 1) * size], block, since if any(since) else ())

    def _put(
        self,
        caches: CanonicalKVCaches,
        geometry: GroupGeometry,
        group: int,
        key: bytes,
        block: int,
        since: Since,
    ) -> None:
        known = self.since(group, key)
        if self._disk.state != "on" or (known is not None and (not known or known == since)):
            return
        name = PageName(group, key, since)

        def written(is_there: bool) -> None:
            if is_there:
                self._note(name)

        self._disk.put(name, gather(caches, geometry, block), written)

    def read(
        self,
        caches: CanonicalKVCaches,
        places: Sequence[Place],
        done: Callable[[Sequence[str], int], None],
    ) -> None:
        """Fill blocks with their pages. `done`: those that are damaged or gone, in words, and bytes read."""
        names = [PageName(group, key, self._known.get((group, key), ())) for group, key, _ in places]
        groups = caches.geometry.groups
        sizes = [self._disk.identity.page_bytes[group] for group, _, _ in places]
        pages = [np.empty(size, dtype=np.uint8) for size in sizes]

        def arrived(bad: Sequence[PageName]) -> None:
            gone = set(bad)
            for name, (group, key, block), page in zip(names, places, pages, strict=True):
                if name in gone:
                    self._known.pop((group, key), None)
                else:
                    scatter(caches, groups[group], block, page)
            done(
                [_text(name) for name in bad],
                sum(sizes) - sum(p.nbytes for p, n in zip(pages, names, strict=True) if n in gone),
            )

        self._disk.get(names, pages, arrived)

    def turn(self) -> None:
        """What reads and writes came to."""
        self._disk.turn()

    def clear(self) -> None:
        """Forget every page."""
        self._disk.clear()
        self._known.clear()

    def status(self) -> dict[str, object]:
        """See DiskTier.status."""
        return self._disk.status()

    def close(self) -> None:
        """Finish what is queued, in bounded time."""
        self._disk.close()

    def _note(self, name: PageName) -> None:
        known = self._known.get((name.group, name.key))
        if known is None or not name.since:
            self._known[name.group, name.key] = name.since


def gather(caches: CanonicalKVCaches, group: GroupGeometry, block: int) -> Bytes:
    """A block's canonical page: a copy, uint8 [page bytes]."""
    runs, strides = _map(group)
    page = np.empty(runs.num_bytes, dtype=np.uint8)
    buffer = caches.buffer.view(torch.uint8).numpy()
    for source, to, length in zip(runs.source + block * strides, runs.destination, runs.lengths, strict=True):
        page[to : to + length] = buffer[source : source + length]
    return page


def scatter(caches: CanonicalKVCaches, group: GroupGeometry, block: int, page: Bytes) -> None:
    """The inverse."""
    runs, strides = _map(group)
    buffer = caches.buffer.view(torch.uint8).numpy()
    for source, to, length in zip(runs.source + block * strides, runs.destination, runs.lengths, strict=True):
        buffer[source : source + length] = page[to : to + length]


@lru_cache(maxsize=64)
def _map(group: GroupGeometry) -> tuple[Runs, npt.NDArray[np.int64]]:
    runs = page_map(group)
    return runs, block_strides(group, runs.source)


def _text(name: PageName) -> str:
    return f"group {name.group}, key {name.key[:8].hex()}"
