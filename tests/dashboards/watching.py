"""Real programs under a real Prometheus: what tests of dashboards and alerts have in common."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import check, tools

ROOT = Path(__file__).resolve().parents[2]
RAYK = [sys.executable, "-m", "rayk.cli.main"]
START_S = 300.0
"""Machines may be slow: nothing here measures time."""
FASTER = 60
LEAST_S, LEAST_FOR_S = 12, 2
"""A window holds some scrapes, though a busy machine may miss two of them."""
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_TIMES = re.compile(r"(\[|offset )(\d+)([smh])\b")


def quicker_rules(text: str) -> str:
    """alerts.yml for a test that cannot wait: every range and offset of its expressions, and every `for`, is
    divided by FASTER, but to no less than LEAST_S and LEAST_FOR_S, and rules are looked at every second.

    Nothing else is changed: labels, thresholds and what expressions are made of stay."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _SECONDS[found[3]]
        return f"{found[1]}{max(LEAST_S, seconds // FASTER)}s"

    rules: dict[str, Any] = yaml.safe_load(text)
    for group in rules["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule["expr"] = _TIMES.sub(shorter, rule["expr"])
            if "for" in rule:
                number, unit = int(rule["for"][:-1]), rule["for"][-1]
                rule["for"] = f"{max(LEAST_FOR_S, number * _SECONDS[unit] // FASTER)}s"
    return yaml.safe_dump(rules)


@contextmanager
def running(*command: str, ready: str, **environment: str) -> Iterator[re.Match[str]]:
    """A program, once a line of its stdout matches `ready`; it ends by SIGINT, and well."""
    program = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert program.stdout is not None
    late = threading.Timer(START_S, program.kill)
    late.start()
    try:
        lines = []
        for line in program.stdout:
            lines.append(line)
            if found := re.search(ready, line):
                break
        else:
            pytest.fail(f"{' '.join(command)} ended with {program.wait()}: {''.join(lines)}")
        late.cancel()
        yield found
        program.send_signal(signal.SIGINT)
        assert program.wait(120) == 0
    finally:
        late.cancel()
        program.kill()
        program.communicate()


@contextmanager
def serving(model: Path, address: str, *options: str) -> Iterator[str]:
    """URL of a server on a cluster."""
    serve = [*RAYK, "serve", str(model), "--address", address, "--port", "0", "--http", "uvicorn"]
    on_cpu = ["--dtype", "float32", "--device", "cpu"]
    with running(*serve, *on_cpu, *options, ready=r"ready (http://\S+)") as found:
        yield found[1]


@contextmanager
def watched(address: str, front: str, *options: str) -> Iterator[check.Prometheus]:
    """A Prometheus that has scraped a cluster and a front. Skips where none can be had."""
    try:
        tools.need("prometheus")
    except tools.NotAvailableError as error:
        pytest.skip(str(error))
    start = [sys.executable, "-m", "dashboards.start", "--address", address, "--port", "0"]
    fronts = ["--front", front.removeprefix("http://")]
    with running(*start, *fronts, *options, ready=r"^Prometheus: (\S+)") as found:
        prometheus = check.Prometheus(found[1])
        until(lambda: all("up" in targets_of(prometheus).get(job, ()) for job in ("ray", "rayk-front")))
        yield prometheus


def until(is_so: Callable[[], bool], within_s: float = START_S, what: str = "") -> None:
    """Wait for it."""
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, what or f"not so after {within_s:g} s"
        time.sleep(0.5)


def targets_of(prometheus: check.Prometheus) -> dict[str, set[str]]:
    """Health of the targets of each job."""
    data = prometheus.ask("targets", state="active")
    assert isinstance(data, dict)
    found: dict[str, set[str]] = {}
    for target in data["activeTargets"]:
        found.setdefault(target["scrapePool"], set()).add(target["health"])
    return found


def fired(prometheus: check.Prometheus, window_s: float, model: str = "") -> dict[str, set[str]]:
    """Alerts that fired in the last `window_s`, and the engines that they named. `model`: those of it, and of
    none; other runs on the cluster may have lost engines."""
    found: dict[str, set[str]] = {}
    for alert in prometheus.series('ALERTS{alertstate="firing"}', window_s):
        labels = alert["metric"]
        assert isinstance(labels, dict)
        if model and labels.get("model", model) != model:
            continue
        found.setdefault(labels["alertname"], set()).add(labels.get("engine", ""))
    return found


def run_spec(spec: dict[str, Any], folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    """`rayk run` of it, into `folder`/run."""
    written = folder / "spec.yaml"
    written.write_text(yaml.safe_dump(spec))
    run = [*RAYK, "run", str(written), "--out", str(folder / "run"), "--address", address]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


def model_of(url: str) -> str:
    """The id of the model that is served."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        found: str = json.load(answer)["data"][0]["id"]
    return found


def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of an answer."""
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def complete(url: str, prompt: list[int], **more: Any) -> tuple[int, bytes]:
    """An answer of 24 tokens."""
    body = {"model": model_of(url), "prompt": prompt, "max_tokens": 24, "ignore_eos": True, **more}
    return post(f"{url}/v1/completions", body)
