"""A large file is hashed once, and again where it may have changed. Truth is hashlib's hash of its bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayk.types import noted_hashes
from rayk.types.noted_hashes import file_sha256, noted_hash


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files whose bytes were hashed. All files count as large, and as written long ago."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(noted_hashes, "NOTED_BYTES", 0)
    monkeypatch.setattr(noted_hashes, "SETTLED_NS", -(10**12))
    found: list[str] = []
    file_digest = hashlib.file_digest

    def told(file, algorithm):
        found.append(Path(file.name).name)
        return file_digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", told)
    return found


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    yield path
    noted_hashes._known.clear()


def of_a_new_process(path: Path) -> str:
    noted_hashes._known.clear()
    return file_sha256(path)


def notes(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache/rayk/hashes").glob("*"))


def exact(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_second_process_reads_no_weights(weights: Path, reads: list[str], tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(weights)
    for path in (weights, weights, link, tmp_path / "cache" / ".." / "weights"):
        assert of_a_new_process(path) == exact(weights)
    assert reads == ["weights"]
    assert len(notes(tmp_path)) == 1


def _in_place(path: Path) -> None:
    path.write_bytes(b"two")


def _with_the_old_time(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _by_another(path: Path) -> None:
    _with_the_old_time(path)
    other = path.with_name("other")
    other.write_bytes(b"two")
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def _link(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"two")
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("replace", [_in_place, _with_the_old_time, _by_another, _link])
def test_what_was_replaced_is_hashed_again(
    weights: Path, reads: list[str], replace: Callable[[Path], None]
) -> None:
    first = of_a_new_process(weights)
    changed_ns = weights.stat().st_ctime_ns
    replace(weights)
    while weights.stat().st_ctime_ns == changed_ns:  # within one tick of the clock
        weights.chmod(0o600)
    assert file_sha256(weights) == of_a_new_process(weights) == exact(weights) != first
    assert len(reads) == 2


def test_what_was_written_a_moment_ago_is_hashed_by_the_next_process_too(
    weights: Path, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next write may bear the same time."""
    monkeypatch.setattr(noted_hashes, "SETTLED_NS", 10**12)
    assert of_a_new_process(weights) == file_sha256(weights) == exact(weights)
    assert (len(reads), notes(tmp_path)) == (1, [])
    assert of_a_new_process(weights) == exact(weights)
    assert len(reads) == 2


def test_what_is_written_while_it_is_hashed_gets_no_note(
    weights: Path, reads: list[str], tmp_path: Path
) -> None:
    def slow() -> str:
        weights.write_bytes(b"longer")
        return "of something"

    assert noted_hash("slow", [weights], slow) == "of something"
    assert notes(tmp_path) == []
    assert noted_hash("slow", [weights], lambda: "of the whole") == "of the whole"


@pytest.mark.parametrize(
    "damage",
    [
        lambda note: note.write_text("{"),
        lambda note: note.write_text("[]"),
        lambda note: note.write_text('{"files": [["x", null]], "hash": ""}'),
        lambda note: note.chmod(0o666),
        lambda note: note.unlink(),
    ],
    ids=["cut", "list", "type", "others-write", "gone"],
)
def test_a_note_that_is_not_trusted_is_made_again(
    weights: Path, reads: list[str], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    of_a_new_process(weights)
    (note,) = notes(tmp_path)
    damage(note)
    assert [of_a_new_process(weights) for _ in range(2)] == [exact(weights)] * 2
    assert len(reads) == 2


def test_a_disk_that_takes_no_notes_costs_a_read_for_each_process(
    weights: Path, reads: list[str], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("")
    assert [of_a_new_process(weights), file_sha256(weights)] == [exact(weights)] * 2
    assert len(reads) == 1


def test_hashes_of_another_kind_or_of_other_files_are_others(weights: Path, reads: list[str]) -> None:
    other = weights.with_name("other")
    other.write_bytes(b"two")
    asked = [("a", [weights]), ("b", [weights]), ("a", [weights, other]), ("a", [other])]
    for _ in range(2):
        found = [noted_hash(kind, files, lambda i=i: f"{i}") for i, (kind, files) in enumerate(asked)]
        assert found == ["0", "1", "2", "3"]
        noted_hashes._known.clear()


def test_small_files_get_no_notes(weights: Path, reads: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(noted_hashes, "NOTED_BYTES", 4)
    assert of_a_new_process(weights) == exact(weights)
    assert notes(tmp_path) == []
