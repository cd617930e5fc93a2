"""aiperf and guidellm as people run them: their commands, and what they say of each request.

Each has an environment of its own (`make test-generators` makes them) and no model hub.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RUN_S = 600.0
NOWHERE = "http://127.0.0.1:9"
"""Nobody listens there: a tool that asks a hub for something fails."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request as a tool tells it: its own clock, the server's usage."""

    prompt: str | list[dict[str, Any]]
    """What it sent: text, or the messages of the first turn."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_s: float | None
    """None: not streamed."""
    itl_s: float | None
    e2e_s: float
    """To the end of the response."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """One run."""

    rows: Sequence[Row]
    """Requests that ended well."""
    num_cancelled: int = 0
    """Requests that the tool gave up itself, as it was told to."""


def aiperf(folder: Path, url: str, model: Path, *options: str, num_requests: int) -> Told:
    """`aiperf profile` with a random seed of its own. Fails the test where it, or a request, does."""
    _run(
        "aiperf",
        folder,
        *("profile", "--url", url, "--model", model.name, "--tokenizer", str(model)),
        *("--artifact-dir", str(folder), "--ui", "none", "--no-gpu-telemetry", "--random-seed", "7"),
        *options,
    )
    summary = json.loads((folder / "profile_export_aiperf.json").read_text())
    assert summary["is_complete"]
    assert not summary["was_cancelled"]
    problems = [
        e for e in summary["error_summary"] if e["error_details"]["type"] != "RequestCancellationError"
    ]
    assert problems == []
    metrics = json.loads((folder / "server_metrics_export.json").read_text())["summary"]
    assert metrics["endpoints_successful"] == [f"{url}/metrics"]
    sent = {s["session_id"]: s["payloads"] for s in json.loads((folder / "inputs.json").read_text())["data"]}
    records = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
    assert len(records) == num_requests
    rows = [_aiperf_row(r, sent) for r in records if not r["metadata"]["was_cancelled"]]
    # `request_count` is of those that ended well.
    assert summary["request_count"]["avg"] == len(rows)
    return Told(rows=rows, num_cancelled=num_requests - len(rows))


def _aiperf_row(record: dict[str, Any], sent: dict[str, Any]) -> Row:
    assert record.get("error") is None, record["error"]
    metadata = record["metadata"]
    values = {name: metric["value"] for name, metric in record["metrics"].items()}
    payload = sent[metadata["conversation_id"]][metadata["turn_index"]]
    ttft_ms, itl_ms = values.get("time_to_first_token"), values.get("inter_token_latency")
    return Row(
        prompt=payload.get("prompt") or payload["messages"],
        input_tokens=values["usage_prompt_tokens"],
        output_tokens=values["usage_completion_tokens"],
        cached_tokens=values["usage_prompt_cache_read_tokens"],
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        itl_s=None if itl_ms is None else itl_ms / 1e3,
        e2e_s=(metadata["request_end_ns"] - metadata["request_start_ns"]) / 1e9,
    )


def guidellm(
    folder: Path, url: str, model: Path, *, path: str, num_requests: int, data: str, **options: str
) -> Told:
    """`guidellm run`. `data`: of its synthetic texts. Fails the test where it, or a request, does."""
    backend = f"kind=openai_http,target={url},request_format={path},timeout_connect={RUN_S}"
    _run(
        "guidellm",
        folder,
        *("run", "--backend", backend + options.get("backend", "")),
        *("--profile", options.get("profile", "kind=concurrent,streams=4")),
        *("--constraint", f"kind=max_requests,count={num_requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={model}"),
        *("--data", f"kind=synthetic_text,{data}"),
        *("--output", f"kind=json,path={folder / 'benchmarks.json'}"),
        "--disable-console-interactive",
    )
    (benchmark,) = json.loads((folder / "benchmarks.json").read_text())["benchmarks"]
    made = benchmark["scheduler_metrics"]["requests_made"]
    assert made == {"successful": num_requests, "errored": 0, "incomplete": 0, "total": num_requests}
    assert benchmark["config"]["backend"]["model"] == model.name  # as /v1/models told it
    return Told(rows=[_guidellm_row(found) for found in benchmark["requests"]["successful"]])


def _guidellm_row(found: dict[str, Any]) -> Row:
    body = json.loads(found["request_args"])["body"]
    ttft_ms, itl_ms = found["time_to_first_token_ms"], found["inter_token_latency_ms"]
    return Row(
        prompt=body.get("prompt") or body["messages"],
        input_tokens=found["prompt_tokens"],
        output_tokens=found["output_tokens"],
        cached_tokens=found["cached_tokens"],
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        itl_s=None if itl_ms is None else itl_ms / 1e3,
        e2e_s=found["request_latency"],
    )


def command_of(tool: str) -> Path:
    """The tool's command. Skips the test where its environment is not made."""
    command = ROOT / f".venv-{tool}" / "bin" / tool
    if not command.exists():
        pytest.skip(f"no {command.relative_to(ROOT)}: `make test-generators` installs it")
    return command


def _run(tool: str, folder: Path, *arguments: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(folder / "hub")}
    if tool != "aiperf":
        environment["HF_HUB_OFFLINE"] = "1"  # with it, aiperf 0.13.0 takes no folder for a tokenizer
    with (folder / "printed").open("w+") as printed:
        command = [str(command_of(tool)), *arguments]
        status = subprocess.run(
            command, cwd=folder, env=environment, stdout=printed, stderr=printed, timeout=RUN_S, check=False
        ).returncode
        printed.seek(0)
        assert status == 0, f"{' '.join(command)}: exit {status}\n{printed.read()[-8000:]}"
