"""A page that is served is the page that was put, whatever happened to its file; a bad disk only turns the
tier off."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rayk.offload.disk import DiskTier
from rayk.offload.page_file import HEADER_BYTES, PageIdentity, PageName
from rayk.types.errors import DiskUnavailable, UserError
from tests.house import ROOT
from tests.markers import thorough
from tests.offload.disk import (
    IDENTITY,
    files_of,
    finish,
    get_all,
    hold,
    name_of,
    open_tier,
    page_of,
    put_all,
)
from tests.pd import HANG_S

NUM_DAMAGED = 1000


def damage(file: Path, other: Path, rng: random.Random) -> str:
    """Change a file's content, and say which reason must be given for it."""
    data = bytearray(file.read_bytes())
    kind = rng.choice(["flip", "flip", "flip", "cut", "grow", "swap", "gone", "zeros", "noise"])
    if kind == "flip":
        data[rng.randrange(12, len(data))] ^= 1 << rng.randrange(8)  # Behind the version.
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    elif kind == "grow":
        data += rng.randbytes(rng.randrange(1, 100))
    elif kind == "swap":
        data = bytearray(other.read_bytes())
    elif kind == "zeros":
        # What a power cut leaves of a file whose blocks were not written.
        start = rng.randrange(len(data) - 512)
        data[start:] = bytes(len(data) - start)
    elif kind == "noise":
        data[:] = rng.randbytes(len(data))
    if kind == "gone":
        file.unlink()
    else:
        file.write_bytes(data)
    reasons = {"cut": "truncated", "grow": "overlong", "swap": "foreign", "gone": "missing"}
    return reasons.get(kind, "flipped")


def test_a_file_system_that_takes_no_advice_costs_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EINVAL, "no advice here")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    tier = open_tier(tmp_path)
    names = [name_of(i) for i in range(3)]
    assert all(put_all(tier, names))
    assert get_all(tier, names) == ({n: page_of(n).tobytes() for n in names}, [])


@thorough
def test_every_damaged_file_is_reported_and_none_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rng = random.Random(5)
    names = [name_of(i, i % 2) for i in range(NUM_DAMAGED + 200)]
    other = name_of(999_999, 2)
    tier = open_tier(tmp_path)
    assert all(put_all(tier, [*names, other]))
    folder = tmp_path / IDENTITY.folder_name
    damaged = rng.sample(names, NUM_DAMAGED)
    expected = {n: damage(folder / n.file_name, folder / other.file_name, rng) for n in damaged}
    assert set(expected.values()) == {"flipped", "truncated", "overlong", "foreign", "missing"}

    with caplog.at_level(logging.WARNING, "rayk"):
        served, bad = get_all(tier, names)
    assert len(bad) == NUM_DAMAGED
    assert set(bad) == set(damaged)
    assert served == {n: page_of(n).tobytes() for n in names if n not in set(damaged)}
    assert Counter({why: n for why, n in tier.counters.bad.items() if n}) == Counter(expected.values())
    told = sorted(record.getMessage() for record in caplog.records)
    assert told == sorted(f"page file {folder / n.file_name} is not used: {expected[n]}" for n in damaged)
    assert tier.state == "on"
    # They are as if they had never been put: not held, not on the disk, and can be put again.
    assert not any(n in tier for n in damaged)
    assert put_all(tier, damaged[:50]) == [True] * 50
    assert get_all(tier, damaged[:50])[1] == []
    tier.close()
    left = {f.name for f in files_of(tmp_path)}
    assert left == {n.file_name for n in (*names, other) if n not in set(damaged[50:])}


@thorough
def test_every_bit_of_the_header_counts(tmp_path: Path):
    """Flipped one after the other, version and magic included."""
    identity = PageIdentity({"n": "1"}, (16,))
    tier = open_tier(tmp_path, identity=identity)
    names = [name_of(i) for i in range(HEADER_BYTES * 8)]
    put_all(tier, names, identity)
    for bit, name in enumerate(names):
        file = tmp_path / identity.folder_name / name.file_name
        data = bytearray(file.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
    assert get_all(tier, names, identity)[0] == {}
    assert tier.counters.bad["foreign"] == 32  # Bits of the version.
    assert tier.counters.bad["flipped"] == len(names) - 32
    tier.close()


@pytest.mark.parametrize(
    "facts", [{"weights": "b2", "dtype": "bfloat16"}, {"weights": "a1", "dtype": "float16"}]
)
def test_a_file_of_another_model_or_dtype_is_foreign(tmp_path: Path, facts: dict[str, str]):
    other = PageIdentity(facts, IDENTITY.page_bytes)
    for identity in (IDENTITY, other):
        tier = open_tier(tmp_path, identity=identity)
        put_all(tier, [name_of(0)], identity)
        tier.close()
    shutil.copy(files_of(tmp_path, other)[0], files_of(tmp_path)[0])
    tier = open_tier(tmp_path)
    assert get_all(tier, [name_of(0)]) == ({}, [name_of(0)])
    assert tier.counters.bad["foreign"] == 1
    tier.close()


def test_pages_that_changed_places_are_foreign(tmp_path: Path):
    tier = open_tier(tmp_path)
    names = [name_of(i) for i in range(3)]
    put_all(tier, names)
    first, second, _ = (tmp_path / IDENTITY.folder_name / name.file_name for name in names)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    served, bad = get_all(tier, names)
    assert (list(served), set(bad)) == ([names[2]], set(names[:2]))
    assert tier.counters.bad["foreign"] == 2
    tier.close()


def test_a_file_of_another_format_version_is_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a subfolder of its own; and where somebody put it into ours."""
    monkeypatch.setattr("rayk.offload.page_file.FORMAT_VERSION", 2)
    newer = PageIdentity(IDENTITY.facts, IDENTITY.page_bytes)
    tier = open_tier(tmp_path, identity=newer)
    put_all(tier, [name_of(0), name_of(1)])
    tier.close()
    monkeypatch.undo()
    tier = open_tier(tmp_path)
    assert len(tier) == 0
    put_all(tier, [name_of(0)])
    shutil.copy(files_of(tmp_path, newer)[0], files_of(tmp_path)[0])
    assert files_of(tmp_path, newer)[0] != files_of(tmp_path)[0]
    assert get_all(tier, [name_of(0)]) == ({}, [name_of(0)])
    assert tier.counters.bad["foreign"] == 1
    tier.close()


def test_files_that_cannot_be_pages_are_removed_at_the_start(tmp_path: Path):
    tier = open_tier(tmp_path)
    put_all(tier, [name_of(i) for i in range(3)])
    tier.close()
    short, long, _ = files_of(tmp_path)
    os.truncate(short, 100)
    os.truncate(long, 5000)
    folder = tmp_path / IDENTITY.folder_name
    (folder / PageName(3, bytes(32)).file_name).write_bytes(b"of a group that is not")
    (folder / "notes.txt").write_text("somebody's")
    tier = open_tier(tmp_path)
    assert {why: n for why, n in tier.counters.bad.items() if n} == {
        "truncated": 1,
        "overlong": 1,
        "foreign": 1,
    }
    assert len(tier) == 1
    tier.close()
    assert len(files_of(tmp_path)) == 1
    assert (folder / "notes.txt").exists()


def test_one_bad_page_read_twice_at_once_is_put_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second answer is about the old file and must not take the new one away."""
    gates = [threading.Event(), threading.Event()]
    numbers = itertools.count()
    come: list[int] = []
    read = os.preadv

    def gated(*arguments: Any) -> int:
        number = next(numbers)
        gate = gates[number] if number < len(gates) else None
        num_bytes = read(*arguments)
        come.append(number)
        while gate is not None and os.preadv is gated and not gate.wait(0.01):
            pass
        return num_bytes

    monkeypatch.setattr(os, "preadv", gated)
    tier = open_tier(tmp_path)
    name = name_of(0)
    put_all(tier, [name])
    file = files_of(tmp_path)[0]
    file.write_bytes(bytes(len(file.read_bytes())))
    answers: list[list[PageName]] = []
    for _ in range(2):
        tier.get([name], [page_of(name)], answers.append)
    wait_for(lambda: len(come) == 2)
    gates[0].set()
    wait_for(lambda: tier.turn() or answers)
    assert answers == [[name]]
    put: list[bool] = []
    assert tier.put(name, page_of(name), put.append)
    wait_for(lambda: tier.turn() or put)
    gates[1].set()
    finish(tier)
    assert answers == [[name], [name]]
    assert put == [True]
    assert name in tier
    assert get_all(tier, [name])[0] == {name: page_of(name).tobytes()}
    tier.close()


def wait_for(happened, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system of this size at the folder; only root may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_turns_the_tier_off(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with small_disk(tmp_path, 1 << 20):
        tier = open_tier(tmp_path)
        names = [name_of(i) for i in range(300)]
        with caplog.at_level(logging.WARNING, "rayk"):
            there = put_all(tier, names)
        assert 50 < sum(there) < 200
        assert tier.state == "off: No space left on device"
        assert [r.getMessage() for r in caplog.records] == [
            f"the disk tier at {tmp_path / IDENTITY.folder_name} is off: No space left on device; "
            "what is there is still read"
        ]
        # Quiet from now on, and what is there is served; nothing half written lies about.
        caplog.clear()
        assert not tier.put(name_of(1000), page_of(name_of(1000)), lambda _: None)
        served, bad = get_all(tier, names)
        assert served == {n: page_of(n).tobytes() for n, ok in zip(names, there, strict=True) if ok}
        assert len(bad) == there.count(False) == tier.counters.pages_dropped - 1
        assert not caplog.records
        assert len(files_of(tmp_path)) == sum(there)
        assert not list((tmp_path / IDENTITY.folder_name).glob(".writing-*"))
        tier.close()
        # A restart on a full disk starts, and serves.
        tier = open_tier(tmp_path)
        assert len(get_all(tier, names)[0]) == sum(there)
        tier.close()


def test_a_disk_that_becomes_read_only_turns_the_tier_off(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with small_disk(tmp_path, 1 << 20):
        tier = open_tier(tmp_path)
        put_all(tier, [name_of(0), name_of(1)])
        damaged = files_of(tmp_path)[0]
        damaged.write_bytes(b"x" * damaged.stat().st_size)
        # The lock is open for writing, so the mount below stays as it is: one above it is read-only.
        subprocess.run(["mount", "--bind", str(tmp_path), str(tmp_path)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path)], check=True)
            assert put_all(tier, [name_of(2), name_of(3)]) == [False, False]
            assert tier.state == "off: Read-only file system"
            served, bad = get_all(tier, [name_of(0), name_of(1)])
            assert len(served) == len(bad) == 1
            assert tier.counters.bad["flipped"] == 1
            tier.close()
            # What is there is served after a restart, too.
            caplog.clear()
            tier = open_tier(tmp_path)
            assert tier.state == "off: Read-only file system"
            assert [r.getMessage() for r in caplog.records] == [
                f"the disk tier at {tmp_path / IDENTITY.folder_name} is off: Read-only file system; "
                "what is there is still read"
            ]
            whole = list(served)
            assert get_all(tier, whole)[0] == {n: page_of(n).tobytes() for n in whole}
            assert put_all(tier, [name_of(9)]) == [False]
            tier.close()
            with pytest.raises(DiskUnavailable, match="Read-only file system"):
                open_tier(tmp_path, identity=PageIdentity({"weights": "c3"}, IDENTITY.page_bytes))
        finally:
            subprocess.run(["umount", "-l", str(tmp_path)], check=True)


class Faulty:
    """A disk whose faults a test turns on: reads or writes raise what the system would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing, self.code = "", 0
        for what, call in (("write", "pwritev"), ("read", "preadv")):
            monkeypatch.setattr(os, call, partial(self._call, what, getattr(os, call)))

    def _call(self, what: str, real: Callable[..., int], *arguments: Any) -> int:
        if self.failing == what:
            raise OSError(self.code, os.strerror(self.code))
        return real(*arguments)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    return Faulty(monkeypatch)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
def test_any_error_of_the_disk_turns_it_off(tmp_path: Path, code: int, faulty: Faulty):
    tier = open_tier(tmp_path)
    assert put_all(tier, [name_of(0)]) == [True]
    faulty.failing, faulty.code = "write", code
    assert put_all(tier, [name_of(1), name_of(2)]) == [False, False]
    assert tier.state == f"off: {os.strerror(code)}"
    assert len(get_all(tier, [name_of(0)])[0]) == 1
    faulty.failing = ""
    assert put_all(tier, [name_of(1)]) == [False]
    assert tier.num_bytes == 8192
    tier.close()


def test_after_an_error_the_disk_is_left_alone(tmp_path: Path, faulty: Faulty):
    """Pages that were queued already are refused without another attempt."""
    tier = open_tier(tmp_path)
    faulty.failing, faulty.code = "write", errno.EIO
    assert put_all(tier, [name_of(0)]) == [False]
    faulty.failing = ""
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        tier._writer.submit(tier._files.write, name_of(1), page_of(name_of(1))).result()
    assert files_of(tmp_path) == []
    tier.close()


def test_a_disk_that_takes_too_little_leaves_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda descriptor, parts, at: write(descriptor, parts[:1], at))
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: 0)
    tier = open_tier(tmp_path)
    assert put_all(tier, [name_of(0)]) == [False]
    assert tier.state == "off: fewer bytes were written than given"
    assert files_of(tmp_path) == []
    tier.close()


def test_a_file_that_the_system_cuts_short_is_finished_or_refused(tmp_path: Path):
    """A limit on file lengths takes a part of a page; the second call says why there is no more."""
    identity = PageIdentity({}, (100_000,))
    script = (
        "import resource, sys; from pathlib import Path; from tests.offload.disk import *\n"
        "tier = open_tier(Path(sys.argv[1]), identity=PageIdentity({}, (100_000,)))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "assert put_all(tier, [name_of(0)], PageIdentity({}, (100_000,))) == [False]\n"
        "print(tier.state); tier.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "off: File too large\n"
    assert files_of(tmp_path, identity) == []


def test_a_page_that_cannot_be_read_is_forgotten_and_the_tier_off(tmp_path: Path, faulty: Faulty):
    tier = open_tier(tmp_path)
    put_all(tier, [name_of(0), name_of(1)])
    faulty.failing, faulty.code = "read", errno.EIO
    assert get_all(tier, [name_of(0)]) == ({}, [name_of(0)])
    assert tier.counters.bad["unreadable"] == 1
    assert tier.state == "off: Input/output error"
    faulty.failing = ""
    assert name_of(0) not in tier
    assert get_all(tier, [name_of(1)])[1] == []
    tier.close()


@pytest.mark.parametrize("failing", ["read", "write"])
def test_too_many_open_files_are_not_the_disks_fault(tmp_path: Path, faulty: Faulty, failing: str):
    tier = open_tier(tmp_path)
    put_all(tier, [name_of(0)])
    faulty.failing, faulty.code = failing, errno.EMFILE
    assert put_all(tier, [name_of(1)]) == [failing == "read"]
    assert len(get_all(tier, [name_of(0)])[1]) == (failing == "read")
    faulty.failing = ""
    assert tier.state == "on"
    assert put_all(tier, [name_of(1)]) == [True]
    assert get_all(tier, [name_of(0), name_of(1)])[1] == []
    tier.close()


def test_a_bug_in_a_thread_is_told_and_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> NoReturn:
        raise ValueError("a bug")

    monkeypatch.setattr("rayk.offload.disk_io.make_header", broken)
    tier = open_tier(tmp_path)
    assert put_all(tier, [name_of(0)]) == [False]
    assert tier.state == "off: ValueError('a bug')"
    tier.close()


def test_closing_takes_bounded_time_on_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = hold(monkeypatch, "pwritev")
    tier = open_tier(tmp_path)
    ended: list[bool] = []
    for i in range(3):
        assert tier.put(name_of(i), page_of(name_of(i)), ended.append)
    began = time.monotonic()
    tier.close(timeout_s=0.4)
    assert time.monotonic() - began < 30, "it waited for the disk"
    assert ended == [False] * 3
    assert not tier.busy
    assert not tier.put(name_of(9), page_of(name_of(9)), ended.append)
    # The thread may still write: nobody else may have the folder.
    with pytest.raises(UserError, match="in use"):
        open_tier(tmp_path)
    gate.set()


def test_closing_writes_what_is_queued(tmp_path: Path):
    tier = open_tier(tmp_path)
    ended: list[bool] = []
    for i in range(200):
        tier.put(name_of(i), page_of(name_of(i)), ended.append)
    tier.close(timeout_s=60)
    assert ended == [True] * 200
    assert len(files_of(tmp_path)) == 200


def test_what_is_found_damaged_while_closing_is_told_and_lets_go_of_the_folder(tmp_path: Path):
    tier = open_tier(tmp_path)
    names = [name_of(i) for i in range(3)]
    put_all(tier, names)
    damaged = tmp_path / IDENTITY.folder_name / names[1].file_name
    damaged.write_bytes(bytes(damaged.stat().st_size))
    bad: list[list[PageName]] = []
    tier.get(names, [page_of(name) for name in names], bad.append)
    tier.close(timeout_s=HANG_S)
    assert bad == [[names[1]]]
    tier.drop(names[0])  # too late: whoever opens the folder next finds it
    tier.turn()
    tier = open_tier(tmp_path)
    assert len(tier) == 3
    assert get_all(tier, names)[1] == [names[1]]
    tier.close()


@pytest.mark.parametrize("kind", ["missing", "file", "secret", "subfolder"])
def test_a_folder_that_cannot_be_used_is_the_users_error(tmp_path: Path, kind: str):
    folder = tmp_path / "pages"
    if kind == "file":
        folder.write_text("")
    elif kind != "missing":
        folder.mkdir()
    if kind == "secret":
        (folder / "secret").write_bytes(b"short")
    elif kind == "subfolder":
        (folder / IDENTITY.folder_name).write_text("in the way")
    with pytest.raises(UserError) as caught:
        DiskTier(folder, IDENTITY, 1 << 30)
    assert str(folder) in caught.value.where
    assert caught.value.mend
    if kind == "secret":
        (folder / "secret").unlink()
        open_tier(folder).close()
