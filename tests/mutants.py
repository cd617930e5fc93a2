"""Plant one bug at a time and see that the test which claims to guard against it fails.

`python -m tests.mutants` (make mutants) copies the tree, applies each mutation of tests/mutations.py to the
copy, runs only the test it names, and prints what happened. It exits with 1 if a mutant survives, a named
test fails without any mutation, or an old text is not found exactly once. The working tree is only read.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutation import Mutation
from tests.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("rayk", "dashboards", "tests", "pyproject.toml")
CHECKPOINTS = "checkpoints"
"""Tiny ones that tests keep between runs: all copies share the working tree's."""
TEST_TIMEOUT_S = 300
"""A mutant may loop for ever: its test then fails by pytest's own timeout. Generous: nothing may fail because
a machine is busy."""
TESTS_FAILED = 1
"""pytest's exit status for failed tests; anything else but 0 means that nothing was tested."""


@dataclass(frozen=True)
class Result:
    """What one mutant's test said."""

    mutation: Mutation
    exit_status: int
    seconds: float
    output: str

    @property
    def verdict(self) -> str:
        """killed, survived, or broken (the test did not run)."""
        return {0: "survived", TESTS_FAILED: "killed"}.get(self.exit_status, "broken")


def count_old_text(root: Path, mutation: Mutation) -> int:
    """How often the text to be replaced stands in its file."""
    return (root / mutation.file).read_text().count(mutation.old)


def copy_tree(destination: Path) -> None:
    """Copy what tests need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, destination / name, ignore=ignore)
        else:
            shutil.copy2(source, destination / name)
    (ROOT / CHECKPOINTS).mkdir(exist_ok=True)
    (destination / CHECKPOINTS).symlink_to(ROOT / CHECKPOINTS)


def run_tests(tree: Path, tests: Sequence[str], name: str, *, has_conftest: bool) -> tuple[int, str]:
    """(exit status, output) of pytest in a tree.

    Without conftest.py, which imports torch, where no test needs it: some start in half a second then.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(tree),
        "TRITON_INTERPRET": "1",
    }
    options = ["-x", "-q", "--tb=line", "--timeout", str(TEST_TIMEOUT_S)]
    options += [] if has_conftest else ["--noconftest"]
    # A base folder of its own: pytest's numbered ones are swept while others use them.
    options += ["-p", "no:cacheprovider", "--basetemp", str(tree.parent / f"tmp-{name}")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def try_mutation(tree: Path, mutation: Mutation) -> Result:
    """Apply, test, take back."""
    path = tree / mutation.file
    original = path.read_text()
    path.write_text(original.replace(mutation.old, mutation.new))
    began = time.perf_counter()
    try:
        status, output = run_tests(tree, [mutation.test], tree.name, has_conftest=mutation.needs_fixtures)
    finally:
        path.write_text(original)
    return Result(mutation, status, time.perf_counter() - began, output)


def try_all(
    mutations: Sequence[Mutation], folder: Path, num_jobs: int, tell: Callable[[Result], None]
) -> list[Result]:
    """Results in the order of the mutations, told as they come; one copy of the tree per job."""
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for i in range(num_jobs):
        tree = folder / f"tree{i}"
        copy_tree(tree)
        trees.put(tree)

    def attempt(mutation: Mutation) -> Result:
        tree = trees.get()
        try:
            result = try_mutation(tree, mutation)
        finally:
            trees.put(tree)
        tell(result)
        return result

    with ThreadPoolExecutor(num_jobs) as pool:
        return list(pool.map(attempt, mutations))


def make_table(results: Sequence[Result]) -> Table:
    """One row per mutant."""
    table = Table(title=f"{len(results)} mutants", title_justify="left")
    for column in ("mutant", "file", "test", "verdict"):
        table.add_column(column, overflow="fold")
    table.add_column("seconds", justify="right")
    for r in results:
        style = "green" if r.verdict == "killed" else "bold red"
        verdict = f"[{style}]{r.verdict}[/{style}]"
        table.add_row(r.mutation.name, r.mutation.file, r.mutation.test, verdict, f"{r.seconds:.1f}")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 only if every mutant is killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="mutants whose name or file contains one of these",
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    chosen = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    mutations = [m for m in MUTATIONS if any(text in m.name or text in m.file for text in chosen.only)]
    stale = [m for m in mutations if count_old_text(ROOT, m) != 1]
    for m in stale:
        console.print(
            f"{m.name}: the old text stands {count_old_text(ROOT, m)} times in {m.file}", markup=False
        )
    if stale or not mutations:
        return 1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rayk-mutants-") as name:
        pristine = Path(name) / "pristine"
        copy_tree(pristine)
        for has_conftest in sorted({m.needs_fixtures for m in mutations}):
            tests = sorted({m.test for m in mutations if m.needs_fixtures == has_conftest})
            status, output = run_tests(pristine, tests, "pristine", has_conftest=has_conftest)
            if status != 0:
                console.print(output, markup=False)
                console.print("the named tests do not pass without mutations")
                return 1
        results = try_all(
            mutations,
            Path(name),
            chosen.jobs,
            lambda r: console.print(f"{r.verdict}: {r.mutation.name} ({r.seconds:.1f} s)", markup=False),
        )
    console.print(make_table(results))
    failed = [r for r in results if r.verdict != "killed"]
    for r in failed:
        console.print(f"--- {r.mutation.name} {r.verdict}\n{r.output}", markup=False)
    killed = len(results) - len(failed)
    console.print(f"{killed} of {len(results)} killed in {time.perf_counter() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
