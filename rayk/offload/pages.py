"""Between the host tier's blocks and pages on disk: which of a sequence's blocks become pages, and back.

A page is a block of one group as its canonical page: packed, without the padding of the tier's own blocks, so
that tiers of any layout read it. Of layers with windows a block may hold its last rows only; the page's name
then says from which on, by lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

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
from rayk.transfer.handshake import CacheDescription

Bytes = npt.NDArray[np.uint8]
Place = tuple[int, bytes, int]
"""(group, key, block)."""
MIN_KNOWN = 1024
"""Evicted pages are forgotten when they are more than those that are there, and than so many."""


def identity_of(groups: Sequence[KVCacheGroup], like: CacheDescription, dtype: str) -> PageIdentity:
    """What must agree so that pages mean the same, in memory as on disk. `groups`: the tier's; `like`: any
    rank of an engine that computes in `dtype`, which quantised KV does not tell."""
    facts = {f"model.{name}": value for name, value in like.fingerprint.items()}
    scales = (f"layer {layer}: k {k!r}, v {v!r}" for layer, (k, v) in sorted(like.kv_scales.items()))
    facts |= {"dtype": dtype, "kv_scales": "; ".join(scales)}
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
    ) -> None:
        """Queue the named blocks of a sequence that are not there, from its beginning on as far as the queue
        takes them: what it has no room for now is asked for again by the sequence's next store."""
        if self._disk.state != "on":
            return
        missing = sorted(self._missing(caches, manager, name, token_ids, num_tokens), key=lambda m: m[0])
        room, chosen = self._disk.queue_bytes, []
        for _, geometry, page, block in missing:
            room -= self._disk.identity.page_bytes[page.group]
            if room < 0:
                break
            chosen.append((geometry, page, block))
        # The last is written first and goes first: what comes early in a sequence is worth more.
        for geometry, page, block in reversed(chosen):
            self._disk.put(page, gather(caches, geometry, block), partial(self._written, page))

    def _missing(
        self,
        caches: CanonicalKVCaches,
        manager: KVCacheManager,
        name: str,
        token_ids: Sequence[int],
        num_tokens: int,
    ) -> Iterator[tuple[int, GroupGeometry, PageName, int]]:
        """(tokens up to its end, geometry, page, block) of named blocks whose rows are not on disk."""
        assert manager.prefixes is not None
        keys = manager.prefix_keys(name, token_ids, num_tokens)
        for g, table in zip(caches.geometry.groups, manager.block_tables(name), strict=True):
            for end, own in zip(range(g.block_size, num_tokens + 1, g.block_size), table, strict=False):
                # Another block of the same name may have been there before.
                block = manager.prefixes.find(g.group.index, keys[end])
                if own == NULL_BLOCK or block is None:
                    continue
                rows = manager.prefixes.since_of(block)
                since = rows if any(rows) else ()
                known = self.since(g.group.index, keys[end])
                if known is None or (known and known != since):
                    yield end, g, PageName(g.group.index, keys[end], since), block

    def _written(self, page: PageName, is_there: bool) -> None:
        if is_there:
            self._note(page)

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

        # Used last means kept longest: the first of a sequence.
        self._disk.get(names[::-1], pages[::-1], arrived)

    def turn(self) -> None:
        """What reads and writes came to."""
        self._disk.turn()
        if len(self._known) > 2 * len(self._disk) + MIN_KNOWN:
            self._known = {at: rows for at, rows in self._known.items() if PageName(*at, rows) in self._disk}

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
