"""Files that are no plain ones, or not ours, in the place of pages: each costs its page and nothing else."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from tests.offload.disk import IDENTITY, get_all, name_of, open_tier, page_of, put_all


def make_odd(file: Path, kind: str) -> None:
    """Something else in the place of a page's file."""
    if file.exists():
        content = file.read_bytes()
        file.unlink()
    if kind == "link":
        (file.parent / "elsewhere").write_bytes(content)
        file.symlink_to("elsewhere")
    elif kind == "folder":
        file.mkdir()
        (file / "notes.txt").write_text("somebody's")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        parent = os.open(file.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{parent}/s")  # a socket's path may be no longer than 107 bytes
        os.close(parent)
        (file.parent / "s").rename(file)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "socket"])
def test_something_else_in_a_pages_place_costs_that_page_alone(tmp_path: Path, kind: str):
    tier = open_tier(tmp_path)
    names = [name_of(i) for i in range(4)]
    put_all(tier, names)
    file = tmp_path / IDENTITY.folder_name / names[1].file_name
    make_odd(file, kind)
    served, bad = get_all(tier, names)
    assert bad == [names[1]]
    assert served == {n: page_of(n).tobytes() for n in names if n != names[1]}
    assert sum(tier.counters.bad.values()) == 1
    assert names[1] not in tier
    # What is no folder is replaced.
    assert put_all(tier, [names[1], name_of(9)]) == [kind != "folder", True]
    assert tier.state == "on"
    assert len(get_all(tier, [*names, name_of(9)])[0]) == 5 - (kind == "folder")
    assert tier.num_bytes == 8192 * len(tier)
    tier.close()
    assert kind != "folder" or (file / "notes.txt").exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_page_that_is_not_ours_costs_that_page_alone(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
):
    tier = open_tier(tmp_path)
    put_all(tier, [name_of(0), name_of(1)])

    def refuse(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr("rayk.offload.disk_io.os.open", refuse)
        assert get_all(tier, [name_of(0)]) == ({}, [name_of(0)])
    assert tier.state == "on"
    assert put_all(tier, [name_of(0)]) == [True]
    assert get_all(tier, [name_of(0), name_of(1)])[1] == []
    tier.close()
