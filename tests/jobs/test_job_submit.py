"""The commands of "As a Ray job": a cluster that asks for a token, and the experiment as its job."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayk import load
from tests.markers import nixl, ray, slow
from tests.pages import blocks, section

ROOT = Path(__file__).resolve().parents[2]
STRANGERS = """
for mode in disabled token; do
    echo "a stranger"
    RAY_AUTH_MODE=$mode RAY_AUTH_TOKEN=$(printf 'f%.0s' {1..64}) \\
        ray job submit --address http://127.0.0.1:8265 -- touch "$PWD/runs/job/stranger"
    echo "status $?"
done
"""
WRONG = """
echo "a job that fails"
ray job submit --address http://127.0.0.1:8265 --submission-id wrong -- bash -c "exit 2"
echo "status $?"
"""


def commands() -> str:
    """The block of "As a Ray job"."""
    (block,) = blocks(section("docs/ray-and-monitoring.md", "## As a Ray job"), "bash")
    return block


@pytest.fixture
def home() -> Iterator[Path]:
    """A new user's; its path is short, as sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="rayk-home-", dir="/tmp") as name:
        yield Path(name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@ray
@nixl
@slow
@pytest.mark.timeout(900)
def test_the_pages_job_runs_and_strangers_are_refused(home: Path, tmp_path: Path) -> None:
    start, _, end = commands().partition("kill %1")
    port = free_port()
    # Other ports than those that a cluster of the machine's user has, and results beside the test's.
    script = f'{start}\necho "status $?"\n{STRANGERS}{WRONG}\nkill %1{end}wait\n'
    for written, here in (
        (" --head ", f" --head --port=0 --dashboard-port={port} --dashboard-agent-listen-port=0 "),
        ("127.0.0.1:8265", f"127.0.0.1:{port}"),
        ("$PWD/runs/job", str(tmp_path / "job")),
    ):
        assert written in script
        script = script.replace(written, here)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY")} | {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["timeout", "800", "bash", "-c", script],  # ends the cluster, too
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    job, *strangers, wrong = re.split("a stranger\n|a job that fails\n", done.stdout)
    assert job.endswith("status 0\n")
    assert len(re.findall(r"^ ?\d+/20 PASS ", job, re.MULTILINE)) == 20
    assert "20 of 20 PASS" in job
    assert set(load(tmp_path / "job").cells["verdict"]) == {"PASS"}
    for refused in strangers:
        assert "ray.exceptions.AuthenticationError" in refused
        assert refused.endswith("status 1\n")
    assert not (tmp_path / "job" / "stranger").exists()
    assert "exit code 2" in wrong
    assert "status 1\n" in wrong
    assert {path.stat().st_mode & 0o077 for path in (home / ".ray", home / ".ray" / "auth_token")} == {0}
    assert (home / ".ray" / "tmp").is_dir(), "the cluster's folder is closed to others, too"
