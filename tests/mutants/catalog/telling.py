"""Bugs of verdicts, measurements, reports and metrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.mutants.mutant import Catalog

TELLING = Catalog("tests")


# Verdicts.


@TELLING.twin(
    "errors beyond the bound are let through",
    "rayk.experiments.noise:excess",
    "experiments/test_logprobs.py::test_what_the_bounds_let_through",
)
def _(original, errors, bound):
    return None


@TELLING.twin(
    "whatever is wrong has no culprit",
    "rayk.experiments.culprit:name_culprit",
    "experiments/test_culprit.py::test_mistakes_in_keys",
)
def _(original, wrong, *others):
    return "something else"


# Load generation.


@TELLING.twin(
    "an event ends with the chunk that brought it",
    "rayk.bench.client:EventLines.feed",
    "bench/test_generator.py::test_events_may_be_cut_anywhere",
)
def _(original, self, received):
    self._rest = b""
    return original(self, received)


@TELLING.twin(
    "requests pass for independent of one another",
    "rayk.bench.statistics:batch_means",
    "bench/test_statistics.py::test_intervals_hold_the_truth_as_often_as_they_say",
)
def _(original, values):
    return values


@TELLING.twin(
    "a generator that is too slow is believed",
    "rayk.bench.verdict:judge",
    "bench/test_summary.py::test_what_is_held_against_a_load",
)
def _(original, load, cell, rows):
    return original(load, {**cell, "send_lag_ms_p90": 0.0, "loop_lag_ms_p90": 0.0}, rows)


# Comparisons and reports.


@TELLING.twin(
    "an interval is an order statistic too narrow",
    "rayk.reports.intervals:median_interval",
    "reports/test_paired.py::test_an_interval_holds_the_median_as_often_as_it_says",
)
def _(original, values, confidence):
    return original(sorted(values)[1:-1], confidence)


@TELLING.twin(
    "the queue passes for prefill",
    "rayk.reports.stages:limit_shares",
    "reports/test_report_numbers.py::test_shares_name_the_limit",
)
def _(original, parts):
    return original(parts.assign(prefill=parts["prefill"] + parts["queue"], queue=0.0))


@TELLING.twin(
    "tables of a newer version are read",
    "rayk.reports.schema:check_schema",
    "reports/test_schema.py::test_a_newer_version_is_refused",
)
def _(original, path):
    return 0


# Metrics and dashboards.


@TELLING.twin(
    "a counter that others count is told anew each time",
    "rayk.metrics.meter:Meter.total",
    "metrics/test_meter.py::test_totals_that_others_count_are_told_as_differences",
)
def _(original, self, name, value, **labels):
    self.add(name, value, **labels)


@TELLING.twin(
    "requests that failed are counted as answered",
    "rayk.actors.deployment_metrics:report_request",
    "metrics/test_deployment_metrics.py::test_every_end_of_a_request_is_counted_and_only_whole_ones_have_times",
)
def _(original, meter, row):
    original(meter, replace(row, finish_reason="stop", error=None))


@TELLING.twin(
    "a query of what does not exist is made",
    "dashboards.queries:known",
    "dashboards/test_dashboards.py::test_a_query_of_what_does_not_exist_is_refused",
)
def _(original, name, kind, *labels):
    from rayk.metrics.registry import METRICS

    return METRICS.get(name) or next(metric for metric in METRICS.values() if metric.kind is kind)


@TELLING.twin(
    "plain lines are folded",
    "rayk.cli.plain:print_table",
    "cli/test_plain.py::test_a_terminal_gets_the_table_and_a_pipe_the_lines",
)
def _(original, console, table):
    console.print(table)


@TELLING.twin(
    "a busy machine is not told",
    "rayk.reports.trust:busy",
    "reports/test_trust.py::test_a_busy_machine_is_told",
)
def _(original, environment):
    return []


@TELLING.twin(
    "utilisation is of another dtype's peak",
    "rayk.costs.sheets:peaks_of",
    "metrics/test_engine_metrics.py::test_utilisation_is_of_a_known_devices_peak_in_its_dtype",
)
def _(original, device, dtype):
    return original(device, "bfloat16")


@TELLING.twin(
    "a push's trace has its reservation behind the prompt",
    "rayk.reports.timeline:spans_of",
    "reports/test_timeline.py::test_every_span_starts_and_lasts_as_the_table_says",
)
def _(original, request, *, is_push=False):
    return original(request)


# Costs.


TELLING.constant(
    "hiccups of the machine are fitted",
    "rayk.costs.fit:TRIMMED",
    0.0,
    "costs/test_fit.py::test_the_mean_of_noisy_steps_is_found_and_hiccups_leave_no_trace",
)
TELLING.constant(
    "what is low by chance pulls a fit down",
    "rayk.costs.fit:_WEIGHTED",
    1,
    "costs/test_fit.py::test_means_that_are_low_by_chance_do_not_pull_a_fit_down",
)
TELLING.constant(
    "a read that waited for a core counts like others",
    "rayk.planner.between:MAX_RATIO",
    1e9,
    "planner/test_between.py::test_a_read_that_waited_for_a_core_does_not_count",
)
TELLING.constant(
    "a table holds far from what was measured",
    "rayk.costs.hull:REACH",
    100,
    "costs/test_hull.py::test_what_no_measured_step_is_near_is_refused",
)


@TELLING.twin(
    "negative constants are cut off after a plain fit",
    "rayk.costs.fit:nnls",
    "costs/test_fit.py::test_nnls_is_as_good_as_the_best_set_of_terms",
)
def _(original, terms, values):
    return np.maximum(np.linalg.lstsq(terms, values, rcond=None)[0], 0)


@TELLING.twin(
    "what steps lose beside prefill steps is fitted beside decode steps",
    "rayk.planner.neighbours:_EngineTurns.busy",
    "planner/test_neighbours.py::test_planted_losses_come_out_of_records[0]",
)
def _(original, self, edges_ns, *, is_decode):
    return original(self, edges_ns, is_decode=not is_decode)


@TELLING.twin(
    "the fit takes a step that met a neighbour for a part of its time for one that met it all along",
    "rayk.planner.neighbours:_met",
    "planner/test_neighbours.py::test_planted_losses_come_out_of_records[0]",
)
def _(original, own, others, num_cores):
    met = original(own, others, num_cores)
    return [tuple((state, 1.0 / len(of)) for state, _ in of) for of in met]


# Traces, and engines that keep the times of tables.


@TELLING.twin(
    "a session's next turn waits for no answer",
    "rayk.traces.replay:Replay._pull",
    "traces/test_replay.py::test_due_times_are_those_of_the_rule",
)
def _(original, self):
    self._rows = ((number, replace(row, session=None)) for number, row in self._rows)
    original(self)


@TELLING.twin(
    "nobody takes his time between an answer and the next question",
    "rayk.traces.replay:Replay._follow",
    "traces/test_replay.py::test_due_times_are_those_of_the_rule",
)
def _(original, self, ended_ns, number, row):
    original(self, ended_ns, number, replace(row, delay_ns=0))


@TELLING.twin(
    "a paced step that begins late ends late",
    "rayk.engine.pace:StepPace._ready_ns",
    "engine/test_paced.py::test_a_late_wake_up_shortens_the_next_step",
    "engine/test_paced.py::test_what_a_host_takes_beyond_the_table_is_late_and_made_good_for",
)
def _(original, self, begin_ns, length_ns):
    return begin_ns


@TELLING.twin(
    "a paced engine that was idle has to catch up",
    "rayk.engine.pace:StepPace.resume",
    "engine/test_paced.py::test_an_idle_engine_is_not_late",
)
def _(original, self):
    pass


@TELLING.twin(
    "engine.pace is left out of account",
    "rayk.engine.pace:StepPace.__init__",
    "engine/test_paced.py::test_a_late_wake_up_shortens_the_next_step",
)
def _(original, self, costs, factor=1.0, **others):
    original(self, costs, **others)


@TELLING.twin(
    "pages of a paced engine are all alike",
    "rayk.engine.paced:PacedRank._fill_blocks",
    "engine/test_paced.py::test_real_pages_are_handed_over_and_proved[unlike layouts]",
)
def _(original, self, batch):
    pass


@TELLING.twin(
    "paced tokens do not depend on their place",
    "rayk.types.paced_tokens:PacedTokens.token",
    "engine/test_paced.py::test_tokens_of_the_rule_end_no_request",
)
def _(original, self, key, index):
    return original(self, key, 0)


# Validation.


@TELLING.twin(
    "errors have the wrong sign",
    "rayk.reports.validation:share_off",
    "planner/test_validate.py::test_costs_that_are_off_are_off_by_as_much",
)
def _(original, predicted, measured):
    return -original(predicted, measured)


@TELLING.twin(
    "a prediction is not told when requests were due",
    "rayk.planner.validate:measured_arrivals",
    "planner/test_validate.py::test_true_costs_predict_every_cell_and_its_requests_to_the_ns",
)
def _(original, cell, requests):
    return original(cell, [row | {"due_ms": 0.0} for row in requests])


@TELLING.twin(
    "a prediction's answers go on to their limit",
    "rayk.planner.validate:_length",
    "planner/test_validate.py::test_true_costs_predict_every_cell_and_its_requests_to_the_ns",
)
def _(original, row, limit):
    return limit


@TELLING.twin(
    "the spread of repeats excuses nothing",
    "rayk.reports.validation:_misses",
    "planner/test_validate.py::test_a_bound_is_missed_beyond_the_spread_only",
)
def _(original, error, spread, bound):
    return original(error, 0.0, bound)


@TELLING.twin(
    "waiting counts for no queue",
    "rayk.reports.achieved:metrics_of",
    "reports/test_achieved.py::test_the_queue_is_littles",
)
def _(original, requests, slo=None):
    return original(requests, slo) | {"mean_waiting": 0.0}


@TELLING.twin(
    "cells beside which others computed are not measured again",
    "jobs.quiet_machine:QuietProgress.busy",
    "jobs/test_plan_validation.py::test_cells_wait_for_a_quiet_machine_and_busy_ones_are_noted",
)
def _(original, self):
    return {}
