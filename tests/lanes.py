"""`make test`: all tests in two lanes, a process each, so that two cores are busy to the end.

One lane begins with the tests of the marker `ray`, which mostly wait for processes to start and end. All else
is cut into parts, a folder or a file of tests/ each, and whichever lane is free takes the next. What a part
prints comes when it is over; the counts of all follow at the end.

Tests of real processes have deadlines in seconds, and here something else always takes their core. So the
tests that failed run once more when both lanes are done, alone. One that fails again has failed; one that
passes then is named and counted at the end, for it may be a rare fault that was met only once.
"""

from __future__ import annotations

import json
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
FAILED, NO_TESTS = 1, 5
"""pytest's exit statuses where tests failed, and where an expression selects nothing."""
MOST_AGAIN = 20
"""Where more tests failed than these, it is not for want of time."""
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
    failed: list[str] = field(default_factory=list)
    """Node ids of tests that failed."""

    def add(self, status: int, printed: str, failed: Sequence[str] = ()) -> None:
        """One part's, with the counts of its summary line."""
        self.statuses.append(status)
        self.failed += failed
        summary = next((line for line in reversed(printed.splitlines()) if _COUNT.search(line)), "")
        for number, what in _COUNT.findall(summary):
            self.counts[what.removesuffix("s") if what.startswith(("error", "warning")) else what] += int(
                number
            )

    def passed_alone(self) -> None:
        """All that had failed passed when they ran again."""
        self.statuses = [0 if s == FAILED else s for s in self.statuses]
        self.counts["failed once and passed alone"] = len(self.failed)
        self.counts["failed"] = self.counts["error"] = 0

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
            status, printed, failed = _run(arguments, part)
            with lock:
                outcome.add(status, printed, failed)
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


def run_again(arguments: Sequence[str], outcome: Outcome) -> None:
    """Run the tests that failed once more, with nothing beside them: tests that failed, and nothing worse."""
    if outcome.status != FAILED or not 0 < len(outcome.failed) <= MOST_AGAIN:
        return
    status, printed, _ = _run(arguments, Part(tuple(outcome.failed), QUICK))
    sys.stdout.write(f"=== again, alone: {', '.join(outcome.failed)}\n{printed}")
    again = Outcome()
    again.add(status, printed)
    if status == 0 and again.counts["passed"] == len(outcome.failed):
        outcome.passed_alone()


def _run(arguments: Sequence[str], part: Part) -> tuple[int, str, list[str]]:
    """(exit status, what it printed, node ids of tests that failed)."""
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile() as printed:
        options = ["-o", f"cache_dir={cache}", "-m", part.expression]
        command = [sys.executable, "-m", "pytest", *arguments, *part.paths, *options]
        # A file, not a pipe: what tests leave running may keep it open.
        status = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT, check=False).returncode
        printed.seek(0)
        told = Path(cache) / "v/cache/lastfailed"
        failed = list(json.loads(told.read_text())) if told.exists() else []
        return status, printed.read().decode(errors="replace"), failed


def main(arguments: Sequence[str]) -> int:
    """The worst exit status of all parts."""
    outcome = run_lanes(arguments, plain_parts())
    run_again(arguments, outcome)
    counts = ", ".join(f"{n} {what}" for what, n in outcome.counts.items() if n and what != "deselected")
    print(f"in all: {counts or 'no tests'}")
    if outcome.status == 0 and outcome.failed:
        print("failed once, and passed when run again alone: " + ", ".join(outcome.failed))
    return outcome.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
