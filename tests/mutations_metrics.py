"""Bugs to plant in what engines report."""

from __future__ import annotations

from tests.mutation import Mutation

ENGINE = "tests/metrics/test_engine_metrics.py"
BUFFER = "tests/metrics/test_buffer.py"
HAND_OVER = f"{ENGINE}::test_a_hand_over_is_counted_as_its_rows_count_it"

METERS = (
    Mutation(
        "bytes of a transfer's first row alone are told",
        "rayk/actors/transfer_meter.py",
        "sum(r.bytes for r in rows), sum(r.num_descriptors for r in rows)",
        "rows[0].bytes, sum(r.num_descriptors for r in rows)",
        HAND_OVER,
        needs_fixtures=True,
    ),
    Mutation(
        "a reservation counts as a request's end",
        "rayk/actors/reservations.py",
        "self.leader.emit(event, ends=False)",
        "self.leader.emit(event)",
        HAND_OVER,
        needs_fixtures=True,
    ),
    Mutation(
        "gauges are told once",
        "rayk/metrics/buffer.py",
        "        for (name, labels), value in self._gauges.items():\n",
        "        told, self._gauges = self._gauges, {}\n        for (name, labels), value in told.items():\n",
        f"{BUFFER}::test_gauges_are_told_again_for_ray_forgets_them",
    ),
    Mutation(
        "a counter that others count is told anew each time",
        "rayk/metrics/buffer.py",
        " + value - self._totals.get(key, 0.0)",
        " + value",
        f"{BUFFER}::test_totals_that_others_count_are_told_as_differences",
    ),
    Mutation(
        "a window's first tokens see as much as its last",
        "rayk/engine/costs.py",
        "num_short = min(n, max(0, window - before))",
        "num_short = 0",
        f"{ENGINE}::test_tokens_of_a_window_are_counted_one_by_one",
    ),
)
