"""A folder that cannot be used at the start: by the machine's fault, or by its user's."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rayk.types.errors import DiskUnavailable, UserError
from tests.offload.disk import open_tier


@pytest.mark.parametrize("what", ["folder", "lock", "secret"])
@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO]
)
def test_what_the_machine_is_to_blame_for_is_told_apart(
    tmp_path: Path, code: int, what: str, monkeypatch: pytest.MonkeyPatch
):
    """And what is not: there it is for the user to mend."""
    real_open, real_mkdir = os.open, os.mkdir

    def fail(code: int, path: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    def open_file(path, flags: int, *mode: int) -> int:
        part = "lock" if str(path).endswith("/lock") else "secret" if ".writing-" in str(path) else ""
        if part == what and flags & os.O_CREAT:
            fail(codes[0], path)
        return real_open(path, flags, *mode)

    def make(path, *mode: int) -> None:
        if what == "folder":
            fail(codes[0], path)
        real_mkdir(path, *mode)

    monkeypatch.setattr("rayk.offload.disk_folder.os.open", open_file)
    monkeypatch.setattr(os, "mkdir", make)
    codes = [code]
    with pytest.raises(DiskUnavailable, match=os.strerror(code)):
        open_tier(tmp_path)
    for other in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR):
        codes[0] = other
        with pytest.raises(UserError, match=os.strerror(other)) as caught:
            open_tier(tmp_path)
        assert not isinstance(caught.value, DiskUnavailable)
    monkeypatch.undo()
    open_tier(tmp_path).close()
