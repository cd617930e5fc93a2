"""Stores of KV: one that is right, and ones that each leave one thing out of their keys, as stores have."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
from dataclasses import asdict, replace
from pathlib import Path

from rayk.conformance.store import BaseStore
from rayk.conformance.store_scenarios import NUM_THREADS


class Right(BaseStore):
    """Pages by the digest of all that they depend on, in a file that another process finds."""

    is_persistent = True
    is_thread_safe = True
    max_blocks = 12

    def __init__(self, folder):
        self.file = Path(folder) / "pages"
        self.lock = threading.Lock()
        self.pages = pickle.loads(self.file.read_bytes()) if self.file.exists() else {}

    def name(self, key, end):
        return hashlib.sha256(json.dumps(self.facts(key.up_to(end))).encode()).hexdigest()

    def facts(self, key):
        return asdict(key)

    def names(self, key):
        ends = range(self.block_tokens, len(key.token_ids) + 1, self.block_tokens)
        return [self.name(key, end) for end in ends]

    def save(self, key, pages):
        with self.lock:
            for name, page in zip(self.names(key), pages, strict=True):
                self.pages.pop(name, None)
                self.pages[name] = page
            while len(self.pages) > self.max_blocks:
                del self.pages[next(iter(self.pages))]

    def look_up(self, key):
        found = []
        with self.lock:
            for name in self.names(key):
                if name not in self.pages:
                    break
                found.append(self.pages[name])
        return found

    def close(self):
        self.file.write_bytes(pickle.dumps(self.pages))


class NeverHits(Right):
    def look_up(self, key):
        return []


class Forgets(Right):
    """Leaves `out` out of its keys."""

    out = ""

    def facts(self, key):
        facts = super().facts(key)
        del facts[self.out]
        return facts


class NoSalt(Forgets):
    out = "salt"


class NoAdapter(Forgets):
    out = "adapter"


class NoRevision(Forgets):
    out = "revision"


class NoImages(Forgets):
    out = "multimodal"


class NoTokens(Forgets):
    """Tells prompts apart by how long they are."""

    out = "token_ids"

    def facts(self, key):
        return super().facts(key) | {"length": len(key.token_ids)}


class AdapterByName(Right):
    def facts(self, key):
        return super().facts(key) | {"adapter": key.adapter and key.adapter.name}


class AdapterByPath(Right):
    def facts(self, key):
        return super().facts(key) | {"adapter": key.adapter and [key.adapter.name, key.adapter.path]}


class ShortHashes(Right):
    """Keeps the last 16 bits of an image's hash, as LMCache did."""

    def facts(self, key):
        return super().facts(key) | {"multimodal": [(i.hash[-4:], i.offset) for i in key.multimodal]}


class NoPlaces(Right):
    def facts(self, key):
        return super().facts(key) | {"multimodal": sorted({item.hash for item in key.multimodal})}


class FirstBlockImages(Right):
    """Knows the images of a prompt's first block alone."""

    def facts(self, key):
        items = [asdict(item) for item in key.multimodal if item.offset < self.block_tokens]
        return super().facts(key) | {"multimodal": items}


class FirstBlockSalt(Right):
    """Salts the first block, and does not chain the others to it."""

    def facts(self, key):
        is_first = len(key.token_ids) == self.block_tokens
        return super().facts(key) | {"salt": key.salt if is_first else None}


class OneNamespace(Right):
    """Salts and revisions go into one list without a tag, as adapters and salts in vLLM #44701."""

    def facts(self, key):
        facts = super().facts(key) | {"salt": None, "revision": None}
        told = [key.revision if key.revision != "main" else None, key.salt]
        return facts | {"extra": [text for text in told if text is not None]}


class Joined(Right):
    """Joins salt and revision with a dash."""

    def facts(self, key):
        is_told = key.salt is not None and key.revision != "main"
        joined = {"salt": f"{key.salt}-{key.revision}", "revision": None} if is_told else {}
        return super().facts(key) | joined


class SaltBeforeTokens(Right):
    """Hashes the salt's bytes, then those of the tokens."""

    def name(self, key, end):
        key = key.up_to(end)
        facts = self.facts(key) | {"salt": None, "token_ids": None}
        tokens = b"".join(token.to_bytes(4, "little") for token in key.token_ids)
        return hashlib.sha256(json.dumps(facts).encode() + (key.salt or "").encode() + tokens).hexdigest()


class StaleAfterEviction(Right):
    """Gives a page's place to another, and still finds it by its old name."""

    is_persistent = False

    def __init__(self, folder):
        super().__init__(folder)
        self.places = [b""] * self.max_blocks
        self.next = 0

    def save(self, key, pages):
        for name, page in zip(self.names(key), pages, strict=True):
            self.pages[name] = self.next % self.max_blocks
            self.places[self.next % self.max_blocks] = page
            self.next += 1

    def look_up(self, key):
        return [self.places[place] for place in super().look_up(key)]


class NotThreadSafe(Right):
    """Keeps the prompt that it saves where other threads do, too: all save by the key that was put there
    last, here always the greatest."""

    def __init__(self, folder):
        super().__init__(folder)
        self.keys = []
        self.all_here = threading.Barrier(NUM_THREADS)

    def save(self, key, pages):
        if threading.current_thread() is not threading.main_thread():
            self.keys.append(key)
            self.all_here.wait()
            key = max(self.keys, key=lambda key: key.token_ids)
        super().save(key, pages)


class RestartsEmpty(Right):
    def close(self):
        pass


class FoundWithoutSalt(Right):
    """After a restart it looks for the names that keys without a salt have, and has kept all by those."""

    def __init__(self, folder):
        super().__init__(folder)
        self.was_there = bool(self.pages)
        self.unsalted = {}

    def facts(self, key):
        return super().facts(key) | ({"salt": None} if self.was_there else {})

    def save(self, key, pages):
        super().save(key, pages)
        self.unsalted |= zip(self.names(replace(key, salt=None)), pages, strict=True)

    def close(self):
        self.pages = self.unsalted
        super().close()


class DiesInTheEnd(Right):
    """Takes its process with it when it is closed."""

    def look_up(self, key):
        raise RuntimeError("no")

    def close(self):
        os._exit(3)
