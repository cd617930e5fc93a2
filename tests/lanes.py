"""`make test`: all tests in two lanes, a process each, so that two cores are busy to the end.

One lane begins with the tests of the marker `ray`, which mostly wait for processes to start and end. All else
is cut into parts, a folder or a file of tests/ each, and whichever lane is free takes the next. What a part
prints comes when it is over; the counts of all follow at the end.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

QUICK = "not slow and not gpu"
NO_TESTS = 5
"""pytest's exit status where an expression selects nothing."""
TESTS = Path("tests")
FIRST = ("test_families_end_to_end.py", "test_hybrid_end_to_end.py", "test_groups_end_to_end.py")
"""Parts that take long beside their size: the last one to begin must not be one of them."""
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed|deselected|warnings?)")


@dataclass(frozen=True)
class Part:
    """Some tests, run by one pytest."""

    paths: tuple[str, ...]
    expression: str

    @property
    def name(self) -> str:
        """For people."""
        return " ".join(self.paths) or f"-m '{self.expression}'"


@dataclass
class Outcome:
    """What all parts came to."""

    statuses: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, status: int, printed: str) -> None:
        """One part's, from its summary line."""
        self.statuses.append(status)
        summary = next((line for line in reversed(printed.splitlines()) if _COUNT.search(line)), "")
        for number, what in _COUNT.findall(summary):
            self.counts[what.removesuffix("s") if what.startswith(("error", "warning")) else what] += int(
                number
            )

    @property
    def status(self) -> int:
        """The worst; that of no tests only where no part had any."""
        return max((abs(s) for s in self.statuses if s != NO_TESTS), default=NO_TESTS)


def plain_parts(tests: Path = TESTS) -> list[Part]:
    """Everything but the marker `ray`, what takes longest first: by size, but for those of FIRST."""
    sizes: dict[str, int] = {}
    for path in sorted(tests.iterdir()):
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        files = [f for f in files if f.name.startswith("test_") and f.suffix == ".py"]
        if files:
            sizes[str(path)] = sum(f.stat().st_size for f in files)
    first = [str(tests / name) for name in FIRST if str(tests / name) in sizes]
    rest = sorted((p for p in sizes if p not in first), key=lambda p: -sizes[p])
    return [Part((path,), f"{QUICK} and not ray") for path in first + rest]


def run_lanes(arguments: Sequence[str], parts: Sequence[Part]) -> Outcome:
    """Run the tests of the marker `ray` and all parts in two lanes."""
    left, lock, outcome = deque(parts), threading.Lock(), Outcome()

    def lane(part: Part | None) -> None:
        while part is not None:
            began = time.monotonic()
            status, printed = _run(arguments, part)
            with lock:
                outcome.add(status, printed)
                sys.stdout.write(f"=== {part.name} ({time.monotonic() - began:.0f} s)\n{printed}")
                sys.stdout.flush()
                part = left.popleft() if left else None

    first = left.popleft() if left else None
    lanes = [threading.Thread(target=lane, args=(p,)) for p in (Part((), f"{QUICK} and ray"), first)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    return outcome


def _run(arguments: Sequence[str], part: Part) -> tuple[int, str]:
    """(exit status, what it printed)."""
    command = [sys.executable, "-m", "pytest", *arguments, *part.paths, "-m", part.expression]
    # A file, not a pipe: what tests leave running may keep it open.
    with tempfile.TemporaryFile() as printed:
        status = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, check=False).returncode
        printed.seek(0)
        return status, printed.read().decode(errors="replace")


def main(arguments: Sequence[str]) -> int:
    """The worst exit status of all parts."""
    outcome = run_lanes(arguments, plain_parts())
    counts = ", ".join(f"{n} {what}" for what, n in outcome.counts.items() if what != "deselected")
    print(f"in all: {counts or 'no tests'}")
    return outcome.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
