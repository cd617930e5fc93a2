"""Disk tiers for tests: names, pages, and waiting for completions."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayk.offload.disk import DiskTier
from rayk.offload.page_file import Bytes, PageIdentity, PageName

IDENTITY = PageIdentity({"weights": "a1", "dtype": "bfloat16"}, (4096, 1000, 70_000))
GIB = 1 << 30


def name_of(i: int, group: int = 0) -> PageName:
    """The i-th page of a group."""
    return PageName(group, hashlib.sha256(f"key {i}".encode()).digest())


def page_of(name: PageName, identity: PageIdentity = IDENTITY) -> Bytes:
    """What this page holds: bytes that belong to its name and no other."""
    seed = int.from_bytes(name.key[:8], "little") + name.group
    return np.random.default_rng(seed).integers(0, 256, identity.page_bytes[name.group], np.uint8)


def open_tier(
    folder: Path, capacity_bytes: int = GIB, identity: PageIdentity = IDENTITY, **options: int
) -> DiskTier:
    return DiskTier(folder, identity, capacity_bytes, **options)


def hold(monkeypatch: pytest.MonkeyPatch, call: str) -> threading.Event:
    """Until this is set, or the test is over, a call of os (pwritev, preadv) does not return."""
    gate, real = threading.Event(), getattr(os, call)

    def wait(*arguments: Any) -> Any:
        while getattr(os, call) is wait and not gate.wait(0.01):
            pass
        return real(*arguments)

    monkeypatch.setattr(os, call, wait)
    return gate


def finish(tier: DiskTier, timeout_s: float = 60.0) -> None:
    """Turn until nothing is under way."""
    deadline = time.monotonic() + timeout_s
    while tier.busy:
        assert time.monotonic() < deadline, "the disk tier does not come to an end"
        tier.turn()
        time.sleep(0.0005)


def put_all(tier: DiskTier, names: Sequence[PageName], identity: PageIdentity = IDENTITY) -> list[bool]:
    """Whether each page is there in the end."""
    ended: dict[int, bool] = {}
    for i, name in enumerate(names):
        taken = tier.put(name, page_of(name, identity), lambda there, i=i: ended.__setitem__(i, there))
        if not taken:
            ended[i] = False
    finish(tier)
    return [ended[i] for i in range(len(names))]


def get_all(
    tier: DiskTier, names: Sequence[PageName], identity: PageIdentity = IDENTITY
) -> tuple[dict[PageName, bytes], list[PageName]]:
    """Pages that were served, and names of those that were not."""
    into = [np.full(identity.page_bytes[name.group], 0xEE, np.uint8) for name in names]
    answers: list[list[PageName]] = []
    tier.get(names, into, answers.append)
    assert not answers, "completions run in turns only"
    finish(tier)
    (bad,) = answers
    return {n: p.tobytes() for n, p in zip(names, into, strict=True) if n not in bad}, bad


def files_of(folder: Path, identity: PageIdentity = IDENTITY) -> list[Path]:
    """Page files, in the order of their names."""
    return sorted((folder / identity.folder_name).glob("*.page"))
