"""Alert rules: complete, valid, and each fires when it should (promtool's own tests)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import tools
from dashboards.build import FOLDER
from dashboards.check import filled_in
from dashboards.queries import requests, whole
from dashboards.table import DASHBOARDS
from tests.dashboards.watching import quicker_rules

RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}

TESTS = ("alerts_test.yml", "alerts_budget_test.yml")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    try:
        program = tools.need("promtool")
    except tools.NotAvailableError as error:
        pytest.skip(str(error))
    return subprocess.run(
        [program, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_says_how_grave_it_is_and_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"]["summary"]
    assert len(rule["annotations"]["runbook"]) > 20
    assert "\n" not in rule["annotations"]["runbook"]


def test_what_is_to_be_watched_is_watched() -> None:
    assert {
        "RaykKVMismatch",
        "RaykLeasesExpiring",
        "RaykEngineLost",
        "RaykEngineStalled",
        "RaykKVPoolFull",
        "RaykFrontErrors",
        "RaykErrorBudgetBurnsFast",
        "RaykErrorBudgetBurns",
    } == ALERTS.keys()


def test_prometheus_takes_the_settings_and_the_rules() -> None:
    checked = promtool("check", "config", "prometheus.yml")
    assert checked.returncode == 0, checked.stderr
    assert "rules found" in checked.stdout


def test_every_alert_fires_when_it_should() -> None:
    done = promtool("test", "rules", *TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_that_cannot_fire_is_found_by_the_tests(name: str, tmp_path: Path) -> None:
    broken: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    for group in broken["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == name:
                rule["expr"] = f"({rule['expr']}) > 1e9"
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(broken))
    for test in TESTS:
        (tmp_path / test).write_text((FOLDER / test).read_text())
    done = promtool("test", "rules", *(tmp_path / test for test in TESTS))
    assert done.returncode != 0
    assert name in done.stdout + done.stderr


def test_a_request_counts_once_though_every_rank_of_an_engine_counts_it(tmp_path: Path) -> None:
    """Also over the lives of an engine, whose ranks are other processes then, and in both of its roles."""
    name = "ray_rayk_nixl_num_kv_expired_reqs_total"
    lives = (("prefill", "a", 3), ("decode", "b", 2))
    series = [
        {
            "series": f'{name}{{model="m", engine="e", role="{role}", rank="{rank}", pid="{pid}"}}',
            "values": str(number + (rank == 3)),
        }
        for rank in range(4)
        for role, pid, number in lives
    ]
    once = requests("rayk_nixl_num_kv_expired_reqs_total")
    asked = [
        {"expr": filled_in(once.expr), "exp_samples": [{"labels": '{model="m", engine="e"}', "value": 7}]},
        {"expr": filled_in(whole(once).expr), "exp_samples": [{"labels": "{}", "value": 7}]},
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [test]}))
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_quicker_rules_differ_in_nothing_but_times() -> None:
    """Those that real runs are made to trip."""
    text = (FOLDER / "alerts.yml").read_text()
    given, quicker = yaml.safe_load(text), yaml.safe_load(quicker_rules(text))
    times = re.compile(r"(?<=\[)\d+[smh]|(?<=offset )\d+[smh]")
    for one, other in zip(given["groups"], quicker["groups"], strict=True):
        for rule, quick in zip(one["rules"], other["rules"], strict=True):
            assert times.sub("T", rule.pop("expr")) == times.sub("T", quick.pop("expr"))
            assert ("for" in rule) == ("for" in quick)
            assert rule.pop("for", "0s") >= "0s"
            assert quick.pop("for", "2s") == "2s"
            assert rule == quick
    assert "offset 30s" in quicker_rules(text), "of 30m"
    assert "[12s]" in quicker_rules(text), "of 30s: no shorter than some scrapes"


def test_every_query_parses(tmp_path: Path) -> None:
    """As rules, of which promtool parses every one."""
    exprs = sorted({filled_in(q.shown) for b in DASHBOARDS for p in b.panels for q in p.queries})
    rules = [{"record": f"shown:{n}", "expr": expr} for n, expr in enumerate(exprs)]
    written = tmp_path / "queries.yml"
    written.write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": rules}]}))
    checked = promtool("check", "rules", written)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(exprs)} rules found" in checked.stdout
