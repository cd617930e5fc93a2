"""Every alert of alerts.yml fires in a run made to trip it, under a real Prometheus.

Times are made shorter (watching.quicker_rules); alerts_test.yml has the real ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import check, tools
from dashboards.build import FOLDER
from rayk import load
from rayk.actors.fleets import find_fleet, fleet_names, joined
from tests.conftest import CheckpointFactory
from tests.dashboards.watching import (
    complete,
    fired,
    model_of,
    post,
    quicker_rules,
    run_spec,
    serving,
    targets_of,
    until,
    watched,
)
from tests.markers import nixl, ray, slow

pytestmark = [slow, ray, nixl, pytest.mark.timeout(900)]
WINDOW_S = 600.0
RULES = FOLDER / "alerts.yml"
DOWN = "RaykTargetDown"
ALERTS = sorted(
    rule["alert"]
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
)


@dataclass
class Tripped:
    """What was seen on the way."""

    quiet: dict[str, set[str]] = field(default_factory=dict)
    """What fired before anything was wrong, a change of roles included."""
    by_server: dict[str, set[str]] = field(default_factory=dict)
    """What fired when an engine of the server was killed."""
    all: dict[str, set[str]] = field(default_factory=dict)
    answers: list[tuple[int, bool]] = field(default_factory=list)
    """Those that were under way when it was: the status, and whether there was an error in the body."""
    num_front_errors: float = 0.0
    """As the front counted them."""
    roles: set[str] = field(default_factory=set)
    """Roles that the engine whose role changed turned in, by its turns."""
    verdicts: list[str] = field(default_factory=list)
    mismatch_over: bool = False
    mismatches: float = 0.0
    """Where their counter stood when the alarm was over."""
    front: str = ""
    down: set[str] = field(default_factory=set)
    """Addresses that were told to be down when the server had ended."""


def spec_of(model: Path) -> dict[str, Any]:
    """A bit flipped at each rank, of another request each; then a decode engine of which a rank stands still,
    whose requests end at their deadline, with the leases that its producer's small pool is full of."""
    return {
        "name": "tripped",
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "prompts": {"random": {"count": 16, "input_tokens": [90], "seed": 0}},
        "sampling": {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True},
        "engine": {"num_blocks": 128, "max_batch_tokens": 128, "max_seqs": 16},
        "prefill": {"tp": 1, "num_blocks": 25},
        "decode": {"tp": 2},
        "transfer": {"lease_s": 4},
        "matrix": {
            "faults": [
                [
                    {"kind": "flip_bit", "role": "decode", "rank": 0, "request": 1, "seed": 77},
                    {"kind": "flip_bit", "role": "decode", "rank": 1, "request": 3, "seed": 77},
                ],
                [{"kind": "stop", "point": "decode", "role": "decode", "rank": 1, "step": 3}],
            ]
        },
        "checks": ["tokens", "kv_bytes"],
        "deadlines": {"cell_s": 120, "request_s": 60, "transfer_s": 25},
    }


@contextmanager
def long_answers(url: str, answers: list[tuple[int, bool]], number: int) -> Iterator[None]:
    """Long answers, half of them streams, from before the block until they end."""
    body = {"model": model_of(url), "prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True}

    def ask(streams: bool) -> None:
        status, told = post(f"{url}/v1/completions", {**body, "stream": streams})
        answers.append((status, b'"error"' in told))

    # Two of each kind follow each other: engines take them in turns.
    threads = [threading.Thread(target=ask, args=(bool(n // 2 % 2),)) for n in range(number)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    yield
    for thread in threads:
        thread.join(120)


def pids_of(address: str) -> dict[str, list[int]]:
    """Of the ranks of the server's engines."""
    import ray as ray_

    with joined(address):
        (name,) = fleet_names()
        found: dict[str, list[int]] = ray_.get(find_fleet(name).pids.remote(), timeout=60)
    return found


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
            return json.load(answer)["status"] == "ready"
    except OSError:
        return False


def change_role(url: str, prometheus: check.Prometheus, seen: Tripped) -> None:
    """prefill1 decodes from now on."""
    assert post(f"{url}/engines/prefill1/role", {"role": "decode"})[0] == 200
    time.sleep(18.0)  # longer than the window of turns and what it takes to fire
    turns = prometheus.series('sum by (role) (rate(ray_rayk_turns_total{engine="prefill1"}[8s])) > 0', 3.0)
    seen.roles = {str(one["metric"]["role"]) for one in turns}  # type: ignore[index]
    seen.quiet = fired(prometheus, WINDOW_S)


def kill_an_engine(url: str, address: str, prometheus: check.Prometheus, seen: Tripped) -> None:
    """While it answers."""
    decode = [pids for name, pids in pids_of(address).items() if name == "decode0"]
    with long_answers(url, seen.answers, 8):
        os.kill(decode[0][0], signal.SIGKILL)
    wanted = {"RaykEngineLost", "RaykFrontErrors"}
    until(lambda: wanted <= fired(prometheus, WINDOW_S).keys(), 60.0, f"never: {wanted}")
    seen.by_server = fired(prometheus, WINDOW_S)
    (counted,) = prometheus.series(
        'sum (rayk_front_requests_total{path="/v1/completions", status=~"5.."})', 3.0
    )
    seen.num_front_errors = float(counted["values"][-1][1])  # type: ignore[index]
    until(lambda: is_ready(url), 120.0)


def run_into_it(model: Path, address: str, folder: Path, prometheus: check.Prometheus, seen: Tripped) -> None:
    """The experiment; then the mismatch has been long enough ago."""
    done = run_spec(spec_of(model), folder, address)
    assert (folder / "run" / "cells.parquet").is_file(), done.stderr
    seen.verdicts = list(load(folder / "run").cells["verdict"])
    wanted = {*ALERTS} - {DOWN}
    until(lambda: fired(prometheus, WINDOW_S).keys() >= wanted, 60.0, str(fired(prometheus, WINDOW_S)))
    seen.all = fired(prometheus, WINDOW_S)
    until(lambda: "RaykKVMismatch" not in prometheus.firing(), 120.0)
    seen.mismatch_over = True
    (counted,) = prometheus.series('sum (ray_rayk_nixl_failed_requests_total{reason="KV_MISMATCH"})', 5.0)
    seen.mismatches = float(counted["values"][-1][1])  # type: ignore[index]


def end_of_server(url: str, prometheus: check.Prometheus, seen: Tripped) -> None:
    """It has ended: nobody answers where it listened."""

    def missed() -> set[str]:
        alarms = prometheus.series(f'ALERTS{{alertname="{DOWN}", alertstate="firing"}}', 10.0)
        return {str(alarm["metric"]["instance"]) for alarm in alarms}  # type: ignore[index]

    until(lambda: bool(missed()), 60.0, "nobody misses it")
    seen.down = missed()
    seen.front = url.removeprefix("http://")
    seen.all |= {DOWN: {""}}


@pytest.fixture(scope="module")
def tripped(
    metered_address: str, checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory
) -> Tripped:
    try:
        tools.need("prometheus")
    except tools.NotAvailableError as error:
        pytest.skip(str(error))
    model, folder = checkpoint("qwen3"), tmp_path_factory.mktemp("tripped")
    rules, seen = folder / "alerts.yml", Tripped()
    rules.write_text(quicker_rules(RULES.read_text()))
    sizes = ["--num-prefill", "2", "--num-decode", "1", "--failure-policy", "fail"]
    shutil.copytree(model, folder / "tripped")  # a model of its own: the server has a decode0 that turns
    with ExitStack() as server:
        url = server.enter_context(serving(model, metered_address, *sizes))
        with watched(metered_address, url, "--rules", str(rules)) as prometheus:
            for n in range(6):
                assert complete(url, [*range(3, 35), 40 + n])[0] == 200
            change_role(url, prometheus, seen)
            kill_an_engine(url, metered_address, prometheus, seen)
            run_into_it(folder / "tripped", metered_address, folder, prometheus, seen)
            assert targets_of(prometheus) == {"ray": {"up"}, "rayk-front": {"up"}}
            server.close()
            end_of_server(url, prometheus, seen)
    print(seen)
    return seen


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_fires(tripped: Tripped, name: str) -> None:
    assert name in tripped.all


def test_a_change_of_roles_raises_nothing_and_is_told(tripped: Tripped) -> None:
    assert tripped.quiet == {}
    assert tripped.roles == {"decode"}


def test_an_engine_that_a_server_replaces_is_lost_and_not_stalled(tripped: Tripped) -> None:
    assert tripped.by_server["RaykEngineLost"] == {"decode0"}
    assert "RaykEngineStalled" not in tripped.by_server


def test_streams_that_broke_off_are_errors_of_the_front(tripped: Tripped) -> None:
    """They began with 200."""
    assert (200, True) in tripped.answers
    assert (503, True) in tripped.answers
    assert tripped.num_front_errors == sum(is_error for _, is_error in tripped.answers)


def test_alerts_name_the_engines_that_are_the_matter(tripped: Tripped) -> None:
    assert tripped.verdicts[0] == "KV_MISMATCH"
    assert tripped.all["RaykKVMismatch"] == {"decode0"}
    assert tripped.all["RaykEngineStalled"] == {"decode0"}
    assert tripped.all["RaykKVPoolFull"] == {"prefill0"}
    assert tripped.all["RaykLeasesExpiring"] == {"prefill0"}


def test_the_alarm_of_a_mismatch_ends_and_its_counter_stays(tripped: Tripped) -> None:
    assert tripped.mismatch_over
    assert tripped.mismatches == 2, "requests, though either rank saw one"


def test_a_server_that_is_gone_is_missed(tripped: Tripped) -> None:
    assert tripped.down == {tripped.front}
    assert DOWN not in {*tripped.quiet, *tripped.by_server}
