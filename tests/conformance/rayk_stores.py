"""rayk's own caches as stores: the prefix cache of an engine, and pages on disk."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from rayk.conformance.store import BaseStore
from rayk.kv.groups import group_layers
from rayk.kv.manager import KVCacheManager
from rayk.kv.prefix_cache import PrefixKeys
from rayk.kv.specs import FullAttentionSpec
from rayk.offload.disk import DiskTier
from rayk.offload.page_file import PageIdentity, PageName
from tests.offload.disk import finish

NUM_KEPT = 12


class PrefixCache(BaseStore):
    max_blocks = NUM_KEPT

    def __init__(self, folder):
        spec = FullAttentionSpec(self.block_tokens, 1, 8, 8, "bfloat16", 1)
        self.manager = KVCacheManager(group_layers({(0, spec.part): spec}), NUM_KEPT + 1, prefix_caching=True)
        self.memory = {}
        self.names = map(str, itertools.count())

    @classmethod
    def supports(cls, case):
        return None if {*case.fields} <= {"salt"} else "an engine has one model, without adapters or images"

    def save(self, key, pages):
        name, ids = next(self.names), key.token_ids
        cached = self.manager.match(name, ids, len(ids), key.salt) // self.block_tokens
        self.manager.extend(name, len(ids))
        (table,) = self.manager.block_tables(name)
        self.memory |= zip(table[cached:], pages[cached:], strict=True)
        self.manager.remember(name, ids, len(ids), key.salt)
        self.manager.free(name)
        self.manager.check_integrity()

    def look_up(self, key):
        name = next(self.names)
        if not self.manager.match(name, key.token_ids, len(key.token_ids), key.salt):
            return []
        (table,) = self.manager.block_tables(name)
        self.manager.free(name)
        return [self.memory[block] for block in table]


class Disk(BaseStore):
    """Folders of pages by the weights that an engine has: engines of unlike revisions share the root."""

    is_persistent = True

    def __init__(self, folder):
        self.folder = folder
        self.tiers = {}

    @classmethod
    def supports(cls, case):
        return None if {*case.fields} <= {"salt", "revision"} else "an engine has no adapters or images"

    def tier(self, key):
        if key.revision not in self.tiers:
            identity = PageIdentity(facts={"model.weights": key.revision}, page_bytes=(32,))
            self.tiers[key.revision] = DiskTier(Path(self.folder), identity, 1 << 20)
        return self.tiers[key.revision]

    def names(self, key):
        keys = PrefixKeys({self.block_tokens}, self.tier(key).secret, key.salt)
        keys.extend(key.token_ids, len(key.token_ids))
        return [PageName(0, name) for name in keys.of_size(self.block_tokens)]

    def save(self, key, pages):
        for name, page in zip(self.names(key), pages, strict=True):
            self.tier(key).put(name, np.frombuffer(bytearray(page), np.uint8), lambda is_there: None)
        finish(self.tier(key))

    def look_up(self, key):
        tier, names = self.tier(key), self.names(key)
        names = list(itertools.takewhile(tier.__contains__, names))
        pages = [np.empty(32, np.uint8) for _ in names]
        tier.get(names, pages, lambda bad: None)
        finish(tier)
        return [page.tobytes() for page in pages]

    def close(self):
        for tier in self.tiers.values():
            tier.close()
