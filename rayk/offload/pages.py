"""Between the host tier's blocks and pages on disk: which of a sequence's blocks become pages, and back.

A page is a block of one group as its canonical page: packed, without the padding of the tier's own blocks, so
that tiers of any layout read it. Behind it lie those of the groups that ride on it: a block has one page. Of
layers with windows a block may hold its last rows only, and of draft layers none; the page's name then says
from which on, by lane.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
import torch

from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.block_tables import since_in
from rayk.kv.caches import CanonicalKVCaches
from rayk.kv.geometry import GroupGeometry
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from rayk.kv.maps import Runs, block_strides, page_map
from rayk.kv.prefix_cache import PrefixKeys, Since
from rayk.kv.riders import of_groups
from rayk.kv.specs import page_bytes
from rayk.offload.disk import DiskTier
from rayk.offload.page_file import PageIdentity, PageName
from rayk.transfer.handshake import CacheDescription

Bytes = npt.NDArray[np.uint8]
Place = tuple[int, bytes, int]  # (group, key, block)
MIN_KNOWN = 1024  # evicted pages are forgotten when they are more than those that are there, and than so many


def identity_of(groups: Sequence[KVCacheGroup], like: CacheDescription, dtype: str) -> PageIdentity:
    """Return what must agree so that pages mean the same, in memory as on disk. `groups`: the tier's; `like`:
    `like_engine` of one that computes in `dtype`, which quantised KV does not tell."""
    facts = {f"model.{name}": value for name, value in like.fingerprint.items()}
    scales = (f"layer {layer}: k {k!r}, v {v!r}" for layer, (k, v) in sorted(like.kv_scales.items()))
    facts |= {"dtype": dtype, "kv_scales": "; ".join(scales)}
    for g in groups:
        fields = ", ".join(
            f"{f.name} {f.units} x {f.rows} x {f.row_bytes} {f.dtype}" for f in g.spec.fields()
        )
        seen = ", ".join(lane.kind for lane in g.lanes)
        layers = ",".join(map(str, g.layers))
        fact = f"layers {layers}; {g.spec.block_size} tokens; {seen}; {fields}"
        if g.rides is not None:
            names = ", ".join(map(g.name_of, g.layers))
            fact = f"{names} of drafter {g.drafter or 'unnamed'}, on group {g.rides}; {fact}"
        facts[f"group.{g.index}"] = fact
    return PageIdentity(
        facts=facts,
        page_bytes=tuple(
            sum(
                page_bytes(part.spec) * len(part.layers)
                for part in groups
                if g.index in (part.index, part.rides)
            )
            for g in groups
            if g.rides is None
        ),
    )


@dataclass(frozen=True, eq=False)
class HostBlocks:
    caches: CanonicalKVCaches
    manager: KVCacheManager
    find_changed: Callable[[Sequence[Sequence[int]]], Collection[int]]
    """Of tables with some blocks of a sequence, null blocks elsewhere: those that do not hold any more what
    was proven."""


@dataclass(frozen=True, eq=False, slots=True)
class _PageCandidate:
    """A block of a sequence that can be a page."""

    end: int  # tokens of the sequence up to its end
    group: KVCacheGroup
    """The group, with what rides on it, as the tier's manager knows it."""
    name: PageName
    block: int
    is_fresh: bool  # whether its content was proven just now


class DiskPages:
    """A DiskTier as the host tier sees it. `turn` it on the owner's thread."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._known: dict[tuple[int, bytes], Since] = {}
        """From where on the rows of a page are there, by group and key; empty: all of them."""
        for name in disk.names():
            self._note(name)

    @property
    def secret(self) -> bytes:
        """Keys are made with it; it is the same after a restart."""
        return self._disk.secret

    @property
    def is_readable(self) -> bool:
        return bool(self._known)

    def since(self, group: int, key: bytes) -> Since | None:
        """Tell from where on rows are on disk, by lane; None where no such page is, () where all are."""
        found = self._known.get((group, key))
        if found is not None and PageName(group, key, found) not in self._disk:
            del self._known[group, key]  # it was evicted, or turned out damaged
            return None
        return found

    def write(
        self, host: HostBlocks, name: str, keys: PrefixKeys, num_tokens: int, num_known_tokens: int
    ) -> Collection[int]:
        """Queue the named blocks of a sequence that are not there, from its beginning on as far as queue and
        disk take them: what they have no room for now is asked for again by the sequence's next store.

        Blocks before `num_known_tokens` tokens were proven some time ago. Those that changed since are not
        written, but returned.
        """
        if self._disk.state != "on":
            return ()
        pages = sorted(_pages_of(host, name, keys, num_tokens, num_known_tokens), key=lambda page: page.end)
        known = [self._known_as(page.name) for page in pages]
        there = [name for name in known if name is not None]
        self._disk.touch(reversed(there))
        missing = [p for p, name in zip(pages, known, strict=True) if name is None]
        missing = [page for page in missing if not self._disk.is_coming(page.name)]
        chosen = missing[: self._disk.admit([page.name for page in missing], there)]
        contents = [
            (page.block, page.name, gather(host.caches, page.group.index, page.block)) for page in chosen
        ]
        # Of what is in memory after it was copied: nothing can come between.
        changed = _changed_of(host, chosen)
        order = [name or page.name for page, name in zip(pages, known, strict=True)]
        self._put([(name, content) for block, name, content in contents if block not in changed], order)
        return changed

    def _put(self, pages: Sequence[tuple[PageName, Bytes]], order: Sequence[PageName]) -> None:
        """`order`: the sequence's pages, those that are there, too, from its beginning on."""
        num_left = len(pages)

        def written(page: PageName, is_there: bool) -> None:
            nonlocal num_left
            num_left -= 1
            if is_there:
                self._note(page)
            if not num_left:
                # What was written is newer than what was there: only now they stand in their order.
                self._disk.touch(reversed(order))

        # The last is written first and goes first: what comes early in a sequence is worth more.
        for page, content in reversed(pages):
            num_left -= not self._disk.put(page, content, partial(written, page))

    def touch(self, groups: Sequence[KVCacheGroup], keys: PrefixKeys, num_tokens: int) -> None:
        """A sequence's pages are of use, wherever they were found: they outlast others, the first longest."""
        found = []
        for g in groups:
            size, first = g.spec.block_size, g.spec.live_rows(num_tokens).start // g.spec.block_size
            for end in range((first + 1) * size, num_tokens + 1, size):
                since = self._known.get((g.index, keys[end]))
                if since is not None:
                    found.append((end, PageName(g.index, keys[end], since)))
        self._disk.touch(page for _, page in sorted(found, key=lambda at: -at[0]))

    def _known_as(self, wanted: PageName) -> PageName | None:
        """Return the page on disk that has these rows, if there is one."""
        since = self.since(wanted.group, wanted.key)
        if since is None or not _covers(since, wanted.since):
            return None
        return PageName(wanted.group, wanted.key, since)

    def read(
        self,
        caches: CanonicalKVCaches,
        places: Sequence[Place],
        done: Callable[[Sequence[str], int], None],
    ) -> None:
        """Fill blocks with their pages. `done`: those that are damaged or gone, in words, and bytes read."""
        names = [PageName(group, key, self._known.get((group, key), ())) for group, key, _ in places]
        sizes = [self._disk.identity.page_bytes[group] for group, _, _ in places]
        pages = [np.empty(size, dtype=np.uint8) for size in sizes]

        def arrived(bad: Sequence[PageName]) -> None:
            gone = set(bad)
            for name, (group, key, block), page in zip(names, places, pages, strict=True):
                if name in gone:
                    if self._known.get((group, key)) == name.since:
                        del self._known[group, key]
                else:
                    scatter(caches, group, block, page)
            done(
                [_text(name) for name in bad],
                sum(sizes) - sum(p.nbytes for p, n in zip(pages, names, strict=True) if n in gone),
            )

        # Used last means kept longest: the first of a sequence.
        self._disk.get(names[::-1], pages[::-1], arrived)

    def turn(self) -> None:
        """Run the completions of reads and writes that have ended."""
        self._disk.turn()
        if len(self._known) > 2 * len(self._disk) + MIN_KNOWN:
            self._known = {at: rows for at, rows in self._known.items() if PageName(*at, rows) in self._disk}

    def status(self) -> dict[str, object]:
        """Tell counters and sizes, for people."""
        return self._disk.status()

    def close(self) -> None:
        """Finish what is queued, in bounded time."""
        self._disk.close()

    def _note(self, name: PageName) -> None:
        """A page is on disk. One of a block is enough: that with more rows."""
        known = self.since(name.group, name.key)
        if known is not None and _covers(known, name.since):
            if known != name.since:
                self._disk.drop(name)
            return
        if known is not None:
            self._disk.drop(PageName(name.group, name.key, known))
        self._known[name.group, name.key] = name.since


def _pages_of(
    host: HostBlocks, name: str, keys: PrefixKeys, num_tokens: int, num_known_tokens: int
) -> Iterator[_PageCandidate]:
    """Yield the sequence's pages, as far as its blocks can be found by name."""
    prefixes = host.manager.prefixes
    assert prefixes is not None
    # Rows of draft layers are not counted from the block tables alone: they may lack.
    drafted = host.manager.first_draft_row(name)
    for g, table in zip(host.manager.groups, host.manager.block_tables(name), strict=True):
        size, live = g.spec.block_size, tuple(lane.live_rows(num_tokens).start for lane in g.own_lanes)
        live += () if g.carries is None else (drafted,)
        for index, own in enumerate(table[: num_tokens // size]):
            end = (index + 1) * size
            block = prefixes.find(g.index, keys[end]) if end in keys else None
            if own == NULL_BLOCK or block is None:
                continue
            rows, is_fresh = prefixes.since_of(block), end - size >= num_known_tokens
            # Another block of the same name may have been there before: what is proven just now is better.
            if own != block and is_fresh and _covers(of_own := since_in(g, index, live), rows):
                block, rows = own, of_own
            since = rows if any(rows) else ()
            yield _PageCandidate(
                end, g, PageName(g.index, keys[end], since), block, is_fresh and block == own
            )


def _changed_of(host: HostBlocks, pages: Sequence[_PageCandidate]) -> Collection[int]:
    """List blocks of pages that do not hold any more what was proven some time ago."""
    doubted = [page for page in pages if not page.is_fresh]
    if not doubted:
        return ()
    tables = [[NULL_BLOCK] * (doubted[-1].end // g.spec.block_size) for g in host.manager.groups]
    for page in doubted:
        tables[page.name.group][page.end // page.group.spec.block_size - 1] = page.block
    return host.find_changed(of_groups(host.manager.all_groups, tables))


def _covers(known: Since, wanted: Since) -> bool:
    """Tell whether rows of a block that are known by lane include others; empty: all."""
    return not any(known) or (any(wanted) and all(a <= b for a, b in zip(known, wanted, strict=True)))


def gather(caches: CanonicalKVCaches, group: int, block: int) -> Bytes:
    """Gather a block's canonical page, those of riders behind it: a copy, uint8 [page bytes]."""
    parts = []
    buffer = caches.buffer.view(torch.uint8).numpy()
    for geometry in _parts(caches, group):
        runs, strides = _map(geometry)
        page = np.empty(runs.num_bytes, dtype=np.uint8)
        starts = runs.source + block * strides
        for source, to, length in zip(starts, runs.destination, runs.lengths, strict=True):
            page[to : to + length] = buffer[source : source + length]
        parts.append(page)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def scatter(caches: CanonicalKVCaches, group: int, block: int, page: Bytes) -> None:
    """Fill a block, and those of riders, from its canonical page."""
    buffer = caches.buffer.view(torch.uint8).numpy()
    first = 0
    for geometry in _parts(caches, group):
        runs, strides = _map(geometry)
        part, first = page[first : first + runs.num_bytes], first + runs.num_bytes
        starts = runs.source + block * strides
        for source, to, length in zip(starts, runs.destination, runs.lengths, strict=True):
            buffer[source : source + length] = part[to : to + length]


def _parts(caches: CanonicalKVCaches, group: int) -> list[GroupGeometry]:
    """Return a group and those that ride on it."""
    return [g for g in caches.geometry.groups if group in (g.group.index, g.group.rides)]


@lru_cache(maxsize=64)
def _map(group: GroupGeometry) -> tuple[Runs, npt.NDArray[np.int64]]:
    runs = page_map(group)
    return runs, block_strides(group, runs.source)


def _text(name: PageName) -> str:
    return f"group {name.group}, key {name.key[:8].hex()}"
