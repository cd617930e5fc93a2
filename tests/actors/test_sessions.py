"""Folders of local clusters: removed at the end, or by a later run when theirs was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rayk.actors.sessions import MARK, remove_dead_sessions, session_folder

OWNER = """
import time
from pathlib import Path
from rayk.actors.sessions import session_folder
with session_folder() as folder:
    (Path(folder) / "session_1" / "logs").mkdir(parents=True)
    (Path(folder) / "session_1" / "logs" / "raylet.out").write_text("x")
    (Path(folder) / "session_latest").symlink_to("session_1")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory of the test's own, for its children too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_runs_folder_is_removed_by_the_next_run(temporary: Path) -> None:
    process, inner = owner()
    folder = inner.parent
    assert folder.parent == temporary
    with session_folder() as mine:
        assert folder.is_dir(), "its run is alive"
        assert remove_dead_sessions() == []
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert (inner / "session_1" / "logs").is_dir(), "a killed run cleans nothing up"
        assert remove_dead_sessions() == [folder]
        assert [p.name for p in temporary.iterdir()] == [Path(mine).parent.name]
        (Path(mine) / "sockets").mkdir()
    assert not list(temporary.iterdir())


def test_folders_that_are_not_ours_stay(temporary: Path) -> None:
    for name in ("rayk-cluster/session_1", "rayk-12345678", "other/x"):
        (temporary / name).mkdir(parents=True)
    (temporary / "other" / MARK).write_text("")
    (temporary / "rayk-file").write_text("")
    with session_folder():
        pass
    assert sorted(p.name for p in temporary.iterdir()) == [
        "other",
        "rayk-12345678",
        "rayk-cluster",
        "rayk-file",
    ]


def test_an_error_in_the_block_removes_the_folder_too(temporary: Path) -> None:
    def interrupted() -> None:
        with session_folder() as folder:
            (Path(folder) / "logs").mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(temporary.iterdir())


def test_other_users_see_nothing_of_it(temporary: Path) -> None:
    with session_folder() as inner:
        Path(inner).chmod(0o777)  # as Ray does with what it is given
        assert Path(inner).parent.stat().st_mode & 0o777 == 0o700
