"""How a job ends that holds what it measured against limits."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def ending(missed: Sequence[str], *, check: bool) -> int:
    """The exit status: 1 where a limit is missed, if the job is to `check` them.

    missed: a line for each, with the row, what was measured and the limit; told on stderr either way.
    """
    for line in missed:
        print(line, file=sys.stderr)
    return int(check and bool(missed))
