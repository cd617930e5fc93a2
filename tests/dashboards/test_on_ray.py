"""A real Prometheus over a real server and a real experiment: every panel's query has data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import check, tools
from dashboards.table import ABSENT_ON_CPU
from rayk import load
from tests.conftest import CheckpointFactory
from tests.markers import nixl, ray, slow

pytestmark = [slow, ray, nixl, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[2]
RAYK = [sys.executable, "-m", "rayk.cli.main"]
START_S = 300.0
"""Machines may be slow: nothing here measures time."""
WINDOW_S = 1500.0
NOT_REPORTED_YET: frozenset[str] = frozenset()
"""Metrics that nothing reports so far, though such a run has what they tell of. Is to stay empty."""
NEVER_HAPPENED = frozenset(
    {
        "rayk_nixl_num_failed_notifications_total",
        "rayk_nixl_num_kv_expired_reqs_total",
        "rayk_nixl_staged_total",
        "rayk_num_preemptions_total",
        "rayk_engines_lost_total",
    }
)
"""Metrics of what does not happen in these runs: a panel shows 0 for them."""


@dataclass
class Seen:
    """What Prometheus had at the end."""

    answers: list[check.Answer]
    unreported: set[str]
    fired: set[str]
    targets: dict[str, set[str]]
    """Health of the targets of each job."""


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


def complete(url: str, prompt: list[int]) -> None:
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 24, "ignore_eos": True}).encode()
    model = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=60))["data"][0]["id"]
    body = body.replace(b'"m"', json.dumps(model).encode())
    request = urllib.request.Request(
        f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 24


def spec_of(model: Path) -> dict[str, Any]:
    """A cell that goes on for a while, and one with a flipped bit."""
    return {
        "name": "seen",
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "prompts": {"random": {"count": 12, "input_tokens": [40, 90], "prefix_tokens": 32, "seed": 0}},
        "sampling": {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True},
        "engine": {"num_blocks": 128, "max_batch_tokens": 128, "max_seqs": 16, "prefix_caching": True},
        "prefill": {"tp": 1},
        "decode": {"tp": 2},
        "arrival": {"rate": 1.0, "process": "constant"},
        "matrix": {"faults": [[], [{"kind": "flip_bit", "request": 1, "seed": 77}]]},
        "checks": ["tokens", "kv_bytes"],
        "deadlines": {"cell_s": 300, "request_s": 200, "transfer_s": 100},
    }


@pytest.fixture(scope="module")
def seen(ray_address: str, checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    try:
        tools.need("prometheus")
    except tools.NotAvailableError as error:
        pytest.skip(str(error))
    model, folder = checkpoint("qwen3"), tmp_path_factory.mktemp("seen")
    serve = [*RAYK, "serve", str(model), "--address", ray_address, "--port", "0", "--http", "uvicorn"]
    sizes = ["--prefill-tp", "1", "--decode-tp", "1", "--set", "engine.prefix_caching=true"]
    start = [sys.executable, "-m", "dashboards.start", "--address", ray_address, "--port", "0"]
    with running(
        *serve, *sizes, "--dtype", "float32", "--device", "cpu", ready=r"ready (http://\S+)"
    ) as served:
        front = served.group(1)
        dashboards = [*start, "--front", front.removeprefix("http://")]
        with running(*dashboards, ready=r"^Prometheus: (\S+)") as started:
            prometheus = check.Prometheus(started.group(1))
            until_up(prometheus, {"ray", "rayk-front"})
            for n in range(12):
                complete(front, [*range(3, 35), 40 + n])
                time.sleep(1.0)
            written = folder / "spec.yaml"
            written.write_text(yaml.safe_dump(spec_of(model)))
            run = [*RAYK, "run", str(written), "--out", str(folder / "run"), "--address", ray_address]
            done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
            assert done.returncode == 0, done.stderr
            assert set(load(folder / "run").cells["verdict"]) == {"PASS", "KV_MISMATCH"}
            return look(prometheus)


def until_up(prometheus: check.Prometheus, jobs: set[str]) -> None:
    """Wait until a target of each job was scraped."""
    deadline = time.monotonic() + START_S
    while missing := jobs - {job for job, health in targets_of(prometheus).items() if "up" in health}:
        assert time.monotonic() < deadline, f"never scraped: {missing}"
        time.sleep(1.0)


def targets_of(prometheus: check.Prometheus) -> dict[str, set[str]]:
    data = prometheus.ask("targets", state="active")
    assert isinstance(data, dict)
    found: dict[str, set[str]] = {}
    for target in data["activeTargets"]:
        found.setdefault(target["scrapePool"], set()).add(target["health"])
    return found


def look(prometheus: check.Prometheus) -> Seen:
    alerts = prometheus.series('ALERTS{alertstate="firing"}', WINDOW_S)
    seen = Seen(
        answers=check.ask_all(prometheus, WINDOW_S),
        unreported=check.unreported(prometheus, WINDOW_S),
        fired={str(alert["metric"]["alertname"]) for alert in alerts},
        targets=targets_of(prometheus),
    )
    print(f"not reported: {sorted(seen.unreported)}; fired: {sorted(seen.fired)}")
    return seen


def test_every_target_is_up(seen: Seen) -> None:
    assert seen.targets == {"ray": {"up"}, "rayk-front": {"up"}}


def test_no_query_is_an_error(seen: Seen) -> None:
    assert [(a.where, a.error) for a in seen.answers if a.error] == []


def test_every_panel_has_data(seen: Seen) -> None:
    excused = ABSENT_ON_CPU | NOT_REPORTED_YET
    empty = [a.where for a in seen.answers if not a.num_series and not a.query.metrics & excused]
    assert empty == []


def test_quiet_panels_are_those_of_what_did_not_happen(seen: Seen) -> None:
    """A 0 must not hide that nothing is counted."""
    quiet = {name for a in seen.answers if a.is_quiet for name in a.query.metrics}
    assert quiet <= NEVER_HAPPENED | NOT_REPORTED_YET


def test_every_metric_is_reported(seen: Seen) -> None:
    assert seen.unreported - NEVER_HAPPENED - ABSENT_ON_CPU == NOT_REPORTED_YET


def test_a_wrong_byte_raises_the_alarm(seen: Seen) -> None:
    assert "RaykKVMismatch" in seen.fired


def test_nothing_else_raises_it(seen: Seen) -> None:
    """Engines that ended are not stalled, and a front's answers were good."""
    assert seen.fired <= {"RaykKVMismatch", "RaykErrorBudgetBurnsFast", "RaykErrorBudgetBurns"}
