"""`rayk bench` as users run it: options, tables, report, exit codes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner, Result

from rayk import load
from rayk.cli.main import app
from rayk.reports.compare import LOAD_METRICS
from rayk.reports.load_fields import LOAD_CELL_FIELDS, LOAD_REQUEST_FIELDS
from rayk.reports.load_page import latency_rows
from rayk.reports.report import markdown
from tests.bench.fake_server import Script, serving
from tests.markers import thorough


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def run_on(script: Script, out: Path, *arguments: str) -> tuple[Result, list[dict[str, Any]]]:
    """The command's result and what its server saw."""
    with serving(script) as server:
        result = bench("--url", server.url, "--out", str(out), *arguments)
        return result, [seen.body for seen in server.seen]


def test_loads_leave_tables_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result, bodies = run_on(
        Script(ttft_s=0.01),
        out,
        *("--rate", "100", "--concurrency", "4", "--num-requests", "60", "--input-tokens", "4,8"),
        *("--output-tokens", "5", "--slo", "ttft=10s", "--seed", "3"),
    )
    found = load(out)
    verdicts = list(found.cells["verdict"])
    assert result.exit_code == int("INVALID" in verdicts)
    assert list(found.cells["cell_id"]) == ["poisson rate=100", "closed concurrency=4"]
    assert set(LOAD_CELL_FIELDS) <= set(found.cells.columns)
    assert set(LOAD_REQUEST_FIELDS) <= set(found.requests.columns)
    assert len(found.requests) == len(bodies) == 120
    assert len(found.transfers) == 0
    assert (found.requests["outcome"] == "ok").all()
    assert (found.requests["num_output_tokens"] == 5).all()
    assert (found.cells["good_share"] == 1).all()
    sent = {json.dumps(body["prompt"]) for body in bodies}
    kept = {json.dumps(list(map(int, prompt))) for prompt in found.requests["prompt_token_ids"]}
    assert sent == kept
    assert len(sent) == 120, "no load finds another's prompts in a cache"
    assert all(4 <= token < 1000 for body in bodies for token in body["prompt"])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "poisson rate=100" in page
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=", page), "it works offline"
    assert "TTFT" in result.stdout
    assert "poisson rate=100" in result.stdout
    assert "goodput/s" in result.stdout
    # The server says 3 of each prompt of 4 or 8, in turn.
    measured = found.requests[found.requests["phase"] == "measured"].groupby("cell_id", sort=False)
    assert list(found.cells["num_cached_tokens"]) == [3 * len(rows) for _, rows in measured]
    assert list(found.cells["num_prompt_tokens"]) == [int(r["num_prompt_tokens"].sum()) for _, r in measured]
    for name in ("cached %", "tokens/chunk"):
        assert f"| {name} |" in markdown(found)
        assert name in page
    spec = (out / "spec.yaml").read_text(encoding="utf-8")
    assert "ttft=10000ms" in spec


@thorough
def test_reports_are_made_again_and_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_on(Script(), tmp_path / name, "--rate", "200", "--num-requests", "20", "--output-tokens", "3")
    runner = CliRunner()
    page = tmp_path / "a" / "report.html"
    page.unlink()
    assert runner.invoke(app, ["report", str(tmp_path / "a")]).exit_code == 0
    assert "poisson rate=200" in page.read_text(encoding="utf-8")
    text = runner.invoke(app, ["report", str(tmp_path / "a"), "--format", "md", "--out", "-"])
    assert text.exit_code == 0
    assert "| poisson rate=200 | TTFT |" in text.stdout
    assert runner.invoke(app, ["report", str(tmp_path / "a"), "--format", "csv"]).exit_code == 0
    for kind in ("html", "md"):
        both = ["report", str(tmp_path / "a"), str(tmp_path / "b"), "--format", kind]
        assert runner.invoke(app, both).exit_code == 0
    compared = (tmp_path / "a" / "compare.md").read_text(encoding="utf-8")
    assert "1 load: 1 " in compared
    assert "poisson rate=200" in compared
    cells = [load(tmp_path / name).cells for name in ("a", "b")]
    for title, column, _ in LOAD_METRICS:
        # Where requests wait for each other, few are too few for a median.
        is_told = any(table[column].notna().any() for table in cells)
        assert (f"| {title}, a | {title}, b |" in compared) == is_told, title
        assert is_told or title.startswith(("TTFT", "TPOT", "E2E"))
    assert "GB/s" not in compared, "no run has any"


def test_intervals_have_two_ends_none_of_them_below_0() -> None:
    cell: dict[str, Any] = dict.fromkeys(LOAD_CELL_FIELDS)
    cell |= {"ttft_ms_mean": 7.67, "ttft_ms_mean_low": -2.06, "ttft_ms_mean_high": 17.4}
    cell |= {"ttft_ms_p50": 312.0, "ttft_ms_p50_low": 20.5, "ttft_ms_p50_high": None}
    row = latency_rows(pd.DataFrame([cell], dtype=object))[0]
    assert (row["mean"], row["p50"], row["p90"]) == ("7.67 (0.00 to 17.4)", "312 (over 20.5)", "")


@thorough
def test_a_comparison_names_invalid_loads(tmp_path: Path) -> None:
    for name, status in (("a", 200), ("b", 429)):
        options = ("--rate", "200", "--num-requests", "20", "--output-tokens", "3", "--slo", "e2e=100s")
        run_on(Script(status=status), tmp_path / name, *options)
    both = ["report", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "md", "--out", "-"]
    text = CliRunner().invoke(app, both).stdout
    told = text[text.index("- b:") :].partition("##")[0]
    assert "INVALID, its numbers do not hold: poisson rate=200: " in told
    assert "no request was answered: HTTP 429" in told  # a busy machine is held against it first
    row = next(line for line in text[text.index("## Cells") :].splitlines() if line.startswith("| poisson"))
    assert "| 100.0% | 0.0% (-100%) |" in row
    assert "| 0 | 20 |" in row


def test_failed_requests_make_a_load_invalid_and_the_exit_status_1(tmp_path: Path) -> None:
    result, _ = run_on(Script(status=429), tmp_path / "out", "--rate", "200", "--num-requests", "15")
    assert result.exit_code == 1
    found = load(tmp_path / "out")
    assert list(found.cells["verdict"]) == ["INVALID"]
    assert "no request was answered: HTTP 429" in found.cells["reason"][0]
    assert list(found.cells["num_refused"]) == [15]
    assert list(found.cells["goodput_per_s"]) == [0.0]
    assert "no request was answered" in result.stderr


def test_a_noisy_load_fails_if_strict(tmp_path: Path) -> None:
    options = ("--concurrency", "1", "--num-requests", "3", "--output-tokens", "2")
    result, _ = run_on(Script(), tmp_path / "out", *options, "--strict")
    assert load(tmp_path / "out").cells["verdict"][0] in ("NOISY", "INVALID")
    assert result.exit_code == 1


@thorough
def test_chat_and_traces_and_texts(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 10 * i, "input_length": 1500, "output_length": 64 * (i + 1), "hash_ids": [0, 1, 2 + i]}
        for i in range(4)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ("--trace", str(trace), "--trace-block", "16", "--trace-speed", "2")
    _, bodies = run_on(Script(), tmp_path / "trace", *options)
    assert [len(body["prompt"]) for body in bodies] == [47] * 4
    assert sorted(body["max_tokens"] for body in bodies) == [2, 4, 6, 8]
    assert len({tuple(body["prompt"][:32]) for body in bodies}) == 1
    assert len({tuple(body["prompt"][:33]) for body in bodies}) > 1
    assert list(load(tmp_path / "trace").cells["cell_id"]) == ["trace trace.jsonl speed=2"]
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "hello"}\n{"prompt": "world"}\n', encoding="utf-8")
    options = ("--prompts", str(texts), "--chat", "--body", '{"top_p": 0.5}', "--no-ignore-eos")
    _, bodies = run_on(Script(), tmp_path / "chat", *options)
    assert [body["messages"][0]["content"] for body in bodies] == ["hello", "world"]
    assert all(body["top_p"] == 0.5 and body["ignore_eos"] is False for body in bodies)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rate", "0"], "--rate 0"),
        (["--rate", "2", "--rate", "2"], "the same load twice"),
        (["--rate", "2", "--trace", "none.jsonl"], "one of --rate, --concurrency, --trace"),
        (["--num-requests", "99999999999"], "--num-requests 99999999999"),
        (["--num-requests", "999999", "--input-tokens", "9999"], "tokens of prompts, and at most"),
        (["--rate", "1e-300"], "--rate 1e-300"),
        (["--rate", "1e-6", "--num-requests", "999"], "requests is due after"),
        (["--request-rate", "-1"], "--request-rate or --rate -1"),
        (["--request-rate", "x"], "--request-rate x"),
        (["--request-rate", "3", "--max-concurrency", "2"], "not both"),
        (["--rate", "3", "--max-concurrency", "2"], "--rate, --max-concurrency"),
        (["--request-rate", "3", "--concurrency", "2"], "--request-rate, --concurrency"),
        (["--num-prefixes", "1000000000000"], "shared prefixes: 1000000000000 of 0 tokens"),
        (["--concurrency", "1e9"], "not a number"),
        (["--concurrency", "999999"], "--concurrency 999999"),
        (["--num-prefixes", "99999", "--prefix-tokens", "99999"], "shared prefixes: 99999 of 99999 tokens"),
        (["--input-tokens", "1-99999999999"], "not a number of tokens"),
        (["--timeout", "inf"], "--timeout inf"),
        (["--seed", "-1"], "--seed -1"),
        (["--body", "[" * 9999], "not JSON"),
        (["--slo", "speed=1"], "not an objective"),
        (["--input-tokens", "x"], "not a number of tokens"),
        (["--token-ids", "9-3"], "not a range of token ids"),
        (["--body", "[1]"], "not an object"),
        (["--body", "{"], "not JSON"),
        (["--prompts", "none.jsonl"], "cannot read the prompts"),
        (["--trace", "none.jsonl"], "cannot read the trace"),
        (["--model", "other"], "one of fake"),
        (["--chat"], "--prompts FILE"),
    ],
)
def test_bad_input_is_refused_before_the_first_request(tmp_path: Path, options: list[str], says: str) -> None:
    result, bodies = run_on(Script(), tmp_path / "out", *options)
    assert result.exit_code == 2
    assert says in result.stderr
    assert bodies == []
    assert not (tmp_path / "out").exists()


@thorough
def test_a_folder_with_tables_and_a_server_without_vocabulary_are_refused(tmp_path: Path) -> None:
    options = ("--concurrency", "1", "--num-requests", "2", "--output-tokens", "2")
    run_on(Script(), tmp_path / "out", *options)
    result, bodies = run_on(Script(), tmp_path / "out", *options)
    assert (result.exit_code, bodies) == (2, [])
    assert "already holds a run's tables" in result.stderr
    with serving(Script()) as server:
        del server.models[0]["vocab_size"]
        refused = bench("--url", server.url, "--out", str(tmp_path / "x"), *options)
        assert refused.exit_code == 2
        assert "--token-ids LOW-HIGH" in refused.stderr
        bench("--url", f"{server.url}/v1/", "--out", str(tmp_path / "x"), "--token-ids", "7-7", *options)
        assert [seen.body["prompt"] for seen in server.seen] == [[7] * 128] * 2
    gone = bench("--url", server.url, *options)
    assert gone.exit_code == 2
    assert "no server answers: nothing listens there" in gone.stderr


def test_a_key_is_sent_but_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with serving(Script()) as server:
        arguments = ["--url", server.url, "--out", str(out), "--api-key", "hush", "--num-requests", "1"]
        monkeypatch.setattr(sys, "argv", ["rayk", "bench", *arguments, "--api-key=hush"])
        bench(*arguments)
        assert server.seen[0].headers["Authorization"] == "Bearer hush"
    kept = [path.read_bytes() for path in out.iterdir() if path.is_file()]
    assert len(kept) >= 5
    assert not any(b"hush" in content for content in kept)


@thorough
def test_an_interrupted_load_leaves_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with serving(lambda number, _: Script(hangs=number >= 5)) as server:
        command = [sys.executable, "-m", "rayk.cli.main", "bench", "--url", server.url, "--out", str(out)]
        process = subprocess.Popen(
            [*command, "--concurrency", "1", "--num-requests", "50", "--output-tokens", "2"],
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 120
        while len(server.seen) < 6 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, stderr
    found = load(out)
    assert list(found.requests["outcome"]) == ["ok"] * 5 + ["aborted"]
    assert found.cells["verdict"][0] == "INVALID"
    assert "interrupted after 6 of 50 requests" in found.cells["reason"][0]
