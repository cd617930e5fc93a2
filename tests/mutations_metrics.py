"""Bugs to plant in what engines report."""

from __future__ import annotations

from tests.mutation import Mutation

ENGINE = "tests/metrics/test_engine_metrics.py"
BUFFER = "tests/metrics/test_buffer.py"
OUTCOMES = "tests/metrics/test_outcomes.py"
WHOLE = "tests/metrics/test_engine_meter.py"
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
        "a counter is there only when it has counted",
        "rayk/metrics/buffer.py",
        "if value > 0 or (name, labels) not in self._told:",
        "if value > 0:",
        f"{BUFFER}::test_a_counter_is_there_before_it_counts_and_is_told_once",
    ),
    Mutation(
        "a new role is not told to the sink",
        "rayk/metrics/buffer.py",
        "self._sink.relabel(**labels)",
        "del labels",
        f"{BUFFER}::test_what_is_told_of_a_new_role_has_its_label_and_the_old_one_keeps_what_it_had",
    ),
    Mutation(
        "requests that failed are counted as answered",
        "rayk/actors/request_meter.py",
        'finish_reason=row.finish_reason or "abort")',
        'finish_reason="stop")',
        f"{WHOLE}::test_every_end_of_a_request_is_counted_and_only_whole_ones_have_times",
    ),
    Mutation(
        "requests that their engine's death ended are those of clients who went",
        "rayk/actors/router.py",
        "        except RaykError as error:\n            note_failure(row, error)\n            if isinstance",
        "        except RaykError as error:\n            if isinstance",
        f"{OUTCOMES}::test_a_request_is_counted_by_how_it_ended_for_its_client",
    ),
    Mutation(
        "what cannot run is the server's error",
        "rayk/actors/router.py",
        'row.finish_reason = "refused"',
        "pass",
        f"{OUTCOMES}::test_a_full_waiting_room_refuses",
    ),
    Mutation(
        "an engine that its cell ends is lost",
        "rayk/actors/engine_meter.py",
        "None if self.is_over else self._count(engine.name)",
        "self._count(engine.name)",
        f"{WHOLE}::test_an_engine_is_lost_once_per_life_and_not_when_its_cell_ends_it",
    ),
    Mutation(
        "an engine is told of in its old role, too",
        "rayk/actors/engine_meter.py",
        "for engine, role in self._told - now.keys():",
        "for engine, role in self._told & now.keys():",
        f"{WHOLE}::test_engines_are_told_of_as_long_as_somebody_answers_for_them",
    ),
    Mutation(
        "a stream that broke off counts as answered",
        "rayk/serve/replies.py",
        'fate["status"] = told.status',
        "del fate",
        "tests/serve/test_guard.py::test_an_error_behind_the_first_token_is_an_event_and_no_done",
        needs_fixtures=True,
    ),
    Mutation(
        "utilisation is of the other peak",
        "rayk/engine/metering.py",
        "rates[0] / self._peaks.flops_per_s",
        "rates[0] / self._peaks.bytes_per_s",
        f"{ENGINE}::test_utilisation_is_of_a_known_devices_peak_in_its_dtype",
        needs_fixtures=True,
    ),
    Mutation(
        "a window's first tokens see as much as its last",
        "rayk/engine/costs.py",
        "num_short = min(n, max(0, window - before))",
        "num_short = 0",
        f"{ENGINE}::test_tokens_of_a_window_are_counted_one_by_one",
    ),
    Mutation(
        "a server tells of no gap between tokens",
        "rayk/actors/request_meter.py",
        'sink.observe_all("rayk_itl_seconds", gaps)',
        "del gaps",
        f"{OUTCOMES}::test_a_server_alone_tells_of_each_gap_between_its_tokens",
    ),
    Mutation(
        "a border belongs to what is above it",
        "rayk/metrics/buffer.py",
        "bisect_left(borders, value)",
        "__import__('bisect').bisect_right(borders, value)",
        f"{BUFFER}::test_a_folded_histogram_has_the_buckets_that_prometheus_counts",
    ),
    Mutation(
        "what was folded is told again",
        "rayk/metrics/buffer.py",
        "folded.counts, folded.total, folded.is_told = [0] * len(folded.counts), 0.0, True",
        "folded.is_told = True",
        f"{BUFFER}::test_folded_observations_cost_one_call_a_flush",
    ),
    Mutation(
        "buckets are told without those below them",
        "rayk/actors/ray_metrics.py",
        "num_below += number",
        "num_below = number",
        "tests/metrics/test_ray_sink.py::test_a_folded_histogram_is_prometheus_own_by_name_and_number",
    ),
    Mutation(
        "steps are told again at each flush",
        "rayk/engine/metering.py",
        "    values.clear()\n",
        "",
        HAND_OVER,
        needs_fixtures=True,
    ),
    Mutation(
        "of every dtype the 16-bit peak is taken",
        "rayk/engine/costs.py",
        '"float32": single',
        '"float32": half',
        f"{ENGINE}::test_utilisation_is_of_a_known_devices_peak_in_its_dtype",
        needs_fixtures=True,
    ),
    Mutation(
        "who looks at a server is work of it",
        "rayk/serve/metrics.py",
        'LOOKING = ("/metrics", "/health")',
        "LOOKING = ()",
        "tests/serve/test_guard.py::test_health_and_metrics_say_how_it_is",
        needs_fixtures=True,
    ),
)
