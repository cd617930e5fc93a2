"""Whose commit a run names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rayk.reports.environment import git_commit


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def make_tree(folder: Path) -> Path:
    """A work tree that tracks a package."""
    package = folder / "rayk"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(folder, "init", "-q")
    git(folder, "add", "rayk/__init__.py")
    git(folder, "commit", "-q", "-m", "first")
    return package


def test_the_commit_is_the_packages_and_not_that_of_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, other = make_tree(tmp_path / "ours"), make_tree(tmp_path / "users")
    (other / "__init__.py").write_text("x = 1\n")
    git(other, "commit", "-aqm", "second")
    monkeypatch.chdir(other)
    assert git_commit(package) == git(package, "rev-parse", "HEAD") != git(other, "rev-parse", "HEAD")
    (package / "__init__.py").write_text("x = 1\n")
    assert git_commit(package) == f"{git(package, 'rev-parse', 'HEAD')}+changes"
    # Installed into an environment that lies in somebody's work tree: git does not track it.
    installed = other.parent / ".venv" / "rayk"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert git_commit(installed) is None
    assert git_commit(tmp_path / "nowhere") is None
