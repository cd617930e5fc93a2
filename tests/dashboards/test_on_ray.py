"""A real Prometheus over a real server and a real experiment: every panel's query has data, and a wrong byte
raises the alarm. The other alerts: test_alerts_on_ray.py."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dashboards import check, tools
from dashboards.table import ABSENT_ON_CPU, ABSENT_UNDRAFTED, ABSENT_UNPACED, DASHBOARDS
from rayk import load
from tests.conftest import CheckpointFactory
from tests.dashboards.watching import complete, fired, post, run_spec, serving, targets_of, until, watched
from tests.markers import nixl, ray, slow

pytestmark = [ray, nixl, pytest.mark.timeout(900), slow]
WINDOW_S = 600.0
NEVER_HAPPENED = frozenset(
    {
        "rayk_nixl_num_failed_notifications_total",
        "rayk_nixl_num_kv_expired_reqs_total",
        "rayk_nixl_expired_requests_total",
        "rayk_nixl_staged_total",
        "rayk_num_preemptions_total",
        "rayk_engines_lost_total",
        "rayk_not_finite_requests_total",
    }
)
"""Metrics of what does not happen in these runs: panels show 0 for them."""


MODEL = "watched-qwen3"
"""A name that no other test's runs on the cluster have."""


@dataclass
class Seen:
    """What Prometheus had at the end."""

    answers: list[check.Answer]
    unreported: set[str]
    fired: dict[str, set[str]]
    planted: str
    """What the alarm says of planted faults."""
    targets: dict[str, set[str]]
    """Health of the targets of each job."""
    num_errors: float
    """Requests that ended with an error for whoever asked."""
    roles: set[str]
    """Roles that prefill1 turned in at the end: it was made a decode engine meanwhile."""


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
        "arrival": {"rate": 2.0, "process": "constant"},
        "matrix": {"faults": [[], [{"kind": "flip_bit", "request": 1, "seed": 77}]]},
        "checks": ["tokens", "kv_bytes"],
        "deadlines": {"cell_s": 300, "request_s": 200, "transfer_s": 100},
    }


@pytest.fixture(scope="module")
def seen(
    metered_address: str, checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory
) -> Seen:
    try:
        tools.need("prometheus")
    except tools.NotAvailableError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("seen")
    model = folder / MODEL
    shutil.copytree(checkpoint("qwen3"), model)
    sizes = ["--num-prefill", "2", "--num-decode", "1", "--set", "engine.prefix_caching=true"]
    tier = ["--set", "offload.host_gib=0.05", "--set", f"offload.disk_folder={folder / 'pages'}"]
    with (
        serving(model, metered_address, *sizes, *tier) as front,
        watched(metered_address, front) as prometheus,
    ):
        ask_until_step_times_are_seen(front, prometheus)
        assert post(f"{front}/engines/prefill1/role", {"role": "decode"})[0] == 200
        done = run_spec(spec_of(model), folder, metered_address)
        assert done.returncode == 0, done.stderr
        assert set(load(folder / "run").cells["verdict"]) == {"PASS", "KV_MISMATCH"}
        until(lambda: "RaykKVMismatch" in fired(prometheus, WINDOW_S, MODEL), 60.0, "no alarm")
        # The fault is counted by another process than the mismatch, whose counters Ray may report later.
        until(lambda: mismatch_alarm(prometheus)["planted"].startswith("faults"), 60.0, "no fault is told of")
        return look(prometheus)


def ask_until_step_times_are_seen(front: str, prometheus: check.Prometheus) -> None:
    """Ask eight times at least. A rate wants two scrapes that differ, while a phase's first scrape has all of
    its steps so far, and Ray's agent misses some scrapes where the machine is busy."""
    step_times = [
        check.filled_in(query.shown)
        for board in DASHBOARDS
        for panel in board.panels
        if panel.title == "Step time"
        for query in panel.queries
    ]
    assert step_times
    numbers = itertools.count()

    def seen_while_asking() -> bool:
        n = next(numbers)
        assert complete(front, [*range(3, 35), 40 + n % 50])[0] == 200
        return n >= 7 and all(prometheus.series(expr, WINDOW_S) for expr in step_times)

    until(seen_while_asking, 120.0, "no step times")


def mismatch_alarm(prometheus: check.Prometheus) -> dict[str, str]:
    """Return the annotations of the one alarm."""
    data = prometheus.ask("alerts")
    assert isinstance(data, dict)
    (alarm,) = [
        a
        for a in data["alerts"]
        if a["labels"]["alertname"] == "RaykKVMismatch" and a["labels"]["model"] == MODEL
    ]
    return alarm["annotations"]


def look(prometheus: check.Prometheus) -> Seen:
    turning = f'sum by (role) (rate(ray_rayk_turns_total{{engine="prefill1", model="{MODEL}"}}[10s])) > 0'
    turns = prometheus.series(turning, 3.0)
    targets: dict[str, set[str]] = {}

    def all_up() -> bool:
        targets.update(targets_of(prometheus))
        return all(health == {"up"} for health in targets.values())

    # Ray's agent misses a scrape now and then where the machine is busy.
    until(all_up, 60.0, "a target stays down")
    assert not prometheus.series('{otel_metric_overflow="True"}'), "Ray's agent has dropped series"
    failed = f'sum (ray_rayk_request_outcomes_total{{finish_reason="error", model="{MODEL}"}})'
    (errors,) = prometheus.series(failed, 3.0)
    seen = Seen(
        answers=check.ask_all(prometheus, WINDOW_S),
        unreported=check.unreported(prometheus, WINDOW_S),
        fired=fired(prometheus, WINDOW_S, MODEL),
        planted=mismatch_alarm(prometheus)["planted"],
        targets=targets,
        num_errors=float(errors["values"][-1][1]),  # type: ignore[index]
        roles={str(one["metric"]["role"]) for one in turns},  # type: ignore[index]
    )
    print(f"not reported: {sorted(seen.unreported)}; fired: {seen.fired}")
    return seen


def test_every_target_is_up(seen: Seen) -> None:
    assert seen.targets == {"ray": {"up"}, "rayk-front": {"up"}}


def test_no_query_is_an_error(seen: Seen) -> None:
    assert [(a.where, a.error) for a in seen.answers if a.error] == []


def test_every_panel_has_data(seen: Seen) -> None:
    may_lack = ABSENT_ON_CPU | ABSENT_UNPACED | ABSENT_UNDRAFTED
    empty = [a.where for a in seen.answers if not a.num_series and not a.query.metrics & may_lack]
    assert empty == []


def test_quiet_panels_are_those_of_what_did_not_happen(seen: Seen) -> None:
    """A 0 must not hide that nothing is counted."""
    assert {name for a in seen.answers if a.is_quiet for name in a.query.metrics} <= NEVER_HAPPENED


def test_every_metric_is_reported(seen: Seen) -> None:
    """Also those of what did not happen: they stand at 0."""
    assert seen.unreported == ABSENT_ON_CPU | ABSENT_UNPACED | ABSENT_UNDRAFTED


def test_the_request_that_read_wrong_bytes_is_the_one_error(seen: Seen) -> None:
    assert seen.num_errors == 1


def test_an_engine_is_told_of_in_the_role_that_it_has_now(seen: Seen) -> None:
    assert seen.roles == {"decode"}


def test_a_wrong_byte_raises_the_alarm_and_nothing_else_does(seen: Seen) -> None:
    """Engines that ended, or have another role, are not stalled, and a front's answers were good. One request
    in 24 failed."""
    assert seen.fired["RaykKVMismatch"] == {"decode0"}
    assert seen.planted == "faults were planted in this model meanwhile"
    assert seen.fired.keys() <= {"RaykKVMismatch", "RaykErrorBudgetBurnsFast", "RaykErrorBudgetBurns"}
