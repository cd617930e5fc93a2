"""The file through which a cluster's owner reaches it: the token of a cluster that rayk started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rayk.actors.sessions import remove_own_sessions
from rayk.types.errors import UserError

WHERE = "--ray-token-file"


class TokenFile:
    """A file that only its owner can read. It is written once Ray has started, and ends with the cluster."""

    def __init__(self, path: Path, *, is_own_cluster: bool) -> None:
        """Raise UserError where the file exists already, or the cluster has a token of somebody else's."""
        if not is_own_cluster:
            raise UserError("who started that cluster has its token", where=f"{WHERE}, --address")
        if path.is_symlink() or path.exists():
            raise _exists(path)
        if not path.parent.is_dir():
            raise UserError("no such folder", where=f"{WHERE} {path}")
        self.path = path.absolute()
        self._written: os.stat_result | None = None

    @classmethod
    def asked(cls, path: Path | None, *, is_own_cluster: bool) -> TokenFile | None:
        return None if path is None else cls(path, is_own_cluster=is_own_cluster)

    def write(self, token: str) -> None:
        """Write the file, readable for this user alone. Raises UserError where somebody made it meanwhile, or
        the disk fails."""
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise _exists(self.path) from error
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=f"{WHERE} {self.path}") from error
        with os.fdopen(handle, "w") as file:
            self._written = os.fstat(handle)
            file.write(token)

    def remove(self) -> None:
        """Remove the file, unless it is another one by now. A second call does nothing."""
        try:
            if self._written is not None and os.path.samestat(self._written, self.path.lstat()):
                self.path.unlink()
        except FileNotFoundError:
            pass  # somebody removed it


def removal_of(file: TokenFile | None) -> Callable[[], None]:
    """Make a function for a process that ends at once: it removes this file, if any, and its cluster's
    folder."""

    def remove() -> None:
        if file is not None:
            file.remove()
        remove_own_sessions()

    return remove


def _exists(path: Path) -> UserError:
    return UserError(
        "there is a file already", where=f"{WHERE} {path}", mend="remove it if no server uses it"
    )
