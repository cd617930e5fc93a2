"""Models by name where the network, the disk, the hub or another process is in the way."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from rayk.models import hub as models_hub
from rayk.models.headers import check_weights
from rayk.models.hub import config_file, model_folder, pinned
from rayk.types.errors import CheckpointError
from tests.house import ROOT
from tests.local_hub import NAME, PINNED, WEIGHTS, LocalHub, hub_environment
from tests.markers import one_per, thorough

FETCH = f"""
import sys
from rayk.models.hub import pinned
print("asks", flush=True)
print(pinned({NAME!r}))
"""
WITHOUT_POWERS = """
import ctypes
version, of_this_process = 0x20080522, 0
head, no_capability = (ctypes.c_uint32 * 2)(version, of_this_process), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(head, no_capability) == 0
"""
"""What makes root heed the permissions of files, as anybody does."""
CHUNK = 1 << 16
"""Of huggingface_hub's downloads here; 10 MB elsewhere. A chunk that came in part comes again."""


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small enough for a tiny model to have some."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits before each further try: a second where a download broke, 23 in all where a hub
    fails."""
    monkeypatch.setattr(time, "sleep", lambda _: None)


def cache_folder() -> Path:
    return Path(huggingface_hub.constants.HF_HUB_CACHE)


def weights_in_cache() -> list[Path]:
    """Whole or in part, under whatever name."""
    return [p for p in cache_folder().rglob("*") if p.is_file() and p.stat().st_size > 500_000]


def failure(action: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        action()
    return caught.value


def in_process(hub: LocalHub, home: Path, script: str = FETCH, **options: Any) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment = kept | hub_environment(hub, home) | options.pop("env", {})
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment, text=True, **options)


# --- connections that break ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("chunks", "impatient")
def test_a_broken_download_goes_on_where_it_broke(hub: LocalHub) -> None:
    hub.cuts[WEIGHTS] = [2 * CHUNK + 1, 3 * CHUNK]
    folder = model_folder(pinned(NAME))
    assert hub.ranges[WEIGHTS] == ["", f"bytes={2 * CHUNK}-", f"bytes={5 * CHUNK}-"]
    assert (folder / WEIGHTS).read_bytes() == (hub.folders[NAME] / WEIGHTS).read_bytes()


@pytest.mark.usefixtures("impatient")
def test_a_hub_that_always_breaks_off_is_given_up(hub: LocalHub) -> None:
    hub.cuts[WEIGHTS] = [0] * 100
    error = failure(lambda: pinned(NAME))
    assert "cannot be fetched" in error.problem
    assert "received 0 bytes" in error.problem
    assert "the same command" in error.mend
    assert len(hub.cuts[WEIGHTS]) == 94  # a try and five more
    assert weights_in_cache() == []
    hub.cuts.clear()
    hub.ranges.clear()
    assert pinned(NAME) == PINNED
    assert list(hub.ranges) == [WEIGHTS]  # the other files were kept


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
@pytest.mark.usefixtures("impatient")
def test_a_part_is_never_taken_for_the_whole(hub: LocalHub, resets: bool) -> None:
    """The last connection closes or is reset late in the file, whatever came of it."""
    hub.resets = resets
    hub.cuts[WEIGHTS] = [600_000, *[0] * 100]
    failure(lambda: pinned(NAME))
    assert weights_in_cache() == []
    hub.cuts.clear()
    check_weights(model_folder(pinned(NAME)))


# --- contents that are not the hub's ------------------------------------------------------------------------


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (flipped, f"{WEIGHTS}: not what the hub has, by the hash"),
        (lambda content: content[:-9], "should be of size"),
        (lambda content: content + b"more", "should be of size"),
    ],
    ids=["flipped", "short", "long"],
)
def test_wrong_weights_are_refused_and_not_kept(
    hub: LocalHub, change: Callable[[bytes], bytes], says: str
) -> None:
    hub.wrong[WEIGHTS] = change((hub.folders[NAME] / WEIGHTS).read_bytes())
    assert says in failure(lambda: pinned(NAME)).problem
    assert weights_in_cache() == []
    hub.wrong.clear()
    folder = model_folder(pinned(NAME))
    assert (folder / WEIGHTS).read_bytes() == (hub.folders[NAME] / WEIGHTS).read_bytes()


def test_a_wrong_config_is_refused(hub: LocalHub) -> None:
    hub.wrong["config.json"] = flipped((hub.folders[NAME] / "config.json").read_bytes())
    assert "config.json: not what" in failure(lambda: config_file(NAME)).problem
    hub.wrong.clear()
    _, file = config_file(NAME)
    assert file.read_bytes() == (hub.folders[NAME] / "config.json").read_bytes()


def test_what_the_cache_has_is_not_hashed_again(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    real = models_hub._is_what_it_is_called
    monkeypatch.setattr(models_hub, "_is_what_it_is_called", lambda p: hashed.append(p.name) or real(p))
    folder = model_folder(pinned(NAME))
    assert sorted(hashed) == sorted(p.resolve().name for p in folder.iterdir())
    hashed.clear()
    pinned(NAME)
    assert hashed == []


def test_what_a_killed_download_left_is_hashed_when_it_is_used(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when all had arrived and nothing was hashed; what was there before it is not hashed then."""
    pinned(NAME)
    (weights,) = {p.resolve() for p in weights_in_cache()}
    whole = weights.read_bytes()
    weights.unlink()
    hub.wrong[WEIGHTS] = flipped(whole)
    with monkeypatch.context() as killed:
        killed.setattr(models_hub, "_refuse_wrong", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            pinned(NAME)
    hub.wrong.clear()
    assert f"{WEIGHTS}: not what" in failure(lambda: pinned(NAME)).problem
    pinned(NAME)
    assert weights.read_bytes() == whole
    hashed = []
    monkeypatch.setattr(models_hub, "_is_what_it_is_called", lambda p: hashed.append(p.name) or True)
    pinned(NAME)
    assert hashed == []


# --- tokens -------------------------------------------------------------------------------------------------


def test_a_token_that_the_hub_does_not_know(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens[NAME] = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    for action in (lambda: pinned(NAME), lambda: config_file(NAME)):
        error = failure(action)
        assert "does not accept the token it was shown (401)" in error.problem
        assert "HF_TOKEN" in error.mend
        assert "hf_wrong" not in str(error)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("status", "says", "mend"),
    [(403, "does not accept the token it was shown (403)", "HF_TOKEN"), (500, "HTTP status 500", "later")],
)
def test_a_hub_that_refuses(hub: LocalHub, status: int, says: str, mend: str) -> None:
    """It was reached: nothing is said of the network, nor of HF_HUB_OFFLINE."""
    hub.statuses[NAME] = status
    for action in (lambda: pinned(NAME), lambda: config_file(NAME)):
        error = failure(action)
        assert says in error.problem
        assert mend in error.mend


def test_a_gated_repository_with_a_token(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is good, but its owner did not accept the terms."""
    hub.tokens[NAME] = "hf_right"
    hub.gated.add(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    error = failure(lambda: pinned(NAME))
    assert "gated" in error.problem
    assert f"accept them at {hub.url}/{NAME}" in error.mend
    assert "hf_right" not in str(error)
    assert list(hub.authorizations) == ["Bearer hf_right"]


# --- disks --------------------------------------------------------------------------------------------------


def test_a_full_disk(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own /dev/full stands in for the file that is being written."""
    real = Path.open
    writes = []

    def on_full_disk(path: Path, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if path.name.endswith(".incomplete"):
            writes.append(path.name)
            return real(Path("/dev/full"), mode, *rest, **options)
        return real(path, mode, *rest, **options)

    with monkeypatch.context() as full:
        full.setattr(Path, "open", on_full_disk)
        error = failure(lambda: pinned(NAME))
    assert writes
    assert f"{cache_folder()} takes no more: {os.strerror(errno.ENOSPC)}" in error.problem
    assert "make room" in error.mend
    assert pinned(NAME) == PINNED


@pytest.fixture
def read_only_home(hub: LocalHub, tmp_path: Path) -> Iterator[Path]:
    """A complete HF_HOME in which nothing may be written."""
    home = tmp_path / "home"
    assert in_process(hub, home).communicate(timeout=60)[0] == f"asks\n{PINNED}\n"
    for path in (home, *home.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    yield home
    for path in (home, *home.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


@one_per()
@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_complete_cache_need_not_be_written(hub: LocalHub, read_only_home: Path, offline: str) -> None:
    hub.requests.clear()
    process = in_process(hub, read_only_home, WITHOUT_POWERS + FETCH, env={"HF_HUB_OFFLINE": offline})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"asks\n{PINNED}\n"), err
    assert hub.fetched() == []
    assert bool(hub.requests) == (offline == "0")  # which commit `main` is
    assert "Traceback" not in err


@thorough
def test_a_cache_that_lacks_a_file_and_cannot_be_written(hub: LocalHub, read_only_home: Path) -> None:
    (snapshot,) = read_only_home.glob("hub/*/snapshots/*")
    snapshot.chmod(0o755)
    (snapshot / WEIGHTS).unlink()
    snapshot.chmod(0o555)
    process = in_process(hub, read_only_home, WITHOUT_POWERS + FETCH)
    _, err = process.communicate(timeout=60)
    assert f"the cache {read_only_home / 'hub'} takes no more: Permission denied" in err


# --- other processes, and people who watch ------------------------------------------------------------------


@thorough
def test_two_processes_fetch_once(hub: LocalHub, tmp_path: Path) -> None:
    sending, go_on = threading.Event(), threading.Event()

    def wait(file: str) -> None:
        if file == WEIGHTS:
            sending.set()
            assert go_on.wait(60)

    hub.before_sending = wait
    first = in_process(hub, tmp_path / "home")
    assert sending.wait(60)
    second = in_process(hub, tmp_path / "home")
    assert second.stdout is not None
    assert second.stdout.readline() == "asks\n"
    go_on.set()
    assert [first.communicate(timeout=60)[0], second.communicate(timeout=60)[0]] == [
        f"asks\n{PINNED}\n",
        f"{PINNED}\n",
    ]
    assert hub.fetched().count(WEIGHTS) == 1


@thorough
def test_progress_is_for_terminals(hub: LocalHub, tmp_path: Path) -> None:
    process = in_process(hub, tmp_path / "home")
    assert process.communicate(timeout=60) == (f"asks\n{PINNED}\n", "")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    in_process(hub, tmp_path / "other", stderr=theirs).communicate(timeout=60)
    os.close(theirs)
    assert b"Fetching 7 files" in os.read(ours, 1 << 16)
    os.close(ours)
