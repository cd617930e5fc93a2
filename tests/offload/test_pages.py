"""Pages of a host tier on disk, one behind the other: what is written, given up and damaged."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.offload.cluster import BareNode, Kind, open_node
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
    room = (N // 16 + 4) * FILE_BYTES
    node = open_node("full", folder=tmp_path, disk_bytes=room)
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


def test_what_the_queue_had_no_room_for_is_written_by_the_next_store(tmp_path: Path) -> None:
    """A queue of some pages: the first of the sequence go first, the others when it is stored again."""
    node = open_node("full", folder=tmp_path)
    engine = node.add(Kind())
    assert node.tier.pages is not None
    page_bytes = node.tier.pages._disk.identity.page_bytes[0]
    node.tier.pages._disk._max_queued = 3 * page_bytes
    for number in range(1, 3):
        assert store(node, engine, 0, N - 8 + number, keep_as=f"kept{number}").ok
        finish_writes(node, (3, 5)[number - 1])
        assert disk(node)["num_pages"] == (3, 5)[number - 1]
    for number in (1, 2):
        node.tier.drop(f"kept{number}")
    node.tier.clear()
    assert hit(node, engine, 0) == 80
    assert disk(node)["pages_dropped"] == 0
    node.expect_idle()
    node.tier.close()
