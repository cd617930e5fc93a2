"""`rayk serve` under load generators that others wrote: what they tell of it, and what it counted itself."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from tests.conftest import CheckpointFactory
from tests.markers import nixl, ray, slow
from tests.serve.load_generators import Row, Told, aiperf, command_of, guidellm
from tests.serve.test_serve_command import Server, serving, until

pytestmark = [slow, ray, nixl, pytest.mark.timeout(1200)]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_INPUT, NUM_OUTPUT = 96, 12
SIZES = f"prompt_tokens={NUM_INPUT},output_tokens={NUM_OUTPUT}"
STREAMS = ("--streaming", "--use-server-token-count", "--extra-inputs", "ignore_eos:true")
"""Tokens by the server's usage: what random weights write is often no text, and tokenised otherwise."""


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    """Before a server starts."""
    for tool in ("aiperf", "guidellm"):
        command_of(tool)


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[Server]:
    """One that answers on the path of the parameter; the last one is gone before the next starts."""
    engines = ("--prefill-tp", "2", "--decode-tp", "1")
    settings = ("--set", "engine.max_seqs=8", "--set", "engine.prefix_caching=true")
    with serving(model, *engines, *settings, "--http", request.param) as running:
        yield running


low_overhead = pytest.mark.parametrize("server", ["uvicorn"], indirect=True, scope="module")


@dataclass(frozen=True)
class Counted:
    """What a front counted."""

    values: dict[tuple[str, str, str], float]
    """(name, path, status) -> value; paths and statuses of requests only."""

    def __getitem__(self, name: str) -> float:
        return self.values.get((name, "", ""), 0.0)

    def statuses(self, path: str) -> dict[str, float]:
        """Of the path's requests."""
        return {
            s: n for (name, p, s), n in self.values.items() if p == path and name.endswith("_total") and n
        }

    def since(self, before: Counted) -> Counted:
        """What came between."""
        return Counted({key: value - before.values.get(key, 0.0) for key, value in self.values.items()})


def counted(url: str) -> Counted:
    """As Prometheus reads it, once every answer is counted."""

    def scrape() -> Counted | None:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = Counted(
            {
                (s.name, s.labels.get("path", ""), s.labels.get("status", "")): s.value
                for family in families
                for s in family.samples
                if "engine" not in s.labels and "le" not in s.labels
            }
        )
        return found if found["rayk_front_running_requests"] == 0 else None

    return until(scrape, "answers all counted")


@dataclass
class Load:
    """One tool's run against one server."""

    server: Server
    path: str
    began: float
    before: Counted

    @classmethod
    def begin(cls, server: Server, path: str) -> Load:
        """Now."""
        return cls(server, path, time.monotonic(), counted(server.url))

    def check(self, told: Told, *, num_output: int = NUM_OUTPUT, num_gaps: int = NUM_OUTPUT - 1) -> Counted:
        """The tool and the server agree; what the server counted. `num_gaps`: those between one request's
        tokens, at least, that the tool takes the mean of."""
        wall_s = time.monotonic() - self.began
        found = counted(self.server.url).since(self.before)
        rows, num = told.rows, len(told.rows)
        assert sum(found.statuses(self.path).values()) == num + told.num_cancelled
        assert all(row.output_tokens == num_output for row in rows)
        assert found["rayk_front_e2e_seconds_count"] == num  # of whole answers
        for row in rows:
            _check_times(row, wall_s, num_gaps)
        if not told.num_cancelled:
            self._check_sums(found, rows)
        return found

    def _check_sums(self, found: Counted, rows: Any) -> None:
        num = len(rows)
        assert found.statuses(self.path) == {"200": num}
        assert found["rayk_front_prompt_tokens_total"] == sum(row.input_tokens for row in rows)
        assert found["rayk_front_output_tokens_total"] == sum(row.output_tokens for row in rows)
        assert found["rayk_front_cached_tokens_total"] == sum(row.cached_tokens for row in rows)
        assert found["rayk_front_ttft_seconds_count"] == num
        # A client's clock starts before the server's and stops after it.
        assert found["rayk_front_e2e_seconds_sum"] <= sum(row.e2e_s for row in rows)
        if all(row.ttft_s is not None for row in rows):
            assert found["rayk_front_ttft_seconds_sum"] <= sum(row.ttft_s for row in rows)


def _check_times(row: Row, wall_s: float, num_gaps: int) -> None:
    assert 0 < row.e2e_s < wall_s
    if row.ttft_s is None or row.itl_s is None:
        assert row.ttft_s is row.itl_s is None
        return
    assert 0 < row.ttft_s <= row.e2e_s
    assert 0 <= row.itl_s * num_gaps <= (row.e2e_s - row.ttft_s) * 1.001  # clocks that count in ms


def _lengths(model: Path, rows: Any) -> list[int]:
    """Of what was sent, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def length(prompt: Any) -> int:
        if isinstance(prompt, str):
            return len(tokenizer(prompt)["input_ids"])
        plain = [{**m, "content": _text_of(m["content"])} for m in prompt]
        return len(tokenizer.apply_chat_template(plain, add_generation_prompt=True)["input_ids"])

    return [length(row.prompt) for row in rows]


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _streams(rows: Any) -> bool:
    return all(row.ttft_s is not None for row in rows)


@pytest.mark.parametrize(
    ("server", "kind"),
    [("uvicorn", "chat"), ("uvicorn", "completions"), ("serve", "chat")],
    indirect=["server"],
    scope="module",  # so that each server starts once
)
def test_aiperf_streams(server: Server, model: Path, tmp_path: Path, kind: str) -> None:
    load = Load.begin(server, f"/v1/{'chat/' if kind == 'chat' else ''}completions")
    # The tool wraps its texts with the checkpoint's chat template, and makes them fit with it.
    wrapped = ("--apply-chat-template",) if kind == "chat" else ("--isl-stddev", "16")
    sizes = ("--isl", str(NUM_INPUT), "--osl", str(NUM_OUTPUT), *wrapped)
    many = ("--request-count", "24", "--concurrency", "6", "--endpoint-type", kind)
    told = aiperf(tmp_path, load.server.url, model, *many, *sizes, *STREAMS, num_requests=24)
    load.check(told)
    assert _streams(told.rows)
    assert [row.input_tokens for row in told.rows] == _lengths(model, told.rows)
    if kind == "chat":
        assert {row.input_tokens for row in told.rows} == {NUM_INPUT}


@low_overhead
def test_aiperf_goes_on_with_conversations(server: Server, model: Path, tmp_path: Path) -> None:
    load = Load.begin(server, CHAT)
    turns = ("--conversation-num", "4", "--conversation-turn-mean", "3", "--conversation-turn-stddev", "0")
    sizes = ("--isl", str(NUM_INPUT), "--osl", str(NUM_OUTPUT), "--per-chunk-usage", "--concurrency", "4")
    told = aiperf(
        tmp_path, load.server.url, model, "--endpoint-type", "chat", *turns, *sizes, *STREAMS, num_requests=12
    )
    found = load.check(told, num_gaps=1)  # what a first chunk told at once has none
    # Each later turn begins with what the ones before it left in the caches.
    assert found["rayk_front_cached_tokens_total"] >= 8 * (NUM_INPUT // 16 - 1) * 16


@low_overhead
def test_aiperf_gives_requests_up(server: Server, model: Path, tmp_path: Path) -> None:
    load = Load.begin(server, CHAT)
    num_output = 1500  # no machine writes them before the tool hangs up
    given_up = ("--request-cancellation-rate", "50", "--request-cancellation-delay", "0.3")
    sizes = ("--isl", str(NUM_INPUT), "--osl", str(num_output), "--request-count", "12", "--concurrency", "4")
    told = aiperf(
        tmp_path,
        load.server.url,
        model,
        *("--endpoint-type", "chat", *sizes, *given_up, *STREAMS),
        num_requests=12,
    )
    found = load.check(told, num_output=num_output)
    assert 0 < told.num_cancelled < 12
    assert found["rayk_front_output_tokens_total"] < num_output * 12
    # Their places are free again: as many as the engines run at once.
    _read_whole(server, model, tmp_path / "after")


@low_overhead
def test_aiperf_reads_answers_whole(server: Server, model: Path, tmp_path: Path) -> None:
    _read_whole(server, model, tmp_path)


def _read_whole(server: Server, model: Path, folder: Path) -> None:
    """Answers that are not streamed, more at a time than the tests before."""
    load = Load.begin(server, COMPLETIONS)
    sizes = ("--isl", str(NUM_INPUT), "--osl", str(NUM_OUTPUT), "--request-count", "16", "--concurrency", "8")
    ready = ("--wait-for-model-timeout", "60", "--wait-for-model-mode", "models")
    told = aiperf(
        folder,
        load.server.url,
        model,
        *("--endpoint-type", "completions", *sizes, *ready, *STREAMS[1:]),
        num_requests=16,
    )
    load.check(told)
    assert not any(row.ttft_s for row in told.rows)


@low_overhead
def test_guidellm_reads_answers_whole(server: Server, model: Path, tmp_path: Path) -> None:
    load = Load.begin(server, CHAT)
    load_of = {"profile": "kind=poisson,rate=8", "backend": ",stream=false"}
    told = guidellm(tmp_path, load.server.url, model, path=CHAT, num_requests=16, data=SIZES, **load_of)
    load.check(told)
    assert not any(row.ttft_s for row in told.rows)


@pytest.mark.parametrize(
    ("server", "path"),
    [("uvicorn", CHAT), ("uvicorn", COMPLETIONS), ("serve", COMPLETIONS)],
    indirect=["server"],
    scope="module",  # so that each server starts once
)
def test_guidellm_streams(server: Server, model: Path, tmp_path: Path, path: str) -> None:
    load = Load.begin(server, path)
    told = guidellm(tmp_path, load.server.url, model, path=path, num_requests=24, data=SIZES)
    load.check(told)
    assert _streams(told.rows)
    assert [row.input_tokens for row in told.rows] == _lengths(model, told.rows)
