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
        "a request counts once per rank",
        "dashboards/queries.py",
        'return _aggregated("max", f"sum by ({ranks})',
        'return _aggregated("sum", f"sum by ({ranks})',
        f"{ALERTS}::test_a_request_counts_once_though_every_rank_of_an_engine_counts_it",
    ),
    Mutation(
        "the alarm of a mismatch never ends",
        "dashboards/alerts.yml",
        "(ray_rayk_kv_mismatches_total offset 30m)",
        "(ray_rayk_kv_mismatches_total) * 0",
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
