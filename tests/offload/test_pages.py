"""Pages of a host tier on disk, one behind the other: what is written, given up and damaged."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rayk.offload.disk import DiskTier
from tests.markers import one_per
from tests.offload.cluster import BareNode, Kind, open_node, tokens_of
from tests.offload.disk import finish
from tests.offload.test_tier import N, hit, store

FILE_BYTES = 20_480
"""Of a page of `full` on disk, in whole blocks of it."""


def finish_writes(node: BareNode, num_pages: int) -> None:
    """Wait until so many were written since the tier was opened."""
    until = time.monotonic() + 30
    while disk(node)["pages_written"] < num_pages:
        assert time.monotonic() < until, node.tier.status()
        node.tier.turn()
        time.sleep(0.001)


def disk(node: BareNode) -> dict[str, int]:
    found = node.tier.status()["disk"]
    assert isinstance(found, dict)
    return found


def test_a_page_that_the_disk_gave_up_is_known_no_more(tmp_path: Path) -> None:
    """A disk with room for one sequence's pages: the first one's are a miss, not a failure."""
    node = open_node("full", num_blocks=N // 16 + 1, folder=tmp_path, disk_bytes=8 * FILE_BYTES)
    engine = node.add(Kind())
    for sequence in (0, 1, 2):
        assert store(node, engine, sequence).ok
        finish_writes(node, (sequence + 1) * N // 16)
    assert disk(node)["pages_evicted"] > 0
    answer = node.ask(engine, tuple(range(N)))
    assert (answer.ticket, answer.lost) == (None, ())
    assert hit(node, engine, 2) == N
    node.expect_idle()
    node.tier.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_page_is_told_of_and_what_comes_before_it_is_served(tmp_path: Path, damage: str) -> None:
    node = open_node("full", folder=tmp_path)
    engine = node.add(Kind(tp=2))
    assert store(node, engine, 0).ok
    finish_writes(node, N // 16)
    assert node.tier.pages is not None
    name = node.tier.pages._disk.names()[0].file_name  # the last of the sequence: it goes first
    node.tier.close()
    (last,) = tmp_path.rglob(name)
    content = bytearray(last.read_bytes())
    if damage == "gone":
        last.unlink()
    else:
        content[-7] ^= 4
        last.write_bytes(content if damage == "flip" else content[:-7])
    node = open_node("full", folder=tmp_path)
    other = node.add(Kind(layout="LBHNC", block_size=32))
    answer = node.ask(other, tuple(range(N)))
    # A file that is too short, or gone, is found out when the folder is opened.
    assert len(answer.lost) == (damage == "flip"), answer.lost
    assert answer.num_tokens == N - 16
    if answer.ticket is not None:
        assert node.take(other, answer).errors == [None]
    assert hit(node, other, 0) == answer.num_tokens
    assert node.tier.status()["lost_pages"] == len(answer.lost)
    node.expect_idle()
    node.tier.close()


def test_a_sequence_loses_its_end_first(tmp_path: Path) -> None:
    """A disk with room for one sequence and some pages of another: what is left of the first one serves."""
    disk_bytes = (N // 16 + 4) * FILE_BYTES
    node = open_node("full", folder=tmp_path, disk_bytes=disk_bytes)
    engine = node.add(Kind())
    assert store(node, engine, 0).ok
    finish_writes(node, N // 16)
    assert store(node, engine, 1).ok
    finish_writes(node, 2 * N // 16)
    num_lost = disk(node)["pages_evicted"]
    assert 0 < num_lost < N // 16
    node.tier.clear()
    assert hit(node, engine, 0) == N - 16 * num_lost
    assert hit(node, engine, 1) == N
    node.expect_idle()
    node.tier.close()


def test_clearing_leaves_what_is_on_disk(tmp_path: Path) -> None:
    node = open_node("full", folder=tmp_path)
    engine = node.add(Kind())
    assert store(node, engine, 0).ok
    finish_writes(node, N // 16)
    node.tier.clear()
    answer = node.ask(engine, tuple(range(N)))
    assert (answer.num_tokens, answer.num_disk_tokens) == (N, N)
    assert node.take(engine, answer).errors == [None]
    node.expect_idle()
    node.tier.close()


def limit_queue(node: BareNode, num_pages: int) -> None:
    """Of pages of `full` that wait to be written."""
    tier = disk_tier(node)
    tier._max_queued = num_pages * tier.identity.page_bytes[0]


def disk_tier(node: BareNode) -> DiskTier:
    assert node.tier.pages is not None
    return node.tier.pages._disk


def settle(node: BareNode) -> None:
    """Until nothing waits for the disk."""
    finish(disk_tier(node))


@pytest.mark.parametrize("keeps", [True, False])
def test_what_the_queue_had_no_room_for_is_written_by_the_next_store(
    tmp_path: Path, keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue of some pages: the first of the sequence go first, the others when it is stored again."""
    node = open_node("full", folder=tmp_path)
    engine = node.add(Kind())
    limit_queue(node, 2)
    for number, num_left_out in ((1, 4), (2, 6), (3, 6)):
        how = {"keep_as": f"kept{number}"} if keeps else {}
        answer = store(node, engine, 0, N, **how)
        assert answer.ok
        assert keeps or bool(answer.num_bytes) == (number == 1), "host memory has it all from then on"
        settle(node)
        assert disk(node)["num_pages"] == 2 * number
        assert disk(node)["pages_dropped"] == num_left_out
        node.tier.drop(f"kept{number}")
    assert [r.getMessage().partition(" is ")[2] for r in caplog.records] == [
        "too slow for all that is stored: pages are left out"
    ], "it is said once"
    node.tier.clear()
    assert hit(node, engine, 0) == N
    node.expect_idle()
    node.tier.close()


# What is worth keeping.


def test_a_sequence_that_grows_beyond_the_disk_keeps_its_beginning(tmp_path: Path) -> None:
    node = open_node("full", num_blocks=200, folder=tmp_path, disk_bytes=9 * FILE_BYTES)
    engine = node.add(Kind(num_blocks=80))
    for num_tokens, num_there in ((96, 6), (192, 9), (192, 9)):
        assert store(node, engine, 0, num_tokens).ok
        settle(node)
        node.tier.clear()
        assert disk(node)["num_pages"] == num_there
        assert hit(node, engine, 0, num_tokens) == 16 * num_there
    assert disk(node)["pages_evicted"] == 0
    assert disk(node)["pages_dropped"] == 3 + 3
    # All of it can still be given up for others.
    assert store(node, engine, 1, 144).ok
    settle(node)
    node.tier.clear()
    assert [hit(node, engine, sequence, 144) for sequence in (0, 1)] == [0, 144]
    node.expect_idle()
    node.tier.close()


def test_a_sequence_that_grew_loses_its_end_first(tmp_path: Path) -> None:
    """Pages that were written later are no younger than those in front of them."""
    node = open_node("full", num_blocks=200, folder=tmp_path, disk_bytes=13 * FILE_BYTES)
    engine = node.add(Kind(num_blocks=80))
    for num_tokens in (96, 192):
        assert store(node, engine, 0, num_tokens).ok
        settle(node)
    assert store(node, engine, 1, 64).ok
    settle(node)
    assert disk(node)["pages_evicted"] == 3
    node.tier.clear()
    assert hit(node, engine, 0, 192) == 192 - 3 * 16
    node.expect_idle()
    node.tier.close()


@pytest.mark.parametrize("use", ["load", "store"])
@pytest.mark.parametrize("restarts", [False, True])
def test_what_host_memory_gives_outlasts_other_pages_on_disk(
    tmp_path: Path, use: str, restarts: bool
) -> None:
    """Room for two sequences: the first one is asked for whenever another one was stored."""
    sizes = {"num_blocks": 200, "folder": tmp_path, "disk_bytes": 13 * FILE_BYTES}
    node = open_node("full", **sizes)
    engine = node.add(Kind(num_blocks=80))
    for sequence in range(4):
        assert store(node, engine, sequence).ok
        settle(node)
        assert hit(node, engine, 0) == N if use == "load" else store(node, engine, 0).num_bytes == 0
    assert node.tier.status().get("disk_hits", 0) == 0
    if restarts:
        node.tier.close()
        node = open_node("full", **sizes)
        engine = node.add(Kind(num_blocks=80))
        assert store(node, engine, 4).ok
        settle(node)
    node.tier.clear()
    assert hit(node, engine, 0) == N
    assert hit(node, engine, 3) == (16 if restarts else N)
    assert hit(node, engine, 1) == 0
    node.expect_idle()
    node.tier.close()


@pytest.mark.parametrize("first_comes_from_host", [False, True])
def test_the_end_of_a_sequence_goes_first_wherever_its_parts_were_found(
    tmp_path: Path, first_comes_from_host: bool
) -> None:
    node = open_node("full", num_blocks=200, folder=tmp_path, disk_bytes=13 * FILE_BYTES)
    engine = node.add(Kind(num_blocks=80))
    assert store(node, engine, 0).ok
    settle(node)
    node.tier.clear()
    if first_comes_from_host:
        assert hit(node, engine, 0, 48) == 48
    assert hit(node, engine, 0) == N
    assert disk(node)["pages_read"] == N // 16
    assert store(node, engine, 1, 144).ok
    settle(node)
    node.tier.clear()
    assert hit(node, engine, 0) == N - 2 * 16
    node.expect_idle()
    node.tier.close()


# What changed in host memory.


def flip_page(node: BareNode, sequence: int, index: int) -> None:
    """A bit of a block in host memory."""
    manager, page = node.tier.manager, node.tier.caches.geometry.block_bytes
    found = manager.find_prefix("flip", tokens_of(sequence, N), N)
    manager.free("flip")
    node.tier.caches.buffer[found.tables[0][index] * page + 7] ^= 4


@pytest.mark.parametrize("num_tokens", [N, 320])
def test_a_page_that_changed_in_host_memory_is_not_written(tmp_path: Path, num_tokens: int) -> None:
    """It was not on disk yet; then the sequence is stored again, or a longer one that begins with it."""
    node = open_node("full", num_blocks=200, folder=tmp_path)
    engine = node.add(Kind(num_blocks=80))
    limit_queue(node, 3)
    assert store(node, engine, 0).ok
    settle(node)
    flip_page(node, 0, 3)
    limit_queue(node, 100)
    assert store(node, engine, 0, num_tokens).num_bytes > 0, "what host memory has is not right"
    settle(node)
    # A store that proved another copy writes that one.
    assert node.tier.status().get("changed_pages", 0) == (num_tokens == N)
    assert disk(node)["num_pages"] == num_tokens // 16
    node.tier.close()
    node = open_node("full", num_blocks=200, folder=tmp_path)
    engine = node.add(Kind(num_blocks=80))
    assert hit(node, engine, 0, num_tokens) == num_tokens
    node.expect_idle()
    node.tier.close()


@one_per()
@pytest.mark.parametrize("family", ["full", "gpt_oss", "llama4", "granite", "fp8_token_head"])
def test_changes_anywhere_in_host_memory_never_come_back_from_disk(tmp_path: Path, family: str) -> None:
    """Pages that a slow disk did not take, of blocks whose rows may be dead by the time it does."""
    node = open_node(family, num_blocks=300, folder=tmp_path)
    engine = node.add(Kind(num_blocks=80))
    tier, rng = disk_tier(node), random.Random(family)
    lengths = [node.whole(n) for n in (64, 96, 128, 192)]
    tier._max_queued = 1  # One page at a time.
    for sequence in range(6):
        for num_tokens in lengths:
            assert store(node, engine, sequence, num_tokens).ok
            settle(node)
    manager, page = node.tier.manager, node.tier.caches.geometry.block_bytes
    assert manager.prefixes is not None
    changed = rng.sample(manager.prefixes.named, 40)
    for block in changed:
        node.tier.caches.buffer[block * page : (block + 1) * page] ^= 1
    tier._max_queued = 1 << 30
    for sequence in range(6):
        for num_tokens in lengths:
            assert store(node, engine, sequence, num_tokens).ok
            settle(node)
    assert node.tier.status()["changed_pages"] > 4
    node.tier.close()
    node = open_node(family, num_blocks=300, folder=tmp_path)
    engine = node.add(Kind(num_blocks=80))
    for sequence in range(6):
        for num_tokens in lengths:
            assert hit(node, engine, sequence, num_tokens) == num_tokens
            node.tier.clear()
    node.expect_idle()
    node.tier.close()


# Blocks of which pages hold some rows.


@pytest.mark.parametrize("lengths", [(130, 128), (128, 130), (130, 128, 133, 128)])
def test_of_two_pages_of_a_block_that_with_more_rows_is_kept(
    tmp_path: Path, lengths: tuple[int, ...]
) -> None:
    """A window of 40 ends in a block: at 130 tokens from row 91 on, at 128 from row 89 on."""
    node = open_node("gpt_oss", num_blocks=300, folder=tmp_path)
    engine = node.add(Kind(num_blocks=80))
    for num_tokens in lengths:
        assert store(node, engine, 0, num_tokens, keep_as="kept").ok
        node.tier.drop("kept")
        settle(node)
        node.tier.clear()
    assert hit(node, engine, 0, 128) == 128
    settle(node)
    (some,) = [name for name in disk_tier(node).names() if name.since]
    assert some.since == (89,)
    assert disk(node)["num_pages"] == 8 + 3 == len(list(tmp_path.rglob("*.page")))
    node.tier.close()
    node = open_node("gpt_oss", num_blocks=300, folder=tmp_path)
    engine = node.add(Kind(num_blocks=80))
    assert hit(node, engine, 0, 128) == 128
    node.tier.close()


def test_of_two_pages_of_a_block_that_are_found_one_is_kept(tmp_path: Path) -> None:
    """As an earlier process may have left them, in any order."""
    node = open_node("gpt_oss", num_blocks=300, folder=tmp_path)
    engine = node.add(Kind(num_blocks=80))
    assert store(node, engine, 0, 128).ok
    settle(node)
    (some,) = [name for name in disk_tier(node).names() if name.since]
    node.tier.close()
    (file,) = tmp_path.rglob(some.file_name)
    for age in (-100, 100):
        other = file.with_name(replace(some, since=(91,)).file_name)
        other.write_bytes(file.read_bytes())
        os.utime(other, (time.time() + age,) * 2)
        node = open_node("gpt_oss", num_blocks=300, folder=tmp_path)
        engine = node.add(Kind(num_blocks=80))
        assert hit(node, engine, 0, 128) == 128
        node.tier.close()
        assert not other.exists()
