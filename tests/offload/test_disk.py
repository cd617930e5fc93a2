"""The disk tier keeps what it is given, over restarts, within its capacity, for one process at a time."""

from __future__ import annotations

import os
import random
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rayk.offload.page_file import HEADER_BYTES, PageIdentity, PageName
from rayk.types.errors import UserError
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
from tests.pd import wait_until

BLOCK = 4096
"""Of the disks that tests run on."""

SMALL = PageIdentity({"pages": "small"}, (4096,))
ON_DISK = 2 * BLOCK
"""A small page and its header."""


def on_disk(group: int) -> int:
    return -(-(HEADER_BYTES + IDENTITY.page_bytes[group]) // BLOCK) * BLOCK


def test_pages_come_back(tmp_path: Path):
    names = [name_of(i, i % 3) for i in range(100)]
    tier = open_tier(tmp_path)
    assert put_all(tier, names) == [True] * 100
    served, bad = get_all(tier, [*names, name_of(100)])
    assert bad == [name_of(100)]
    assert served == {name: page_of(name).tobytes() for name in names}
    assert tier.counters.pages_written == tier.counters.pages_read == 100
    assert tier.counters.bytes_read == sum(IDENTITY.page_bytes[n.group] for n in names)
    assert tier.counters.bad["missing"] == 1
    assert len(tier) == 100
    assert name_of(0) in tier
    assert name_of(0, 1) not in tier
    tier.close()


def test_a_file_is_its_header_and_its_page(tmp_path: Path):
    """Read with another tool: b2sum of coreutils knows the digests."""
    tier = open_tier(tmp_path)
    name = name_of(7, 1)
    put_all(tier, [name])
    tier.close()
    (file,) = files_of(tmp_path)
    data = file.read_bytes()
    assert file.name == f"g1-{name.key.hex()}.page"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert data[HEADER_BYTES:] == page_of(name).tobytes()
    magic, version, group, num_bytes, identity, key, page_digest, own_digest = struct.unpack(
        "<8sIIQ32s32s32s32s", data[:HEADER_BYTES]
    )
    assert (magic, version, group, num_bytes, key) == (b"RAYKPAGE", 1, 1, 1000, name.key)
    told = [b2sum(data[HEADER_BYTES:]), b2sum(data[: HEADER_BYTES - 32]), b2sum(IDENTITY.text.encode())]
    assert told == [page_digest.hex(), own_digest.hex(), identity.hex()]


def b2sum(data: bytes) -> str:
    done = subprocess.run(["b2sum", "-l", "256"], input=data, capture_output=True, check=True)
    return done.stdout.split()[0].decode()


def test_a_restart_finds_pages_and_secret(tmp_path: Path):
    names = [name_of(i, i % 3) for i in range(30)]
    tier = open_tier(tmp_path)
    put_all(tier, names)
    secret, used = tier.secret, tier.num_bytes
    tier.close()
    found = open_tier(tmp_path)
    assert (found.secret, found.num_bytes, len(found)) == (secret, used, 30)
    assert found.counters.pages_found == 30
    assert put_all(found, names) == [True] * 30
    assert found.counters.pages_written == 0
    served, bad = get_all(found, names)
    assert not bad
    assert served == {name: page_of(name).tobytes() for name in names}
    found.close()
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert len(secret) == 32


def test_the_page_used_longest_ago_goes_first(tmp_path: Path):
    names = [name_of(i) for i in range(8)]
    tier = open_tier(tmp_path, 4 * ON_DISK, SMALL)
    put_all(tier, names[:4], SMALL)
    get_all(tier, [names[0]], SMALL)
    put_all(tier, [names[1]], SMALL)  # Held: used, not written.
    assert tier.counters.pages_written == 4
    put_all(tier, names[4:6], SMALL)
    assert [name in tier for name in names] == [True, True, False, False, True, True, False, False]
    assert tier.counters.pages_evicted == 2
    assert len(files_of(tmp_path, SMALL)) == 4
    tier.close()


def test_the_order_of_use_survives_a_restart(tmp_path: Path):
    names = [name_of(i) for i in range(6)]
    tier = open_tier(tmp_path, identity=SMALL)
    for name in names:
        put_all(tier, [name], SMALL)
        time.sleep(0.02)  # A disk's clock may be coarse.
    get_all(tier, [names[0]], SMALL)
    tier.close()
    # A smaller tier than before keeps what fits.
    tier = open_tier(tmp_path, 3 * ON_DISK, SMALL)
    assert [name in tier for name in names] == [True, False, False, False, True, True]
    put_all(tier, [name_of(6)], SMALL)
    assert [name in tier for name in names] == [True, False, False, False, False, True]
    tier.close()
    assert len(files_of(tmp_path, SMALL)) == 3


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_pages_that_were_touched_stand_in_that_order_after_a_restart(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rayk.offload.disk.SAVE_ORDER_S", 0.0 if end == "killed" else 1e9)
    names = [name_of(i) for i in range(6)]
    tier = open_tier(tmp_path, identity=SMALL)
    put_all(tier, names, SMALL)
    order = [names[i] for i in (3, 0, 5, 1, 4, 2)]
    tier.touch([name_of(100), *order])
    assert tier.names() == tuple(order)
    if end == "killed":
        tier.turn()
        tier._writer.shutdown()
        tier._folder.release()
    else:
        tier.close()
    assert open_tier(tmp_path, identity=SMALL).names() == tuple(order)


def test_only_what_fits_beside_other_pages_is_admitted(tmp_path: Path):
    tier = open_tier(tmp_path, 5 * ON_DISK, SMALL, max_queued_bytes=2 * 4096)
    names = [name_of(i) for i in range(20)]
    assert put_all(tier, names[:2], SMALL) == [True, True]
    assert put_all(tier, names[2:4], SMALL) == [True, True]
    assert tier.admit([], names) == 0
    # Two of four stay: room for three, of which the queue takes two.
    assert tier.admit(names[4:9], names[:2]) == 2
    assert tier.counters.pages_dropped == 3
    # All stay: room for one. None stays, or is there.
    assert tier.admit(names[4:9], names[:4]) == 1
    assert tier.admit(names[4:6], names[8:]) == 2
    assert tier.counters.pages_dropped == 3 + 4
    assert put_all(tier, names[4:5], SMALL) == [True]
    assert tier.admit(names[5:6], names[:5]) == 0
    assert tier.counters.pages_evicted == 0
    tier.close()


def test_pages_that_are_dropped_are_gone_unless_they_are_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = hold(monkeypatch, "preadv")
    tier = open_tier(tmp_path, identity=SMALL)
    names = [name_of(i) for i in range(3)]
    put_all(tier, names, SMALL)
    bad: list[list[PageName]] = []
    tier.get([names[0]], [np.zeros(4096, np.uint8)], bad.append)
    for name in (names[0], names[1], name_of(7)):
        tier.drop(name)
    assert tier.names() == (names[2], names[0])
    assert tier.num_bytes == 2 * ON_DISK
    gate.set()
    finish(tier)
    assert bad == [[]]
    tier.close()
    assert len(files_of(tmp_path, SMALL)) == 2


def test_the_disk_never_takes_more_than_the_capacity(tmp_path: Path):
    capacity = 20 * BLOCK * 4
    tier = open_tier(tmp_path, capacity_bytes=capacity)
    rng = random.Random(1)
    for i in range(200):
        put_all(tier, [name_of(i, rng.randrange(3))])
        taken = sum(file.stat().st_blocks * 512 for file in files_of(tmp_path))
        assert taken <= tier.num_bytes <= capacity
    assert tier.counters.pages_evicted > 100
    tier.close()
    with pytest.raises(UserError, match="hold no page"):
        open_tier(tmp_path, capacity_bytes=on_disk(2) - 1)


def test_a_page_being_read_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = hold(monkeypatch, "preadv")
    tier = open_tier(tmp_path, 2 * ON_DISK, SMALL)
    put_all(tier, [name_of(0), name_of(1)], SMALL)
    into = np.zeros(4096, np.uint8)
    bad: list[list[PageName]] = []
    tier.get([name_of(0)], [into], bad.append)
    tier.get([name_of(1)], [np.zeros(4096, np.uint8)], bad.append)
    assert not tier.put(name_of(2), page_of(name_of(2)), lambda _: None)
    assert tier.counters.pages_dropped == 1
    gate.set()
    finish(tier)
    assert bad == [[], []]
    assert into.tobytes() == page_of(name_of(0)).tobytes()
    assert put_all(tier, [name_of(2)], SMALL) == [True]
    tier.close()


def test_a_full_queue_drops_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = hold(monkeypatch, "pwritev")
    tier = open_tier(tmp_path, max_queued_bytes=3 * 4096)
    ended: list[bool] = []
    taken = [tier.put(name_of(i), page_of(name_of(i)), ended.append) for i in range(5)]
    assert taken == [True, True, True, False, False]
    # The same page twice is written once, and both hear of it.
    assert tier.put(name_of(0), page_of(name_of(0)), ended.append)
    assert name_of(0) not in tier
    tier.turn()
    assert not ended
    gate.set()
    finish(tier)
    assert ended == [True] * 4
    assert (tier.counters.pages_dropped, tier.counters.pages_written) == (2, 3)
    assert put_all(tier, [name_of(3)]) == [True]
    tier.close()


def test_a_second_process_is_refused_and_other_pages_are_apart(tmp_path: Path):
    tier = open_tier(tmp_path)
    put_all(tier, [name_of(0)])
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        open_tier(tmp_path)
    other = PageIdentity({"weights": "a1", "dtype": "float8"}, IDENTITY.page_bytes)
    beside = open_tier(tmp_path, identity=other)
    assert beside.secret == tier.secret
    assert len(beside) == 0
    assert get_all(beside, [name_of(0)], other)[1] == [name_of(0)]
    beside.close()
    tier.close()
    tier.close()
    again = open_tier(tmp_path)
    assert get_all(again, [name_of(0)])[1] == []
    again.close()


def test_an_owner_that_is_about_to_end_is_waited_for(tmp_path: Path):
    tier = open_tier(tmp_path)
    timer = threading.Timer(0.1, tier.close)
    timer.start()
    open_tier(tmp_path).close()
    timer.join()


def test_pages_that_nobody_opens_any_more_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tier = open_tier(tmp_path)
    put_all(tier, [name_of(0, 2)])
    beside = open_tier(tmp_path, identity=SMALL)
    assert not caplog.records
    beside.close()
    tier.close()
    with caplog.at_level("WARNING", "rayk"):
        open_tier(tmp_path, identity=SMALL).close()
    (record,) = caplog.records
    assert record.getMessage() == f"{tmp_path} also holds 0.0 GB of pages that no tier has open"
    assert record.args[1] * 1e9 == pytest.approx(on_disk(2) + 2 * BLOCK)  # With lock and identity.json.


def test_identities_differ_in_every_fact():
    one = PageIdentity({"a": "1", "b": "2"}, (10, 20))
    assert one.digest == PageIdentity({"b": "2", "a": "1"}, (10, 20)).digest
    others = [
        PageIdentity({"a": "1", "b": "3"}, (10, 20)),
        PageIdentity({"a": "1"}, (10, 20)),
        PageIdentity({"a": "1", "b": "2"}, (20, 10)),
        PageIdentity({"a": "1", "b": "2"}, (10,)),
    ]
    assert len({i.folder_name for i in (one, *others)}) == 5


@thorough
def test_processes_that_start_at_once_share_one_secret(tmp_path: Path):
    script = (
        "import sys; from pathlib import Path; from rayk.offload.disk import DiskTier\n"
        "from rayk.offload.page_file import PageIdentity\n"
        "sys.stdin.readline()\n"
        "tier = DiskTier(Path(sys.argv[1]), PageIdentity({'n': sys.argv[2]}, (10,)), 1 << 20)\n"
        "print(tier.secret.hex()); tier.close()\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(i)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    told = {child.communicate(timeout=60)[0].strip() for child in children}
    assert told == {(tmp_path / "secret").read_bytes().hex()}
    assert [p.name for p in tmp_path.iterdir() if not p.is_dir()] == ["secret"]


def test_a_secret_made_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process makes one between our looking and our placing."""
    secret = bytes(range(32))

    def slow(num_bytes: int) -> bytes:
        (tmp_path / "secret").write_bytes(secret)
        return os.urandom(num_bytes)

    monkeypatch.setattr("rayk.offload.disk_folder.secrets.token_bytes", slow)
    tier = open_tier(tmp_path)
    assert tier.secret == secret == (tmp_path / "secret").read_bytes()
    tier.close()


WRITER = (
    "import sys; from pathlib import Path\n"
    "from tests.offload.disk import name_of, open_tier, page_of\n"
    "tier = open_tier(Path(sys.argv[1]))\n"
    "print(len(tier), flush=True)\n"
    "i = int(sys.argv[2])\n"
    "while True:\n"
    "    tier.turn(); name = name_of(i, i % 3); i += tier.put(name, page_of(name), lambda there: None)\n"
)


@thorough
def test_a_killed_writer_leaves_whole_pages_only(tmp_path: Path):
    found = 0
    for start in range(0, 5_000_000, 1_000_000):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(start)], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert int(child.stdout.readline()) == found
        enough = found + random.Random(start).randint(25, 100)
        wait_until(lambda n=enough: len(files_of(tmp_path)) >= n)
        child.send_signal(signal.SIGKILL)
        child.wait(30)
        child.stdout.close()
        found = len(files_of(tmp_path))
    # What a process killed between opening and renaming leaves, for certain.
    (tmp_path / IDENTITY.folder_name / ".writing-1").write_bytes(b"half a page")
    tier = open_tier(tmp_path)
    assert tier.counters.leftovers >= 1
    assert not list((tmp_path / IDENTITY.folder_name).glob(".writing-*"))
    names = [PageName(int(f.name[1]), bytes.fromhex(f.stem.split("-")[1])) for f in files_of(tmp_path)]
    served, bad = get_all(tier, names)
    assert not bad
    assert len(served) == found > 100
    assert served == {name: page_of(name).tobytes() for name in names}
    tier.close()


@thorough
@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_a_dict(tmp_path: Path, seed: int):
    """Random puts, gets, damage and restarts; nothing wrong is ever served, and without damage all is."""
    rng = random.Random(seed)
    tier = open_tier(tmp_path)
    there: dict[PageName, bytes] = {}
    pool = [name_of(i, i % 3) for i in range(40)]
    for _ in range(150):
        action = rng.choice(["put", "put", "get", "get", "damage", "restart"])
        names = rng.sample(pool, rng.randrange(1, 12))
        if action == "put":
            assert all(put_all(tier, names))
            there |= {name: page_of(name).tobytes() for name in names}
        elif action == "get":
            served, bad = get_all(tier, names)
            assert served == {name: there[name] for name in names if name in there}
            assert set(bad) == set(names) - set(there)
        elif action == "damage" and there:
            name = rng.choice(sorted(there, key=lambda n: n.key))
            file = tmp_path / IDENTITY.folder_name / name.file_name
            data = bytearray(file.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            assert get_all(tier, [name]) == ({}, [name])
            assert name not in tier
            del there[name]
        elif action == "restart":
            tier.close()
            tier = open_tier(tmp_path)
        assert len(tier) == len(there)
        assert tier.num_bytes == sum(on_disk(name.group) for name in there)
    tier.close()
    assert {f.name for f in files_of(tmp_path)} == {name.file_name for name in there}
