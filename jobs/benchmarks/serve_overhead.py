"""Time what a server adds to a request and to a streamed token: everything but the model's forward passes.

    python jobs/benchmarks/serve_overhead.py [--requests 40] [--tokens 128] [--paths uvicorn,serve] [--check]

One prefill and one decode engine of a tiny model, one request after the other over one connection, streamed.
Medians of the wall clock, less what the engines' own forward passes took (GET /engines tells it, before and
after all requests of a kind), in milliseconds:

    request   a request of 2 tokens, from its first byte out to its last byte in, less its forward passes (a
              prefill, a decode step): HTTP, JSON, routing, placement, scheduling on both engines, hand-over
              of KV with its digests
    first     the same up to the first token's chunk, less one prefill
    token     each further token of a long answer, less its forward pass: scheduling, sampling, streaming
    ready s   seconds from the command's start to its ready line, Ray's own start included

Prompts share no prefix, so that all of their KV is handed over.
Targets on the uvicorn path: 10 ms per request, 1 ms per token. The client shares the machine's cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from jobs.serving import serving
from rayk.oracle.checkpoint import write_checkpoint

TARGETS_MS = {"request": 10.0, "token": 1.0}
COLUMNS = (
    "request",
    "first",
    "token",
    "e2e of 2",
    "e2e of all",
    "forward of 2",
    "forward of all",
    "ready s",
)
WARM_UP = 8
SHORT = 2
"""Tokens of the request that is handed over for one decode step."""
START_S = 300.0


@dataclass(frozen=True)
class Answer:
    """Times of one streamed request, in milliseconds from its first byte out."""

    first_ms: float
    last_ms: float


class Client:
    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=START_S)
        self._connection.connect()
        self._model = model

    def complete(self, prompt: list[int], num_tokens: int) -> Answer:
        """Stream a greedy completion to its end."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
        began = time.monotonic_ns()
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = self._connection.getresponse()
        first_ns, found = None, 0
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            first_ns = first_ns or time.monotonic_ns()
            found += len(json.loads(line[6:])["choices"][0]["token_ids"])
        ended = time.monotonic_ns()
        if first_ns is None or found != num_tokens:
            raise RuntimeError(f"status {response.status}, {found} of {num_tokens} tokens")
        return Answer((first_ns - began) / 1e6, (ended - began) / 1e6)

    def forward_ms(self) -> dict[str, float]:
        """What the forward passes of each engine's rank 0 took so far."""
        self._connection.request("GET", "/engines")
        engines = json.loads(self._connection.getresponse().read())["data"]
        return {engine["name"]: 1e3 * engine["forward_s"] for engine in engines}


def measure(
    model: Path, path: str, num_requests: int, num_tokens: int, prompt_tokens: int
) -> dict[str, float]:
    prompts = _prompts(prompt_tokens)
    began = time.monotonic()
    told = ["--http", path, "--prefill-tp", "1", "--decode-tp", "1", "--device", "cpu"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(model, told, Path(folder) / "log", START_S) as server,
    ):
        ready_s = time.monotonic() - began
        client = Client(server.url, model.name)
        for _ in range(WARM_UP):
            client.complete(next(prompts), SHORT)
            client.complete(next(prompts), num_tokens)
        short, of_short = _answers(client, prompts, SHORT, num_requests)
        whole, of_whole = _answers(client, prompts, num_tokens, num_requests)
    medians = {
        "ready s": ready_s,
        "first": statistics.median(a.first_ms for a in short),
        "e2e of 2": statistics.median(a.last_ms for a in short),
        "e2e of all": statistics.median(a.last_ms for a in whole),
        "forward of 2": sum(of_short.values()),
        "forward of all": sum(of_whole.values()),
    }
    added = {what: medians[f"e2e of {what}"] - medians[f"forward of {what}"] for what in ("2", "all")}
    return medians | {
        "request": added["2"],
        "first": medians["first"] - of_short["prefill0"],
        "token": (added["all"] - added["2"]) / (num_tokens - SHORT),
    }


def _prompts(num_tokens: int) -> Iterator[list[int]]:
    """No two begin alike: engines hold nothing of them, and all of their KV is handed over."""
    draw = random.Random(0)
    while True:
        yield [draw.randrange(5, 205) for _ in range(num_tokens)]


def _answers(
    client: Client, prompts: Iterator[list[int]], num_tokens: int, num_requests: int
) -> tuple[list[Answer], dict[str, float]]:
    """So many, one after the other, and the mean milliseconds of each engine's forward passes for one."""
    before = client.forward_ms()
    answers = [client.complete(next(prompts), num_tokens) for _ in range(num_requests)]
    after = client.forward_ms()
    return answers, {name: (after[name] - before[name]) / num_requests for name in after}


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per path; returns the targets that uvicorn misses."""
    model = options.model or write_checkpoint("qwen3", Path("checkpoints/bench-qwen3"))
    page.say(
        f"Medians of {options.requests} requests of {options.prompt_tokens} tokens, {SHORT} and "
        f"{options.tokens} tokens long.\n"
    )
    page.head("path", *COLUMNS)
    results = {}
    for path in options.paths.split(","):
        found = measure(model, path, options.requests, options.tokens, options.prompt_tokens)
        results[path] = found
        page.row(path, *(f"{found[column]:.2f}" for column in COLUMNS))
    return missed(results)


def main() -> int:
    model = {"type": Path, "help": "a checkpoint folder (default: a tiny qwen3)"}
    title, paths = "What a server adds, milliseconds", "uvicorn,serve"
    return run(
        fill, __file__, title=title, model=model, requests=40, tokens=128, prompt_tokens=32, paths=paths
    )


def missed(results: dict[str, dict[str, float]]) -> list[str]:
    """What uvicorn, if it was measured, adds beyond the targets."""
    return [
        f"uvicorn, {name}: {results['uvicorn'][name]:.2f} ms, the target is under {target:g} ms"
        for name, target in TARGETS_MS.items()
        if "uvicorn" in results and results["uvicorn"][name] >= target
    ]


if __name__ == "__main__":
    sys.exit(main())
