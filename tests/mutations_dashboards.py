"""Bugs in what makes, checks and starts dashboards."""

from __future__ import annotations

from tests.mutation import Mutation

BOARDS = "tests/dashboards/test_dashboards.py"
ALERTS = "tests/dashboards/test_alerts.py"
RULES = f"{ALERTS}::test_every_alert_fires_when_it_should"
START = "tests/dashboards/test_start.py"

DASHBOARDS = (
    Mutation(
        "a rate of any kind of metric is taken",
        "dashboards/queries.py",
        "if metric.kind is not kind:",
        "if False:",
        f"{BOARDS}::test_a_query_of_what_does_not_exist_is_refused",
    ),
    Mutation(
        "label values are not looked up",
        "dashboards/queries.py",
        "bare not in LABEL_VALUES[label]",
        "not bare",
        f"{BOARDS}::test_a_query_of_what_does_not_exist_is_refused",
    ),
    Mutation(
        "stale dashboards pass",
        "dashboards/build.py",
        "return int(bool(stale))",
        "return 0",
        f"{BOARDS}::test_a_stale_file_is_noticed",
    ),
    Mutation(
        "wrong requests are those that one rank saw",
        "dashboards/overview.py",
        'total("rayk_nixl_failed_requests_total", reason="KV_MISMATCH")',
        'total("rayk_kv_mismatches_total", rank="0")',
        f"{ALERTS}::test_wrong_requests_add_up_over_ranks_and_lives_of_engines_and_not_over_models",
    ),
    Mutation(
        "requests that failed are those that failed at every rank",
        "rayk/actors/receiving.py",
        "mismatch or next((o.error for o in outcomes if o.error is not None), None)",
        "mismatch if all(o.error for o in outcomes) else None",
        "tests/metrics/test_transfer_requests.py::test_errors_of_two_requests_at_two_ranks_are_two_requests",
        needs_fixtures=True,
    ),
    Mutation(
        "every rank begins the counters of requests",
        "rayk/metrics/registry.py",
        "is_ours and (is_leader or not metric.by_leader)",
        "is_ours",
        "tests/metrics/test_registry.py::"
        "test_what_begins_at_zero_is_every_counter_of_a_kind_with_every_value_of_its_labels",
    ),
    Mutation(
        "engines of two models are added up",
        "dashboards/queries.py",
        'return "engine" not in labels or "model" in labels or SCRAPED in labels',
        "return bool(labels) or True",
        f"{BOARDS}::test_a_query_of_what_does_not_exist_is_refused",
    ),
    Mutation(
        "ranks of an earlier life are skewed",
        "dashboards/queries.py",
        "{alive.expr} > 0)",
        "{alive.expr} >= 0)",
        f"{ALERTS}::test_skew_is_that_of_ranks_that_turn_now",
    ),
    Mutation(
        "an address that nobody uses is down",
        "dashboards/alerts.yml",
        "[24h]) == 1",
        "[24h]) >= 0",
        RULES,
    ),
    Mutation(
        "the alarm of a mismatch never ends",
        "dashboards/alerts.yml",
        '{reason="KV_MISMATCH"} offset 30m)',
        '{reason="KV_MISMATCH"}) * 0',
        RULES,
    ),
    Mutation(
        "an engine stands still when its cell is over",
        "dashboards/alerts.yml",
        "(min_over_time(ray_rayk_engine_up[30s]) and ray_rayk_engine_up)",
        "(last_over_time(ray_rayk_engine_up[5m]))",
        RULES,
    ),
    Mutation(
        "an engine stands still in its old role",
        "dashboards/alerts.yml",
        "(increase(ray_rayk_turns_total[30s]))",
        '(increase(ray_rayk_turns_total{role!="decode"}[30s]))',
        RULES,
    ),
    Mutation(
        "an engine that is lost a second time raises nothing",
        "dashboards/alerts.yml",
        "- (sum by (model, engine) (ray_rayk_engines_lost_total offset 10m)",
        "- (sum by (model, engine) (ray_rayk_engines_lost_total)",
        RULES,
    ),
    Mutation(
        "a dashboard has a value that Grafana does not take",
        "dashboards/rayk-ranks.json",
        '"graphTooltip": 1,',
        '"graphTooltip": 3,',
        "tests/dashboards/test_grafana_types.py::test_every_value_is_of_the_type_that_grafana_declares",
    ),
    Mutation(
        "a package that was fetched stays",
        "dashboards/tools.py",
        "package.unlink()",
        "package.touch()",
        f"{START}::test_a_fetched_package_is_unpacked_and_found",
    ),
    Mutation(
        "fronts are added to the listed ones",
        "dashboards/start.py",
        'del front["file_sd_configs"]',
        'front["file_sd_configs"] = front["file_sd_configs"]',
        f"{START}::test_settings_name_files_wholly_and_take_fronts",
    ),
)
