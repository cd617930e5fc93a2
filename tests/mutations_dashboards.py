"""Bugs in what makes, checks and starts dashboards."""

from __future__ import annotations

from tests.mutation import Mutation

BOARDS = "tests/dashboards/test_dashboards.py"
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
