"""`rayk serve`: what is refused before anything starts, and servers that drain, survive and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from typer.testing import CliRunner

import rayk
from rayk.cli.main import app
from rayk.serve.command import HttpOptions
from tests.conftest import CheckpointFactory
from tests.markers import nixl, ray, thorough

START_S = 240.0
"""Machines may be slow: nothing here measures time."""
NUM_TOKENS = 300
KEY = {"Authorization": "Bearer k"}


@pytest.fixture
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3")


# --- refused ------------------------------------------------------------------------------------------------


def refused(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> str:
    """The one message of a refused command: exit 2, nothing on stdout, and nothing was started."""

    def started(*_: Any, **__: Any) -> int:
        raise AssertionError("it started")

    monkeypatch.setattr("rayk.serve.command.serve_until_stopped", started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prefill-tp 3", "prefill: TP 3 does not divide the model's 8 query heads"),
        ("--decode-tp 5", "decode: TP 5 does not divide the model's 8 query heads"),
        ("--decode-tp 0", "--decode-tp 0: a TP size is a whole number above 0"),
        ("--prefill-tp 1,", "--prefill-tp 1,: a TP size is a whole number above 0"),
        ("--prefill-tp 1,two", "--prefill-tp 1,two: a TP size is a whole number above 0"),
        ("--prefill-tp 1,2,3", "prefill: TP 3 does not divide the model's 8 query heads"),
        ("--decode-tp 2,1,5 --prefill-tp 2", "decode: TP 5 does not divide the model's 8 query heads"),
        ("--prefill-tp 1,2 --num-prefill 3", "--prefill-tp 1,2: 2 TP sizes for 3 engines"),
        ("--decode-tp 1,2 --set decode.tp=4", "--set decode.tp=4: --decode-tp 1,2 says that"),
        ("--mode aggregated --decode-tp 1,2", "--decode-tp: an aggregated server has no decode engines"),
        ("--mode both", "mode must be one of 'aggregated' or 'disaggregated', got 'both'"),
        ("--mode aggregated --num-decode 2", "--num-decode 2: an aggregated server has no decode engines"),
        ("--set decode.layout=BHLNC", "an aggregated server has no decode engines"),
        ("--dtype int8", "dtype must be one of 'float32', 'bfloat16'"),
        ("--device cuda", "device: cuda, but no GPU was found"),
        ("--policy best", "policy must be one of 'round_robin'"),
        ("--failure-policy hope", "failure_policy must be one of 'fail', 'recompute' or 'migrate'"),
        (
            "--set engine.num_block=4",
            "a server has no key 'engine.num_block'\n  mend: did you mean 'engine.num_",
        ),
        ("--set engine.max_seqs", "not of the form KEY=VALUE"),
        ("--set engine.max_seqs=[4,8]", "engine.max_seqs has a list of values"),
        ("--set engine.max_seqs=none", "engine.max_seqs must be a valid integer"),
        ("--set faults=[]", "a server has no key 'faults'"),
        ("--set prefill.layout=LHBNC --set decode.layout=NHD --prefill-tp 1", "decode.layout must be one of"),
        ("--host 192.0.2.1", "this machine has no address 192.0.2.1"),
        ("--port 70000", "Invalid value for '--port'"),
        ("--address 127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("--http flask", "Invalid value for '--http'"),
        ("--spares -1", "Invalid value for '--spares'"),
    ],
)
def test_bad_options_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: str, message: str
) -> None:
    monkeypatch.setattr("rayk.specs.devices.count_local_gpus", lambda: 0)
    assert message in refused(monkeypatch, model, *options.split())


@pytest.mark.parametrize("key", ["", "  ", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    assert "--api-key" in refused(monkeypatch, model, "--api-key", key)


@pytest.mark.parametrize(
    ("variable", "options", "key"),
    [("secret", (), "secret"), ("secret", ("--api-key", "other"), "other"), ("", (), None)],
)
def test_the_key_may_be_in_the_environment(
    model: Path, monkeypatch: pytest.MonkeyPatch, variable: str, options: tuple[str, ...], key: str | None
) -> None:
    found: list[str | None] = []

    def start(_plan: Any, front: HttpOptions, **_: Any) -> int:
        found.append(front.settings.api_key)
        return 0

    monkeypatch.setattr("rayk.serve.command.serve_until_stopped", start)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAYK_API_KEY", variable)
    result = CliRunner().invoke(app, ["serve", str(model), "--port", "0", *options])
    assert result.exit_code == 0, result.output
    assert found == [key]
    assert "secret" not in CliRunner().invoke(app, ["serve", "--help"]).output


def test_bad_checkpoints_are_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none: no such checkpoint folder" in refused(monkeypatch, tmp_path / "none")
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    assert "no .safetensors weights" in refused(monkeypatch, tmp_path)
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-100])
    assert "not a readable safetensors file" in refused(monkeypatch, tmp_path)


def test_a_port_in_use_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port: port {port} of 127.0.0.1: Address already in use" in refused(
            monkeypatch, model, "--port", str(port)
        )


# --- on Ray -------------------------------------------------------------------------------------------------


class Server:
    """A running `rayk serve`."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "rayk.cli.main", "serve", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment()
        )
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors)
        self._reader.start()
        self._opened = ExitStack()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += iter(self.process.stderr.readline, "")

    def wait_until_ready(self) -> None:
        """Read the ready line."""
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        watchdog.cancel()
        assert line.startswith("rayk: ready http://"), (line, self.errors)
        self.url, _, name = line.removeprefix("rayk: ready ").rstrip("\n").partition(" ")
        self.model_id = name.removeprefix("model=")

    def client(self, key: str = "k") -> openai.OpenAI:
        """The real one; it tries nothing again."""
        found = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=START_S)
        return self._opened.enter_context(found)

    def close(self) -> None:
        """It is gone, whatever became of it."""
        self._opened.close()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def stream(self, prompt: list[int]) -> Iterator[Any]:
        """A completion's chunks."""
        return iter(
            self.client().completions.create(
                model=self.model_id,
                prompt=prompt,
                max_tokens=NUM_TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
        )

    def engines(self) -> dict[str, dict[str, Any]]:
        """What it tells of each."""
        found = requests.get(f"{self.url}/engines", headers=KEY, timeout=START_S)
        assert found.status_code == 200, found.text
        return {engine["name"]: engine for engine in found.json()["data"]}

    def turn(self, engine: str, role: str) -> int:
        """Change an engine's role; the status."""
        url = f"{self.url}/engines/{engine}/role"
        return requests.post(url, json={"role": role}, headers=KEY, timeout=START_S).status_code

    def ends(self) -> int:
        """Its exit status; nothing but the ready line went to stdout."""
        code = self.process.wait(START_S)
        assert self.process.stdout is not None
        assert self.process.stdout.read() == ""
        return code


@contextmanager
def serving(*arguments: str | Path) -> Iterator[Server]:
    """A server that is gone afterwards, whatever the test does."""
    server = Server(*arguments, "--port", "0", "--device", "cpu")
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def tokens_of(chunks: Iterator[Any]) -> list[int]:
    return [token for chunk in chunks for token in chunk.choices[0].token_ids]


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until something is true."""
    deadline = time.monotonic() + START_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {START_S} s"
        time.sleep(0.1)
    return found


def descendants(pid: int) -> dict[int, str]:
    """Process id -> command line, of what a process started and what that started."""
    children: dict[int, list[int]] = {}
    lines: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            lines[int(folder.name)] = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:  # it has just ended
            continue
        if status[0] != "Z":
            children.setdefault(int(status[1]), []).append(int(folder.name))
    found, waiting = {}, list(children.get(pid, ()))
    while waiting:
        child = waiting.pop()
        found[child] = lines[child]
        waiting += children.get(child, ())
    return found


@pytest.fixture(scope="module")
def truth(checkpoint: Any, reference: Any) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what transformers says to them; no step is near a tie."""
    from rayk.oracle.checkpoint import read_marker

    model = checkpoint("qwen3")
    prompts = [probe["prompt"] for probe in read_marker(model)["probes"]]
    outputs = reference(model).generate(prompts, NUM_TOKENS, ignore_eos=True)
    assert min(min(o.margins) for o in outputs) > 1e-3
    return [(p, list(o.token_ids)) for p, o in zip(prompts, outputs, strict=True)]


@ray
@nixl
@pytest.mark.timeout(900)
def test_a_server_on_ray_serve_answers_drains_and_leaves_nothing(
    model: Path, truth: list[tuple[list[int], list[int]]]
) -> None:
    with serving(model, "--prefill-tp", "1", "--decode-tp", "2,1", "--api-key", "k") as server:
        assert server.model_id == model.name
        assert [m.id for m in server.client().models.list()] == [model.name]
        with pytest.raises(openai.AuthenticationError):
            server.client("other").models.list()
        see_roles_change_under_load(server, truth)
        see_all_engines_stop_for_a_client_that_goes(server)

        started = descendants(server.process.pid)
        assert any("ServeReplica" in line for line in started.values())
        stream = server.stream(truth[0][0])
        delivered = list(next(stream).choices[0].token_ids)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server), "a refusal")
        assert delivered + tokens_of(stream) == truth[0][1], "what ran when the signal came ends as it should"
        assert server.ends() == 0
        until(lambda: not started.keys() & alive(started), "the end of every process")


@ray
@nixl
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_that_drafts_gives_the_same_tokens_and_a_load_tells_of_drafts(
    model: Path, truth: list[tuple[list[int], list[int]]], tmp_path: Path
) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}'
    sizes = ("--prefill-tp", "2", "--decode-tp", "1", "--speculative-config", drafts)
    load = ("--concurrency", "3", "--num-requests", "30", "--input-tokens", "37", "--output-tokens", "24")
    out = tmp_path / "out"
    with serving(model, *sizes, "--api-key", "k") as server:
        for prompt, expected in truth:
            assert tokens_of(server.stream(prompt)) == expected
        where = ("--url", server.url, "--api-key", "k", "--out", str(out))
        result = CliRunner().invoke(app, ["bench", *where, *load])
    found = rayk.load(out)
    (cell,) = found.cells.to_dict("records")
    assert result.exit_code == int(cell["verdict"] == "INVALID")
    assert (found.requests["outcome"] == "ok").all()
    assert 0 <= cell["num_accepted"] <= cell["num_drafted"] > 0
    assert cell["acceptance_rate"] == pytest.approx(cell["num_accepted"] / cell["num_drafted"])


def see_roles_change_under_load(server: Server, truth: list[tuple[list[int], list[int]]]) -> None:
    """Engines of unlike TP, each of which prefills for a while and decodes for a while."""
    before = {e["name"]: (e["role"], e["tp"], e["state"]) for e in server.engines().values()}
    assert before == {
        "prefill0": ("prefill", 1, "ready"),
        "decode0": ("decode", 2, "ready"),
        "decode1": ("decode", 1, "ready"),
    }
    is_over = threading.Event()

    def ask(prompt: list[int]) -> list[list[int]]:
        found = [tokens_of(server.stream(prompt))]
        while not is_over.is_set():
            found.append(tokens_of(server.stream(prompt)))
        return [*found, tokens_of(server.stream(prompt))]

    with ThreadPoolExecutor(len(truth)) as pool:
        asked = [pool.submit(ask, prompt) for prompt, _ in truth]
        try:
            until(lambda: server.engines()["decode0"]["num_requests"], "a request on the engine that turns")
            assert server.turn("prefill0", "decode") == 409, "nobody would prefill"
            for engine, role in (("decode0", "prefill"), ("prefill0", "decode"), ("decode1", "prefill")):
                assert server.turn(engine, role) == 200
                until(lambda e=engine: server.engines()[e]["num_requests"], f"a request for the new {role}")
            roles = {name: e["role"] for name, e in server.engines().items()}
            assert roles == {"prefill0": "decode", "decode0": "prefill", "decode1": "prefill"}
            for engine in ("decode1", "prefill0", "decode0"):
                assert server.turn(engine, engine.rstrip("01")) == 200
        finally:
            is_over.set()
        for answers, (_, expected) in zip(asked, truth, strict=True):
            assert all(answer == expected for answer in answers.result()), "a token is wrong, or is missing"


def see_all_engines_stop_for_a_client_that_goes(server: Server) -> None:
    """Through Serve's proxy: a stream of many choices of which the client reads one chunk."""
    before = server.engines()
    num_choices, num_prompt_tokens, num_tokens = 64, 1400, 600
    body = {
        "prompt": [5] * num_prompt_tokens,
        "n": num_choices,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    with requests.post(
        f"{server.url}/v1/completions", json=body, headers=KEY, stream=True, timeout=START_S
    ) as answer:
        lines = answer.iter_lines()  # kept: the connection ends with it
        assert next(lines).startswith(b"data: ")

        def all_have_begun() -> bool:
            return all(e["num_steps"] > before[name]["num_steps"] for name, e in server.engines().items())

        until(all_have_begun, "work for each engine")

    def stopped() -> dict[str, dict[str, Any]] | None:
        engines = server.engines()
        busy = [e for e in engines.values() if e["num_requests"] or e["num_running"] or e["num_waiting"]]
        leaking = [e for e in engines.values() if e["num_free_blocks"] != e["num_blocks"] - 1]
        return None if busy or leaking else engines

    try:
        after = until(stopped, "an end of what nobody waits for")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{server.engines()}\n{''.join(server.errors)}") from error
    steps = {name: engine["num_steps"] - before[name]["num_steps"] for name, engine in after.items()}
    # Whole prompts, 512 tokens a step; and all their answers, on two engines of 16 rows each.
    assert steps["prefill0"] < num_choices * num_prompt_tokens / 512
    assert max(steps["decode0"], steps["decode1"]) < num_choices * num_tokens / 32


def refuses(server: Server) -> bool:
    """Whether new requests are turned away: by the server, or because it is gone."""
    try:
        server.client().completions.create(model=server.model_id, prompt=[1, 2, 3], max_tokens=1)
    except (openai.RateLimitError, openai.InternalServerError, openai.APIConnectionError):
        return True
    return False


def alive(pids: dict[int, str]) -> set[int]:
    """Those that are the same processes still."""
    found = set()
    for pid, line in pids.items():
        try:
            now = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if now and now.split()[:1] == line.split()[:1]:
            found.add(pid)
    return found


def process_of(title: str) -> int:
    """The one child, or child's child, of this process with such a title."""
    found = [pid for pid, line in descendants(os.getpid()).items() if title in line]
    assert len(found) == 1, (title, found)
    return found[0]


@thorough
@ray
@nixl
@pytest.mark.timeout(900)
def test_what_dies_is_started_again_and_streams_go_on(
    model: Path, truth: list[tuple[list[int], list[int]]], ray_address: str
) -> None:
    where = ("--http", "uvicorn", "--address", ray_address)
    with serving(model, *where, "--prefill-tp", "1", "--decode-tp", "1") as server:
        told = "".join(server.errors)
        assert f"rayk: joining the Ray cluster at {ray_address}\n" in told
        assert "rayk: forming 2 engines: prefill0 (TP 1), decode0 (TP 1)\n" in told
        prompt, expected = truth[0]
        stream = server.stream(prompt)
        delivered = [t for _ in range(3) for t in next(stream).choices[0].token_ids]
        os.kill(process_of("ray::Fleet"), signal.SIGKILL)
        assert delivered + tokens_of(stream) == expected, "nothing is repeated, nothing is missing"
        lost = "the fleet of engines is lost"
        until(lambda: any(lost in line for line in server.errors), "what the server says of it")

        stream = server.stream(prompt)
        next(stream)
        os.kill(process_of("ray::UvicornFront"), signal.SIGKILL)
        with pytest.raises(
            (openai.APIError, OSError, Exception), match=r"(?i)peer|connection|reset|closed|end"
        ):
            list(stream)
        until(lambda: answers(server, prompt, expected), "an answer of the next front")

        server.stream(prompt)
        for _ in range(2):  # the first waits for the stream, which nobody reads
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert server.process.wait(START_S) in (0, 130)


@ray
@nixl
@pytest.mark.slow  # a hang is known by its length
@pytest.mark.timeout(600)
def test_a_front_that_hangs_is_started_again(
    model: Path, truth: list[tuple[list[int], list[int]]], ray_address: str
) -> None:
    where = ("--http", "uvicorn", "--address", ray_address, "--mode", "aggregated")
    with serving(model, *where) as server:
        assert answers(server, *truth[0])
        os.kill(process_of("ray::UvicornFront"), signal.SIGSTOP)
        until(lambda: any("the HTTP front is lost (it hangs" in line for line in server.errors), "its end")
        until(lambda: answers(server, *truth[0]), "an answer of the next front")
        server.process.send_signal(signal.SIGINT)
        assert server.ends() == 0


@thorough
@ray
@nixl
@pytest.mark.timeout(600)
def test_what_is_left_when_the_time_to_end_is_over_is_told_so(model: Path, ray_address: str) -> None:
    where = ("--http", "uvicorn", "--address", ray_address, "--mode", "aggregated")
    with serving(model, *where, "--drain-timeout", "0.01") as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": [5] * 100, "n": 8, "max_tokens": 1800, "ignore_eos": True}
        url = f"{server.url}/v1/completions"
        whole = pool.submit(requests.post, url, json=body, timeout=START_S)
        with requests.post(url, json={**body, "stream": True}, stream=True, timeout=START_S) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith(b"data: ")
            until(lambda: sum(e["num_requests"] for e in server.engines().values()) > 8, "both requests")
            server.process.send_signal(signal.SIGTERM)
            told = [line for line in lines if line]
        assert b"the server has ended" in told[-1]
        assert not any(b"[DONE]" in line for line in told)
        assert whole.result().status_code == 503
        assert whole.result().json()["error"]["code"] == "server_ended"
        assert server.ends() == 0


def answers(server: Server, prompt: list[int], expected: list[int]) -> bool:
    """Whether it answers, which then must be right."""
    try:
        found = tokens_of(server.stream(prompt))
    except openai.APIConnectionError:
        return False
    assert found == expected
    return True
