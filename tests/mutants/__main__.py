"""Plant each bug of the catalog and see that its test fails: `python -m tests.mutants`, `make mutants`.

It ends with 1 if a bug is not found, a target's name is gone, a twin fails by itself, or a named test
fails without any bug.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutants.catalog import MUTANTS
from tests.mutants.mutant import Mutant, find_target
from tests.mutants.plant import BROKE, CALLED, GONE, NOTES, WHICH

ROOT = Path(__file__).resolve().parents[2]
STARTUP = Path(__file__).resolve().parent / "startup"
TEST_TIMEOUT_S = 300
"""A bug may loop for ever: its test then fails by pytest's own timeout."""
PASSED, FAILED = 0, 1
"""pytest's exit statuses; with any other one nothing was tested."""


@dataclass(frozen=True)
class Result:
    """What the tests of one mutant said, and what its twin noted."""

    name: str
    exit_status: int
    notes: str
    seconds: float
    output: str
    is_constant: bool = False

    @property
    def verdict(self) -> str:
        """killed, or what is wrong."""
        if GONE in self.notes:
            return "target gone"
        if BROKE in self.notes:
            return "twin broken"
        if self.exit_status not in (PASSED, FAILED):
            return "tests did not run"
        if CALLED not in self.notes and not self.is_constant:
            return "never called"
        return "killed" if self.exit_status == FAILED else "survived"


def run_tests(tests: Sequence[str], mutant: Mutant | None, folder: Path) -> Result:
    """Run these tests, with a bug or without one."""
    notes = folder / "notes"
    notes.touch()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(STARTUP), str(ROOT)])
    environment |= {NOTES: str(notes)} | ({WHICH: mutant.name} if mutant else {})
    options = ["-x", "-q", "--tb=line", "-m", "", "--timeout", str(TEST_TIMEOUT_S)]
    # pytest's own import hook, which rewrites assertions, would come before ours.
    options += ["--assert", "plain", "-p", "no:cacheprovider", "--basetemp", str(folder / "tmp")]
    began = time.monotonic()
    # A file, not a pipe: what tests leave running may keep it open.
    with tempfile.TemporaryFile() as printed:
        command = [sys.executable, "-m", "pytest", *options, *tests]
        status = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, check=False
        ).returncode
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    name = mutant.name if mutant else "no mutant"
    is_constant = mutant is not None and mutant.twin is None
    return Result(name, status, notes.read_text(), time.monotonic() - began, output, is_constant)


def gone(mutants: Sequence[Mutant]) -> list[str]:
    """What is wrong with the names of targets."""
    found = []
    for mutant in mutants:
        try:
            find_target(mutant)
        except (ImportError, AttributeError) as error:
            found.append(f"{mutant.name}: {error}")
    return found


def run_all(mutants: Sequence[Mutant], num_jobs: int, console: Console) -> list[Result]:
    """All results, that of all tests without any bug first."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})

    def attempt(mutant: Mutant | None) -> Result:
        with tempfile.TemporaryDirectory(prefix="rayk-mutant-") as folder:
            result = run_tests(mutant.tests if mutant else tests, mutant, Path(folder))
        verdict = result.verdict if mutant else ("passed" if result.exit_status == PASSED else "failed")
        console.print(f"{verdict}: {result.name} ({result.seconds:.1f} s)", markup=False)
        return result

    with ThreadPoolExecutor(num_jobs) as pool:
        return list(pool.map(attempt, [None, *mutants]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 only if every bug is found by the test that is named for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    told = "mutants whose name, target or tests contain one of these"
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help=told)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time [default: 2]")
    chosen = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    mutants = [
        m for m in MUTANTS.values() if any(t in " ".join([m.name, m.target, *m.tests]) for t in chosen.only)
    ]
    problems = gone(mutants) or ([] if mutants else ["no mutant has such a name, target or test"])
    if problems:
        console.print("\n".join(problems), markup=False)
        return 1
    began = time.monotonic()
    without, *results = run_all(mutants, chosen.jobs, console)
    table = Table(title=f"{len(results)} mutants", title_justify="left")
    for column in ("mutant", "target", "verdict", "seconds"):
        table.add_column(column, overflow="fold")
    for r in results:
        table.add_row(r.name, MUTANTS[r.name].target, r.verdict, f"{r.seconds:.1f}")
    console.print(table)
    failed = [r for r in results if r.verdict != "killed"]
    for r in failed + ([] if without.exit_status == PASSED else [without]):
        console.print(f"--- {r.name}\n{r.notes}{r.output}", markup=False)
    if without.exit_status != PASSED:
        console.print("the named tests do not pass without a bug")
    killed = len(results) - len(failed)
    console.print(f"{killed} of {len(results)} killed in {time.monotonic() - began:.0f} s")
    return 1 if failed or without.exit_status != PASSED else 0


if __name__ == "__main__":
    sys.exit(main())
