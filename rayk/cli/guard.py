"""Share between commands the consoles, and errors as messages and exit codes."""

from __future__ import annotations

import errno
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from rayk.types.errors import LayoutVetoed, Unsupported, UserError
from rayk.types.signals import exit_code_of

P = ParamSpec("P")
R = TypeVar("R")

BAD_INPUT = 2
INTERRUPTED = 130
AddressOption = Annotated[
    str | None, typer.Option(help="Ray cluster to use [default: RAY_ADDRESS, else a local one of its own].")
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        help="Keep the token of the local Ray cluster in this new file while it runs: "
        "RAY_AUTH_TOKEN_PATH=FILE opens it for rayk top, dashboards and, with RAY_AUTH_MODE=token, for "
        "Ray's own commands."
    ),
]
# errors of a disk that is full, read-only, another's or failing, of a path that somebody named
OF_A_DISK = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.ENAMETOOLONG,
    }
)
# may also be of a process or a socket, and then name no path
OF_MORE = frozenset({errno.EACCES, errno.EPERM})
WIDE = 160  # columns of a table that does not go to a terminal


def stderr() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False)


def stdout() -> Console:
    """Make the console of results: as wide as the terminal, or wide enough for the tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(WIDE, shutil.get_terminal_size().columns)
    return console


def complain(error: Exception) -> None:
    """Print one message on stderr, without markup or traceback."""
    stderr().print(Text.assemble(("rayk: ", "bold red"), str(error)))


def run_guarded(action: Callable[[], int]) -> int:
    """Run an action, and turn user errors and interrupts into messages and exit codes."""
    try:
        return action()
    except (UserError, LayoutVetoed, Unsupported) as error:
        complain(error)
        return BAD_INPUT
    except OSError as error:
        if error.errno not in OF_A_DISK or (error.errno in OF_MORE and error.filename is None):
            raise
        complain(UserError(f"the disk refuses: {error.strerror}", where=str(error.filename or "")))
        return BAD_INPUT
    except KeyboardInterrupt as interrupt:
        code = exit_code_of(interrupt)
        stderr().print(f"rayk: {'interrupted' if code == INTERRUPTED else 'terminated'}")
        return code


def guarded(command: Callable[P, R]) -> Callable[P, R]:

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        results: list[R] = []

        def act() -> int:
            results.append(command(*args, **kwargs))
            return 0

        code = run_guarded(act)
        if code:
            raise typer.Exit(code)
        return results[0]

    return run
