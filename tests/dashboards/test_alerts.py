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
from dashboards.table import DASHBOARDS
from tests.dashboards.watching import quicker_rules
from tests.markers import one_per

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
        "RaykNotFinite",
        "RaykLeasesExpiring",
        "RaykEngineLost",
        "RaykHostTierLost",
        "RaykEngineStalled",
        "RaykTargetDown",
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


@one_per()
@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_that_cannot_fire_is_found_by_the_tests(name: str, tmp_path: Path) -> None:
    """By those that name it: the others, which take longest, are left out."""
    broken: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    for group in broken["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == name:
                rule["expr"] = f"({rule['expr']}) > 1e9"
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(broken))
    for test in TESTS:
        told: dict[str, Any] = yaml.safe_load((FOLDER / test).read_text())
        told["tests"] = [group for group in told["tests"] if name in yaml.safe_dump(group)]
        (tmp_path / test).write_text(yaml.safe_dump(told))
    done = promtool("test", "rules", *(tmp_path / test for test in TESTS))
    assert done.returncode != 0
    assert name in done.stdout + done.stderr


def evaluate(tmp_path: Path, series: dict[str, str], asked: dict[str, dict[str, float]], at: str) -> None:
    """Expressions over series that are sampled every 5 s. `asked`: labels and values of what is to come of
    each."""
    expected = [
        {
            "expr": filled_in(expr),
            "eval_time": at,
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for expr, samples in asked.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "5s", "input_series": given, "promql_expr_test": expected}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [test]}))
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def shown(uid: str, title: str) -> list[str]:
    """A panel's expressions."""
    (panel,) = (p for board in DASHBOARDS if board.uid == uid for p in board.panels if p.title == title)
    return [query.shown for query in panel.queries]


def test_wrong_requests_add_up_over_ranks_and_lives_of_engines_and_not_over_models(tmp_path: Path) -> None:
    """Of `m`, one was wrong at rank 0 and one at rank 1; then the engine was formed again, with one more."""
    failed, at_ranks = "ray_rayk_nixl_failed_requests_total", "ray_rayk_kv_mismatches_total"
    mismatch = 'engine="decode0", role="decode", rank="0", reason="KV_MISMATCH"'
    series = {
        f'{failed}{{model="m", {mismatch}, WorkerId="a"}}': "2x20",
        f'{failed}{{model="m", {mismatch}, WorkerId="b"}}': "1x20",
        f'{failed}{{model="m", engine="decode0", role="decode", rank="0", reason="TIMEOUT"}}': "8x20",
        f'{failed}{{model="other", {mismatch}, WorkerId="c"}}': "1x20",
        f'{at_ranks}{{model="m", engine="decode0", role="decode", rank="0", WorkerId="a"}}': "1x20",
        f'{at_ranks}{{model="m", engine="decode0", role="decode", rank="1", WorkerId="d"}}': "1x20",
        f'{at_ranks}{{model="m", engine="decode0", role="decode", rank="0", WorkerId="b"}}': "1x20",
    }
    engines, ranks = shown("rayk-transfers", "Digests that differed")
    asked = {
        shown("rayk-overview", "KV mismatches")[0]: {"{}": 4.0},
        shown("rayk-overview", "Failed transfers")[0]: {"{}": 12.0},
        engines: {'{model="m", engine="decode0"}': 3.0, '{model="other", engine="decode0"}': 1.0},
        ranks: {f'{{model="m", engine="decode0", rank="{r}"}}': n for r, n in (("0", 2.0), ("1", 1.0))},
    }
    evaluate(tmp_path, series, asked, "1m")


def test_skew_is_that_of_ranks_that_turn_now(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait 0.3 s and 0.1 s a second; 2 and 3 were those of a life at TP 4, whose counters stay,
    as do those that 0 and 1 had then. Of another model's engine of that name, both wait as long."""
    waits, turns = "ray_rayk_collective_seconds_total", "ray_rayk_turns_total"
    of = 'engine="decode0", role="decode"'
    series = {}
    for rank, (wait, rate) in enumerate([(5, 1.5), (9, 0.5)]):
        series[f'{waits}{{model="m", {of}, rank="{rank}", WorkerId="new"}}'] = f"0+{rate}x40"
        series[f'{waits}{{model="m", {of}, rank="{rank}", WorkerId="old"}}'] = f"{wait}x40"
        series[f'{waits}{{model="even", {of}, rank="{rank}"}}'] = "0+2x40"
        for model in ("m", "even"):
            series[f'{turns}{{model="{model}", {of}, rank="{rank}"}}'] = "0+100x40"
    for rank, wait in ((2, 90), (3, 1)):
        series[f'{waits}{{model="m", {of}, rank="{rank}"}}'] = f"{wait}x40"
        series[f'{turns}{{model="m", {of}, rank="{rank}"}}'] = "700x40"
    (skew,) = shown("rayk-ranks", "Skew")
    expected = {'{model="m", engine="decode0"}': 0.2, '{model="even", engine="decode0"}': 0.0}
    evaluate(tmp_path, series, {f"round({skew}, 0.001)": expected}, "2m")


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
