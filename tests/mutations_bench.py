"""Bugs to plant in the load generator; see mutations.py."""

from __future__ import annotations

from tests.mutation import Mutation

SUMMARY = "tests/bench/test_summary.py"
GENERATOR = "tests/bench/test_generator.py"
STATISTICS = "tests/bench/test_statistics.py"
ARRIVALS = "tests/bench/test_arrivals.py"

BENCH = (
    Mutation(
        "latency counts from sending",
        "rayk/bench/rows.py",
        '"ttft_ms": (times[0] - seen.due_ns)',
        '"ttft_ms": (times[0] - seen.sent_ns)',
        f"{SUMMARY}::test_rows_count_from_the_due_time",
    ),
    Mutation(
        "the schedule follows the server",
        "rayk/bench/generator.py",
        "group.create_task(one(seen))",
        "await one(seen)",
        f"{GENERATOR}::test_an_open_load_does_not_wait_for_answers",
    ),
    Mutation(
        "chunks pass for tokens",
        "rayk/bench/client.py",
        "            return sum(self.chunk_tokens)\n",
        "            return len(self.chunk_tokens)\n",
        f"{GENERATOR}::test_times_are_those_of_the_server_and_tokens_are_counted_by_it",
    ),
    Mutation(
        "the role of a chat is its first token",
        "rayk/bench/client.py",
        "if token_ids or (token_ids is None and text):",
        "if token_ids or token_ids is None:",
        f"{GENERATOR}::test_chat_starts_with_the_first_text_and_not_with_the_role",
    ),
    Mutation(
        "one more in flight",
        "rayk/bench/generator.py",
        "min(load.concurrency or 1, len(planned))",
        "min((load.concurrency or 1) + 1, len(planned))",
        f"{GENERATOR}::test_a_closed_load_has_so_many_in_flight_and_no_more",
    ),
    Mutation(
        "an event ends with its chunk",
        "rayk/bench/client.py",
        "self._rest = lines.pop() + held",
        "self._rest = lines.pop() * 0 + held",
        f"{GENERATOR}::test_events_may_be_cut_anywhere",
    ),
    Mutation(
        "failures are left out of percentiles",
        "rayk/bench/summary.py",
        "            values.append(math.inf)\n",
        "            continue\n",
        f"{SUMMARY}::test_failures_may_be_allowed_and_still_are_not_good",
    ),
    Mutation(
        "tokens of the warm-up count",
        "rayk/bench/summary.py",
        "strict=True) if begin_ns < at <= end_ns)",
        "strict=True) if at <= end_ns)",
        f"{SUMMARY}::test_a_steady_load_is_valid_and_its_numbers_are_those_of_its_requests",
    ),
    Mutation(
        "what is not known is good",
        "rayk/bench/rows.py",
        "if worst is None or worst > limit_ms:",
        "if worst is not None and worst > limit_ms:",
        f"{SUMMARY}::test_what_is_not_known_is_not_good",
    ),
    Mutation(
        "every percentile is given",
        "rayk/bench/statistics.py",
        "return (low, high) if low >= 1 and high <= count else None",
        "return max(low, 1), min(high, count)",
        f"{STATISTICS}::test_percentiles_need_a_sample_that_supports_them",
    ),
    Mutation(
        "alike batches pass for certainty",
        "rayk/bench/statistics.py",
        "half = _t(len(means)) * max(_error(means), _error(data))",
        "half = _t(len(means)) * _error(means)",
        f"{STATISTICS}::test_one_exceedance_in_every_batch_does_not_pass_for_certainty",
    ),
    Mutation(
        "requests pass for independent",
        "rayk/bench/statistics.py",
        "    count = num_batches(len(values))\n    means = _means(values, count)\n    while",
        "    count = len(values)\n    means = values\n    while False and",
        f"{STATISTICS}::test_intervals_hold_the_truth_as_often_as_they_say",
    ),
    Mutation(
        "bursts have the wrong mean",
        "rayk/sched/arrivals.py",
        "draw.gamma(burstiness, 1.0 / burstiness, num_gaps)",
        "draw.gamma(burstiness, 1.0, num_gaps)",
        f"{ARRIVALS}::test_gaps_have_the_mean_and_deviation_of_their_process",
    ),
    Mutation(
        "a trace's blocks belong to one request",
        "rayk/bench/trace.py",
        "[seed, 2, hash_id]",
        "[seed, 2, hash_id, index]",
        f"{ARRIVALS}::test_a_trace_is_sent_as_it_was_recorded",
    ),
    Mutation(
        "a slow generator is believed",
        "rayk/bench/verdict.py",
        "verdict = INVALID if invalid else NOISY if noisy else VALID",
        "verdict = NOISY if invalid or noisy else VALID",
        f"{SUMMARY}::test_what_is_held_against_a_load",
    ),
)
