"""Bugs to plant in what Ray's dashboard and a run's trace show."""

from __future__ import annotations

from tests.mutation import Mutation

NAMES = "tests/actors/test_naming.py"
PHASES = "tests/actors/test_phases.py"
TIMELINE = "tests/reports/test_timeline.py"

TIMES = (
    Mutation(
        "a push's trace reserves after the prompt",
        "rayk/reports/timeline.py",
        'order.insert(order.index("prefill"), "reserve")',
        'order.insert(order.index("read"), "reserve")',
        f"{TIMELINE}::test_every_span_starts_and_lasts_as_the_table_says",
    ),
    Mutation(
        "a repeat's trace begins before the one ahead of it ends",
        "rayk/reports/timeline.py",
        "begin_ns = end_ns + GAP_NS",
        "begin_ns = end_ns - GAP_NS",
        f"{TIMELINE}::test_the_file_is_one_that_perfetto_takes",
    ),
    Mutation(
        "a request that was tried again decodes too early",
        "rayk/reports/timeline.py",
        "end_ns = max(end_ns, e2e - length)",
        "end_ns = max(end_ns, e2e - 2 * length)",
        f"{TIMELINE}::test_what_lies_between_two_attempts_is_of_no_stage",
    ),
    Mutation(
        "what arrived is still in transfer",
        "rayk/actors/phases.py",
        "if is_prefilled or has_arrived:",
        "if is_prefilled:",
        f"{PHASES}::test_phases_follow_what_the_engine_tells",
    ),
    Mutation(
        "names that are cut are the same",
        "rayk/actors/naming.py",
        "hashlib.sha256(text.encode())",
        "hashlib.sha256(text[:limit].encode())",
        f"{NAMES}::test_what_is_cut_still_differs",
    ),
)
