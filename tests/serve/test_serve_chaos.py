"""Forty streams while each part of a server is killed or stopped: no wrong token, no stream without an end,
and in the end nothing is left. `pytest -s` prints how long each part was away."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from rayk.actors.sessions import PREFIX
from tests.markers import nixl, ray
from tests.serve.test_serve_command import (
    KEY,
    NUM_TOKENS,
    START_S,
    Server,
    alive,
    descendants,
    serving,
    until,
)

pytestmark = [ray, nixl, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STREAMS, NUM_BEGUN = 40, 16
"""All of them, and those that have tokens when something is struck; some wait for a place."""
Truth = list[tuple[list[int], list[int]]]

ENGINES = {"prefill rank": "prefill0", "decode rank": "decode0"}
TITLES = {
    "fleet": ("ray::Fleet",),
    "front": ("ray::UvicornFront", "ray::ServeReplica"),
    "proxy": ("ray::ProxyActor",),
}
RANKS = """
import json, os, ray
from rayk.actors.fleets import find_fleet, fleet_names
from rayk.actors.launch import connect
with connect(os.environ["RAY_ADDRESS"]):
    print(json.dumps(ray.get(find_fleet(fleet_names()[0]).pids.remote(), timeout=60)))
"""
"""As whoever has the cluster's token may ask."""


@pytest.fixture(scope="module")
def model(checkpoint: Any) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def truth(model: Path, reference: Any) -> Truth:
    """Prompts, and what transformers says to them; no step is near a tie."""
    from rayk.oracle.checkpoint import read_marker

    prompts = [probe["prompt"] for probe in read_marker(model)["probes"]]
    outputs = reference(model).generate(prompts, NUM_TOKENS, ignore_eos=True)
    assert min(min(o.margins) for o in outputs) > 1e-3
    return [(p, list(o.token_ids)) for p, o in zip(prompts, outputs, strict=True)]


class Streams:
    """Forty streams that are under way."""

    def __init__(self, server: Server, truth: Truth) -> None:
        self._server = server
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._have_begun = threading.Semaphore(0)
        asked = [truth[i % len(truth)] for i in range(NUM_STREAMS)]
        self._futures: list[Future[str]] = [self._pool.submit(self._follow, *one) for one in asked]
        for _ in range(NUM_BEGUN):
            assert self._have_begun.acquire(timeout=START_S)

    def _follow(self, prompt: list[int], expected: list[int]) -> str:
        """How it ended: whole, cut (no connection any more) or with which error. A wrong token is none."""
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "return_token_ids": True}
        got: list[int] = []
        how, is_done, has_begun = "cut", False, False
        try:
            where = f"{self._server.url}/v1/completions"
            with requests.post(where, json=body, headers=KEY, stream=True, timeout=START_S) as answer:
                if answer.status_code != 200:
                    return f"HTTP {answer.status_code}"
                for line in answer.iter_lines():
                    event = line.removeprefix(b"data: ")
                    if event == b"[DONE]":
                        is_done = True
                    elif event and "error" in (told := json.loads(event)):
                        how = str(told["error"]["code"])
                    elif event:
                        got += [t for choice in told["choices"] for t in choice["token_ids"]]
                    if got and not has_begun:
                        self._have_begun.release()
                        has_begun = True
        except requests.RequestException:
            pass  # cut
        assert got == expected[: len(got)], "a token is wrong, repeated or missing"
        if is_done:
            assert len(got) == len(expected), "an answer without its end"
            return "whole"
        return how

    def end(self, within_s: float = START_S) -> dict[str, int]:
        """How many ended how."""
        until_s = time.monotonic() + within_s
        ends = [f.result(max(0.1, until_s - time.monotonic())) for f in self._futures]
        self._pool.shutdown()
        return {end: ends.count(end) for end in sorted(set(ends))}


def pids_of(server: Server, part: str) -> list[int]:
    lines = descendants(server.process.pid)
    if part in TITLES:
        return [pid for pid, line in lines.items() if line.startswith(TITLES[part])]
    [raylet] = [pid for pid, line in lines.items() if line.split(" ")[0].endswith("/raylet")]
    pairs = (v.partition("=") for v in Path(f"/proc/{raylet}/environ").read_text().split("\0"))
    env = {**os.environ, **{name: value for name, _, value in pairs if name.startswith("RAY_")}}
    found = re.search(r"--gcs-address=(\S+)", lines[raylet])
    assert found is not None
    env["RAY_ADDRESS"] = found[1]
    told = subprocess.run([sys.executable, "-c", RANKS], env=env, check=True, capture_output=True, text=True)
    pids: list[int] = json.loads(told.stdout.splitlines()[-1])[ENGINES[part]]
    return pids


def whole_answers(server: Server, truth: Truth) -> Callable[[], bool]:
    """Whether an answer is right, where there is one."""

    def look() -> bool:
        body = {"prompt": truth[0][0], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        try:
            answer = requests.post(f"{server.url}/v1/completions", json=body, headers=KEY, timeout=30)
            if answer.status_code != 200:
                return False
        except requests.RequestException:
            return False
        assert answer.json()["choices"][0]["token_ids"] == truth[0][1][:8]
        health = requests.get(f"{server.url}/health", headers=KEY, timeout=30)
        return health.status_code == 200

    return look


@pytest.fixture(params=["uvicorn", "serve"])
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[Server]:
    options = ("--prefill-tp", "1", "--decode-tp", "1", "--api-key", "k", "--request-timeout", "200")
    options += ("--drain-timeout", "200")
    with serving(model, "--http", request.param, *options, "--spares", "1") as found:
        yield found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_each_part_is_struck_under_load(server: Server, truth: Truth, how: signal.Signals) -> None:
    has_proxy = bool(pids_of(server, "proxy"))
    started: dict[int, str] = {}
    for part in (*ENGINES, *TITLES):
        if part == "proxy" and not has_proxy:
            continue
        started |= descendants(server.process.pid)
        [pid], told = pids_of(server, part), len(server.errors)
        streams, killed_s = Streams(server, truth), time.monotonic()
        os.kill(pid, how)
        ends = streams.end()
        until(lambda one={pid: started[pid]}: not alive(one), f"the end of a stopped {part}")
        until(whole_answers(server, truth), f"an answer after the {part} was struck")
        away_s = time.monotonic() - killed_s
        until(lambda n=told: any("ready again" in line for line in server.errors[n:]), "word of its return")
        lines = [line.strip() for line in server.errors[told:]]
        print(f"{how.name} of the {part}: {ends}, answers again after {away_s:.1f} s", *lines, sep="\n  ")
        assert any(" is lost" in line for line in lines), lines
        assert all(line.startswith("rayk: ") for line in lines), "Ray speaks, too"
        if part not in ("front", "proxy"):
            assert ends == {"whole": NUM_STREAMS}
    streams = Streams(server, truth)
    server.process.send_signal(signal.SIGTERM)
    ends = streams.end()
    print(f"SIGTERM: {ends}")
    assert ends.keys() <= {"whole", "HTTP 429"}, "what came before the signal ends as it should"
    assert ends["whole"] >= NUM_BEGUN
    assert server.ends() == 0
    until(lambda: not started.keys() & alive(started), "the end of every process")


def test_a_lost_cluster_ends_every_stream_and_the_server(server: Server, truth: Truth) -> None:
    started = descendants(server.process.pid)
    [gcs] = [pid for pid, line in started.items() if "gcs_server" in line.split(" ")[0]]
    [folder] = set(re.findall(rf"{tempfile.gettempdir()}/{PREFIX}[^/ ]+(?=/ray/)", started[gcs]))
    streams, began_s = Streams(server, truth), time.monotonic()
    os.kill(gcs, signal.SIGKILL)
    ends = streams.end(within_s=30.0)
    streams_s = time.monotonic() - began_s
    code = server.ends()
    print(f"{ends} within {streams_s:.1f} s, exit {code} after {time.monotonic() - began_s:.1f} s")
    print(*(line.strip() for line in server.errors), sep="\n  ")
    assert sum(ends.values()) == NUM_STREAMS
    assert "cut" not in ends, "a stream ends with its answer, or with an error"
    assert code == 1
    assert any("the Ray cluster is lost" in line for line in server.errors)
    until(lambda: not started.keys() & alive(started), "the end of every process")
    assert not Path(folder).exists()
