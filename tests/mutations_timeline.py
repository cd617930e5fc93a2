"""Bugs to plant in what Ray's dashboard and a run's trace show."""

from __future__ import annotations

from tests.mutation import Mutation

NAMES = "tests/actors/test_naming.py"
PHASES = "tests/actors/test_phases.py"
TIMELINE = "tests/reports/test_timeline.py"
OVERLAP = "tests/experiments/test_overlap_on_ray.py"

TIMES = (
    Mutation(
        "a push's trace reserves after the prompt",
        "rayk/reports/timeline.py",
        'order.insert(order.index("lookup"), "reserve")',
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
        "arrows are numbered in words",
        "rayk/reports/timeline.py",
        '{"id": flow_id}',
        '{"id": f"r{flow_id}"}',
        f"{TIMELINE}::test_the_file_is_one_that_perfetto_takes",
    ),
    Mutation(
        "all arrows are one",
        "rayk/reports/timeline.py",
        "next(flow_ids)",
        "1",
        f"{TIMELINE}::test_the_file_is_one_that_perfetto_takes",
    ),
    Mutation(
        "cells are in row 0, which Perfetto has for another",
        "rayk/reports/timeline.py",
        "self.of_cells: Place = (1, 1)",
        "self.of_cells: Place = (1, 0)",
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
    Mutation(
        "a front that is started again has the name of the one before",
        "rayk/actors/naming.py",
        """    again = f"#{num_before}" if num_before else ""
""",
        """    again = ""
""",
        f"{NAMES}::test_fronts_are_named_after_their_server_and_no_two_alike",
    ),
    Mutation(
        "a worker has a coroutine",
        "rayk/actors/worker.py",
        "    def check_model(self, model: str) -> None:",
        "    async def check_model(self, model: str) -> None:",
        f"{OVERLAP}::test_requests_of_a_cell_decode_at_the_same_time",
        needs_fixtures=True,
    ),
)
