"""`--ray-token-file`: the owner's way into a cluster that rayk started, and nobody else's."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayk.actors.token_file import TokenFile
from rayk.cli.checkup import _cluster
from rayk.cli.main import app
from rayk.types.errors import UserError
from tests.conftest import CheckpointFactory
from tests.markers import ray, thorough

TWICE = """
import os, signal, sys
from pathlib import Path
from rayk.actors.sessions import session_folder
from rayk.actors.token_file import TokenFile, removal_of
from rayk.types.signals import StopSignals, interrupts
file = TokenFile(Path(sys.argv[2]), is_own_cluster=True)
file.write("secret")
def kill():
    os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1] == "serve":
    with StopSignals(lambda: None, at_once=removal_of(file)).handled(), session_folder():
        kill()
        kill()
with interrupts(lambda: None, at_once=removal_of(file)), session_folder():
    try:
        kill()
    finally:
        kill()
"""
OWNER = """
import os, sys, time
from pathlib import Path
from rayk.actors.launch import connect
from rayk.actors.token_file import TokenFile
from rayk.types.signals import StopSignals
stop = StopSignals(lambda: None)
with stop.handled(), connect(None, token_file=TokenFile(Path(sys.argv[1]), is_own_cluster=True)) as joined:
    print(joined.address, joined.pages, flush=True)
    while not stop.received:
        time.sleep(0.1)
"""


def test_a_file_is_closed_to_others_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    before = os.umask(0)
    try:
        file = TokenFile(path, is_own_cluster=True)
        assert not path.exists(), "before Ray has started nobody has use for it"
        file.write("secret")
    finally:
        os.umask(before)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("secret", 0o600)
    file.remove()
    file.remove()
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_what_is_there_stays(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "token", tmp_path / "other"
    late = TokenFile(path, is_own_cluster=True)
    if kind != "dangling":
        other.write_text("somebody's")
    if kind == "file":
        other.rename(path)
    else:
        path.symlink_to(other)
    with pytest.raises(UserError, match="there is a file already"):
        TokenFile(path, is_own_cluster=True)
    with pytest.raises(UserError, match="there is a file already"):
        late.write("secret")
    late.remove()
    assert path.is_symlink() if kind == "dangling" else path.read_text() == "somebody's"


def test_somebody_else_s_file_in_its_place_stays(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "token", is_own_cluster=True)
    file.write("secret")
    (tmp_path / "new").write_text("somebody's")
    (tmp_path / "new").rename(file.path)
    file.remove()
    assert file.path.read_text() == "somebody's"


@pytest.mark.parametrize("command", ["serve", "run"])
def test_commands_refuse_before_anything_starts(
    command: str, tmp_path: Path, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    model, spec = checkpoint("qwen3"), tmp_path / "spec.yaml"
    spec.write_text(f"model: {model}\nprompts: {{random: {{count: 1, input_tokens: [5]}}}}\n")
    (tmp_path / "there").write_text("somebody's")
    asked = [command, str(model if command == "serve" else spec)]
    for path, more, message in (
        ("there", [], "there is a file already"),
        ("none/token", [], "no such folder"),
        ("token", ["--address", "127.0.0.1:1"], "who started that cluster has its token"),
    ):
        result = CliRunner().invoke(app, [*asked, "--ray-token-file", str(tmp_path / path), *more])
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert (tmp_path / "there").read_text() == "somebody's"


@pytest.mark.parametrize("command", ["serve", "run"])
def test_a_second_signal_removes_it_and_the_clusters_folder_too(command: str, tmp_path: Path) -> None:
    owner = [sys.executable, "-c", TWICE, command, tmp_path / "token"]
    done = subprocess.run(owner, check=False, timeout=100, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_a_signal_while_ray_starts_leaves_none(
    tmp_path: Path, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayk.actors import launch
    from rayk.serve.command import HttpOptions, serve_until_stopped
    from rayk.specs.server_plan import ServerOptions, plan_server

    def init(**_: object) -> dict[str, str]:
        assert not list(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        return {"gcs_address": "127.0.0.1:1", "webui_url": ""}

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launch.ray, "init", init)
    file = TokenFile(tmp_path / "token", is_own_cluster=True)
    plan = plan_server(ServerOptions(model=str(checkpoint("qwen3"))))
    ended = serve_until_stopped(plan, HttpOptions(), address=None, ready=io.StringIO(), token_file=file)
    assert ended == 0
    assert not list(tmp_path.iterdir())


@thorough
@ray
@pytest.mark.timeout(600)
def test_its_owner_gets_in(tmp_path: Path) -> None:
    path = tmp_path / "token"
    process = subprocess.Popen([sys.executable, "-c", OWNER, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    bare = {k: v for k, v in os.environ.items() if not k.startswith("RAY")}

    def run(*command: str, **environment: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=bare | environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    try:
        address, pages = process.stdout.readline().split()
        assert address in _cluster("auto").found, "the doctor sees it"
        top = ("rayk.cli.main", "top", "--once", "--address", address)
        assert "asks for a token; none is set" in run(*top, HOME=str(tmp_path))[1]
        assert "asks for a token; this is another" in run(*top, RAY_AUTH_TOKEN="x" * 64)[1]
        assert "no rayk server in this cluster" in run(*top, RAY_AUTH_TOKEN_PATH=str(path))[1]
        listed = ("ray.scripts.scripts", "list", "actors", "--timeout", "120", "--address", f"http://{pages}")
        assert run(*listed)[0]
        code, said = run(*listed, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
        assert code == 0, said
    finally:
        process.terminate()
        process.communicate(timeout=100)
    assert process.returncode == 0
    assert not path.exists()
