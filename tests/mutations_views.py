"""Bugs to plant in what shows results: exports, versions of tables, the table of engines."""

from __future__ import annotations

from tests.mutation import Mutation

EXPORTS = "tests/reports/test_exports.py"
SCHEMA = "tests/reports/test_schema.py"
COLUMNS = "tests/reports/test_columns.py"
TOP = "tests/cli/test_top.py"
PLAIN = "tests/cli/test_plain.py"

VIEWS = (
    Mutation(
        "aiperf's latencies count from when requests were due",
        "rayk/reports/aiperf.py",
        "    lag = send_lag_ms(rows)\n",
        "    lag = send_lag_ms(rows) * 0.0\n",
        f"{EXPORTS}::test_a_load_as_aiperf_tells_it",
    ),
    Mutation(
        "exports measure failed requests",
        "rayk/reports/export.py",
        '(rows["error"].isna() & rows["e2e_ms"].notna())',
        'rows["e2e_ms"].notna()',
        f"{EXPORTS}::test_failures_are_told_and_not_measured",
    ),
    Mutation(
        "repeats pass for one stretch of time",
        "rayk/reports/export.py",
        'self.answered.groupby("repeat")',
        'self.answered.groupby("cell_id")',
        f"{EXPORTS}::test_failures_are_told_and_not_measured",
    ),
    Mutation(
        "llm-d is told seconds for milliseconds",
        "rayk/reports/llmd.py",
        '"request_latency": _statistics("ms", numbers(rows["e2e_ms"])),',
        '"request_latency": _statistics("s", numbers(rows["e2e_ms"])),',
        f"{EXPORTS}::test_a_runs_cells_as_llmd_tells_them",
    ),
    Mutation(
        "tables of a newer version are read",
        "rayk/reports/schema.py",
        "    if version > SCHEMA_VERSION:\n",
        "    if version > SCHEMA_VERSION + 1:\n",
        f"{SCHEMA}::test_a_newer_version_is_refused",
    ),
    Mutation(
        "tables do not name their version",
        "rayk/reports/writer.py",
        "pq.write_table(stamped(self._tables[name]), path)",
        "pq.write_table(self._tables[name], path)",
        f"{SCHEMA}::test_every_table_names_its_version",
    ),
    Mutation(
        "a column is told in a wrong unit",
        "rayk/reports/fields.py",
        'Field("post_ms", FLOAT, "ms",',
        'Field("post_ms", FLOAT, "us",',
        f"{COLUMNS}::test_units_are_those_that_names_end_in",
    ),
    Mutation(
        "rates go over the death of an engine",
        "rayk/cli/top.py",
        'before is None or before["epoch"] != now["epoch"] or seconds <= 0',
        "before is None or seconds <= 0",
        f"{TOP}::test_an_engine_that_was_formed_again_has_no_rate_yet",
    ),
    Mutation(
        "the null block counts as used",
        "rayk/cli/top.py",
        "100 * (1 - free / (total - 1))",
        "100 * (1 - free / total)",
        f"{TOP}::test_once_prints_a_line_per_engine",
    ),
    Mutation(
        "plain lines are folded",
        "rayk/cli/plain.py",
        "    if console.is_terminal:\n",
        "    if True:\n",
        f"{PLAIN}::test_a_terminal_gets_the_table_and_a_pipe_the_lines",
    ),
)
