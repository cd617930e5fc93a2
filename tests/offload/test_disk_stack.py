"""The disk tier under engines: damaged pages, a full disk and a read-only one cost time, never an answer."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rayk.types.errors import UserError
from tests.markers import thorough
from tests.offload.disk import finish
from tests.offload.faults import Case, reopen
from tests.offload.node import Node
from tests.offload.test_disk_faults import small_disk
from tests.pd import local_agents

NUM_FLIPS = 1000
FLIPS_AT_ONCE = 40
LENGTHS = (120, 140, 300, 90, 200, 160, 170, 250)
ENGINES: list[dict[str, Any]] = [{"tp": 2, "num_blocks": 100}, {"layout": "LBNHC", "block_size": 32}]


@pytest.fixture(scope="module")
def case(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Case:
    path = checkpoint("qwen3")
    return Case.make(path, reference(path), LENGTHS, 4)


def forget_host(node: Node) -> None:
    """What comes next comes from disk."""
    node.thread.ask(lambda tier: tier.manager.forget())


def page_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.page"))


def written(node: Node) -> None:
    """Until nothing is being written."""
    node.settle()
    node.thread.ask(lambda tier: finish(tier.pages._disk))


def flip(file: Path, draw: random.Random) -> None:
    """One bit, anywhere: in the header or in the page."""
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


@thorough
def test_a_thousand_flipped_bits_cost_no_answer(case: Case, tmp_path: Path) -> None:
    """All pages come from disk; damaged ones are met, told and computed again, the others are used."""
    draw = random.Random(11)
    with Node.open(case.path, ENGINES, disk_folder=str(tmp_path)) as node:
        num_loaded = 0
        for turn in range(NUM_FLIPS // FLIPS_AT_ONCE):
            order = draw.sample(range(len(LENGTHS)), 4)
            for engine in node.engines:
                case.complete(engine, f"a{turn}-", *order)
            written(node)
            forget_host(node)
            for file in draw.sample(page_files(tmp_path), FLIPS_AT_ONCE):
                flip(file, draw)
            done = case.complete(node.engines[turn % 2], f"b{turn}-", *order)
            num_loaded += sum(d.info.get("num_disk_tokens", 0) for d in done)
            node.settle()
        disk = node.status()["disk"]
        assert disk["state"] == "on"
        assert sum(n for name, n in disk.items() if name.startswith("bad_")) > NUM_FLIPS / 2
        assert num_loaded > 1000
        assert disk["pages_read"] > NUM_FLIPS / 4, "others were served"
        told = [engine.offloading.counts for engine in node.engines]
        assert sum(t["lost_pages"] for t in told) > NUM_FLIPS / 2
        assert all(t["loads_failed"] == 0 for t in told), "what is lent is right"


def test_a_disk_that_is_full_in_the_middle_costs_no_answer(case: Case, tmp_path: Path) -> None:
    with small_disk(tmp_path, 400 << 10), Node.open(case.path, ENGINES, disk_folder=str(tmp_path)) as node:
        first, second = node.engines
        case.complete(first, "a", *range(len(LENGTHS)))
        written(node)
        assert node.status()["disk"]["state"] == "off: No space left on device"
        assert page_files(tmp_path)
        forget_host(node)
        done = case.complete(second, "b", *range(len(LENGTHS)))
        node.settle()
        # What was written before is still read; the rest was computed, and host memory goes on.
        assert sum(d.info.get("num_disk_tokens", 0) for d in done) > 0
        assert sum(d.info["num_cached_tokens"] for d in done) < sum(LENGTHS) - 16 * len(LENGTHS)
        done = case.complete(first, "c", *range(len(LENGTHS)))
        # Where blocks are short, the host tier goes without what was computed, and says so.
        told = second.offloading.counts
        without = told["stores_put_off"] + told["stores_dropped"] + told["stores_too_late"]
        num_found = sum(d.info.get("num_host_tokens", 0) > 0 for d in done)
        assert 2 < num_found >= len(LENGTHS) - without
        node.settle()


def test_a_disk_that_becomes_read_only_in_the_middle_costs_no_answer(case: Case, tmp_path: Path) -> None:
    with small_disk(tmp_path, 8 << 20), Node.open(case.path, ENGINES, disk_folder=str(tmp_path)) as node:
        first, second = node.engines
        case.complete(first, "a", 0, 1)
        written(node)
        subprocess.run(["mount", "--bind", str(tmp_path), str(tmp_path)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path)], check=True)
            case.complete(first, "b", 2, 3)
            written(node)
            assert node.status()["disk"]["state"] == "off: Read-only file system"
            forget_host(node)
            done = case.complete(second, "c", 0, 1, 2, 3)
            assert [bool(d.info.get("num_disk_tokens")) for d in done] == [True, True, False, False]
            node.settle()
        finally:
            subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_what_is_on_disk_is_found_again_by_a_tier_that_is_formed_anew(case: Case, tmp_path: Path) -> None:
    for index, own in enumerate(({"tp": 2}, {"layout": "LBNHC", "block_size": 32})):
        with Node.open(case.path, [own], disk_folder=str(tmp_path)) as node:
            (engine,) = node.engines
            done = case.complete(engine, "a", 0, 2)
            found = [d.info.get("num_disk_tokens", 0) for d in done]
            assert found == ([112, 288] if index else [0, 0])
            written(node)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """What is mounted there becomes read-only meanwhile."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


@pytest.mark.parametrize("kind", ["full", "read-only", "read-only above"])
def test_a_disk_that_is_bad_from_the_start_costs_no_answer(case: Case, tmp_path: Path, kind: str) -> None:
    """The host tier goes on without it, and says so."""
    folder = tmp_path / "kv" if kind == "read-only above" else tmp_path
    why = "No space left on device" if kind == "full" else "Read-only file system"
    with small_disk(tmp_path, 64 << 10), ExitStack() as stack:
        if kind == "full":
            fill(tmp_path)
        else:
            stack.enter_context(read_only(tmp_path))
        with Node.open(case.path, ENGINES, disk_folder=str(folder)) as node:
            for engine in node.engines:
                done = case.complete(engine, "a", 0, 2)
                node.settle()
            assert all(d.info["num_host_tokens"] > 0 for d in done), "host memory goes on"
            status = node.status()["disk"]
        assert status["state"].startswith("off: ")
        assert why in status["state"]
        assert str(tmp_path) in status["state"]
        assert {status[name] for name in ("num_pages", "num_bytes", "pages_written", "pages_found")} == {0}


def test_a_read_only_folder_is_read(case: Case, tmp_path: Path) -> None:
    """Also one whose pages do not fit any more; another process may not have it meanwhile."""
    with small_disk(tmp_path, 8 << 20):
        with Node.open(case.path, ENGINES[:1], disk_folder=str(tmp_path)) as node:
            case.complete(node.engines[0], "a", 0, 2)
            written(node)
        files = page_files(tmp_path)
        with read_only(tmp_path):
            with Node.open(case.path, ENGINES[1:], disk_folder=str(tmp_path)) as node:
                (engine,) = node.engines
                done = case.complete(engine, "b", 0, 2, 4)
                assert [d.info.get("num_disk_tokens", 0) for d in done] == [112, 288, 0]
                assert node.status()["disk"]["state"] == "off: Read-only file system"
                with pytest.raises(UserError, match="in use by process"):
                    reopen(node, local_agents())
                written(node)
            room = files[0].stat().st_size + 8192
            with Node.open(case.path, ENGINES[1:], disk_folder=str(tmp_path), disk_bytes=room) as node:
                (engine,) = node.engines
                case.complete(engine, "c", 0, 2)
                written(node)
            assert page_files(tmp_path) == files


def test_a_folder_that_is_wrong_is_an_error_at_the_start(case: Case, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with (
            pytest.raises(UserError, match="in the way|exists|Not a directory"),
            Node.open(case.path, ENGINES[1:], disk_folder=str(folder)),
        ):
            pass
