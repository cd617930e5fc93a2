"""Pages of a host tier on disk, one behind the other: what is written, given up and damaged."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.offload.cluster import BareNode, Kind, open_node
from tests.offload.test_tier import N, hit, store


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


def files(folder: Path) -> list[Path]:
    """Of pages: the newest last."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4000]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def test_a_page_that_the_disk_gave_up_is_known_no_more(tmp_path: Path) -> None:
    """A disk with room for one sequence's pages: the first one's are a miss, not a failure."""
    node = open_node("full", num_blocks=N // 16 + 1, folder=tmp_path, disk_bytes=8 * 24_576)
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
    node.tier.close()
    pages = files(tmp_path)
    assert len(pages) == N // 16
    content = bytearray(pages[-1].read_bytes())
    if damage == "gone":
        pages[-1].unlink()
    else:
        content[-7] ^= 4
        pages[-1].write_bytes(content if damage == "flip" else content[:-7])
    node = open_node("full", folder=tmp_path)
    other = node.add(Kind(layout="LBHNC", block_size=32))
    answer = node.ask(other, tuple(range(N)))
    # A file that is too short, or gone, is found out when the folder is opened.
    assert len(answer.lost) == (damage == "flip"), answer.lost
    assert answer.num_tokens < N
    if answer.ticket is not None:
        assert node.take(other, answer).errors == [None]
    assert hit(node, other, 0) == answer.num_tokens
    assert node.tier.status()["lost_pages"] == len(answer.lost)
    node.expect_idle()
    node.tier.close()
