"""Bugs to plant in what tells where time goes: stages, limits, what moving KV took."""

from __future__ import annotations

from tests.mutation import Mutation

TIMES = "tests/actors/test_stage_times.py"
STAMPS = "tests/actors/test_stage_stamps.py"
NUMBERS = "tests/reports/test_report_numbers.py"
MEMORY = "tests/reports/test_memory.py"
GRIDS = "tests/reports/test_rates.py"
PAIRS = "tests/reports/test_tp_pairs.py"

STAGE_TIMES = (
    Mutation(
        "time at the host tier passes for time in the queue",
        "rayk/actors/flight.py",
        '("lookup", "found_ns")',
        '("prefill_queue", "found_ns")',
        f"{TIMES}::test_what_a_prompt_waits_for_the_host_tier_is_told",
    ),
    Mutation(
        "a request that is swapped out decodes meanwhile",
        "rayk/actors/flight.py",
        'at_ns - info["swap_ns"])',
        "at_ns)",
        f"{TIMES}::test_a_swapped_request_is_away_neither_computing_nor_decoding",
    ),
    Mutation(
        "what the host tier moves counts as handed over",
        "rayk/reports/columns.py",
        't.purpose == "handover"]',
        "t.purpose]",
        "tests/experiments/test_offloaded.py::test_what_the_tier_moves_is_no_hand_over",
    ),
    Mutation(
        "a cell's row has what a host tier counted in cells before",
        "rayk/experiments/offloaded.py",
        "after.get(name, 0) - before.get(name, 0)",
        "after.get(name, 0)",
        "tests/experiments/test_offloaded.py::test_counters_are_those_of_the_cell_over_all_engines_and_repeats",
    ),
    Mutation(
        "a stage that comes again forgets the first",
        "rayk/actors/stage_clock.py",
        "self._row.stage_ns.get(stage, 0) + length_ns",
        "length_ns",
        f"{TIMES}::test_what_a_failed_attempt_took_is_told_and_adds_up",
    ),
    Mutation(
        "clocks that disagree make time",
        "rayk/actors/stage_clock.py",
        "length_ns = max(0, length_ns)",
        "length_ns = abs(length_ns)",
        f"{TIMES}::test_clocks_that_disagree_make_no_time_and_lose_none",
    ),
    Mutation(
        "hosts' clocks pass for one",
        "rayk/actors/flight.py",
        'info["submitted_ns"] + offset_ns)',
        'info["submitted_ns"])',
        f"{TIMES}::test_a_pulled_request_has_every_stage",
    ),
    Mutation(
        "what an engine computes again is decoding",
        "rayk/actors/flight.py",
        'self._computes = "failure" in info',
        "self._computes = False",
        f"{TIMES}::test_a_decode_engine_that_goes_on_by_itself_computes_the_prompt",
    ),
    Mutation(
        "the ranks' last one decides when a stage ends",
        "rayk/actors/arrival_times.py",
        "max(ends.get(stage, at_ns), at_ns)",
        "at_ns",
        f"{TIMES}::test_a_stage_ends_with_its_last_rank",
    ),
    Mutation(
        "ranks on other hosts keep their clocks",
        "rayk/actors/arrival_times.py",
        "shift_ns = 0 if is_ours else",
        "shift_ns = 0 if True else",
        f"{TIMES}::test_a_rank_on_another_host_begins_with_rank_0",
    ),
    Mutation(
        "reads of one rank pass for simultaneous",
        "rayk/types/rows.py",
        "return max(ends) - min(begins)",
        "return max(row.transfer_ns for row in rows)",
        f"{TIMES}::test_reads_that_follow_one_another_take_from_the_first_post_to_the_last_byte",
    ),
    Mutation(
        "every token tells when its request was begun with",
        "rayk/engine/leader.py",
        "    state.is_told = True\n",
        "    state.is_told = False\n",
        f"{STAMPS}::test_a_request_that_is_preempted_was_begun_with_once",
        needs_fixtures=True,
    ),
    Mutation(
        "who waits for a row is begun with when it comes",
        "rayk/engine/leader.py",
        "state.first_step_ns = state.first_step_ns or time.monotonic_ns()",
        "state.first_step_ns = state.submitted_ns",
        f"{STAMPS}::test_who_waits_for_a_row_is_not_begun_with",
        needs_fixtures=True,
    ),
    Mutation(
        "the queue passes for prefill",
        "rayk/reports/stages.py",
        '_part("queue", "queue",',
        '_part("queue", "prefill",',
        f"{NUMBERS}::test_shares_name_the_limit",
    ),
    Mutation(
        "time of no stage is hidden",
        "rayk/reports/stages.py",
        '(parts["e2e_ms"] - covered).clip(lower=0.0)',
        "(0.0 * covered)",
        f"{NUMBERS}::test_what_no_stage_holds_is_told",
    ),
    Mutation(
        "failed requests have parts",
        "rayk/reports/stages.py",
        ' & requests["error"].isna()]',
        "]",
        f"{NUMBERS}::test_what_no_stage_holds_is_told",
    ),
    Mutation(
        "the slowest pair of ranks passes for all",
        "rayk/reports/moves.py",
        '.where(is_told, table["slowest_ms"])',
        '.where(~is_told, table["slowest_ms"])',
        f"{NUMBERS}::test_pairs_of_tp_sizes_cost_what_their_transfers_took",
    ),
    Mutation(
        "descriptors pass for merged",
        "rayk/reports/moves.py",
        'is_merged = bool(table["is_merged"].all())',
        'is_merged = bool(table["is_merged"].any())',
        f"{PAIRS}::test_older_tables_are_told_for_what_they_are",
    ),
    Mutation(
        "attempts that failed are counted",
        "rayk/reports/moves.py",
        'is_good=("is_good", "all")',
        'is_good=("is_good", "any")',
        f"{PAIRS}::test_only_the_attempt_that_brought_the_kv_counts",
    ),
    Mutation(
        "late ranks pass for slow ones",
        "rayk/reports/moves.py",
        '[*attempt, "consumer_rank"]',
        '[*attempt, "mode"]',
        f"{PAIRS}::test_ranks_that_begin_late_are_told_apart",
    ),
    Mutation(
        "any prompts are compared",
        "rayk/reports/tp_cost.py",
        'key = [*ALIKE, "prompt_index"]',
        "key = [*ALIKE]",
        f"{NUMBERS}::test_pairs_of_tp_sizes_cost_what_their_transfers_took",
    ),
    Mutation(
        "more ranks that read are a cost of unequal sizes",
        "rayk/reports/tp_cost.py",
        'ALIKE = ["settings", "layouts", "repeat", "decode.tp"]',
        'ALIKE = ["settings", "layouts", "repeat"]',
        f"{PAIRS}::test_what_depends_on_the_decode_size_alone_is_no_cost_of_unequal_sizes",
    ),
    Mutation(
        "cells of other settings are compared",
        "rayk/reports/tp_cost.py",
        "axes = sorted(set(axis_columns(cells)) - set(PLACES))",
        "axes = list[str]()",
        f"{PAIRS}::test_other_settings_make_no_pairs",
    ),
    Mutation(
        "chance passes for a cost",
        "rayk/reports/tp_cost.py",
        "not self.interval[0] <= 0 <= self.interval[1]",
        "self.interval[0] <= self.interval[1]",
        f"{PAIRS}::test_a_cost_of_either_side_is_told_apart",
    ),
    Mutation(
        "waiting for the ticket passes for computing the prompt",
        "rayk/reports/stages.py",
        '_part("ticket", "ticket", ',
        '_part("ticket", "prefill", ',
        f"{NUMBERS}::test_shares_name_the_limit",
    ),
    Mutation(
        "a grid has rates of two units",
        "rayk/reports/rates.py",
        "if smallest >= 0.1 else",
        "if gb_per_s >= 0.1 else",
        f"{GRIDS}::test_a_grid_has_rates_of_one_unit",
    ),
    Mutation(
        "copies of KV heads on other ranks are not told",
        "rayk/kv/held.py",
        "more += (units - field.units) * field.unit_bytes",
        "more += 0 * field.unit_bytes",
        "tests/kv/test_held.py::test_heads_that_ranks_share_are_replicated",
    ),
    Mutation(
        "a cell counts as one request's memory",
        "rayk/reports/memory.py",
        'row[name] / row["num_requests"]',
        'row[name] / row["num_cells"]',
        f"{MEMORY}::test_own_requests_are_told_by_tp_size",
    ),
    Mutation(
        "attempts that failed pass for rows beside tokens",
        "rayk/reports/memory.py",
        "beside = moved - failed - compared",
        "beside = moved - compared",
        f"{MEMORY}::test_what_moved_beside_the_rows_of_tokens_is_told",
    ),
)
