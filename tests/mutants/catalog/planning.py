"""Bugs of searches for plans, and of the commands that start them."""

from __future__ import annotations

from dataclasses import replace

from tests.mutants.mutant import Catalog

PLANNING = Catalog("tests/planner")


@PLANNING.twin(
    "a plan that another beats on both axes is on the front",
    "rayk.planner.front:on_front",
    "test_plan.py::test_the_front_is_what_brute_force_says",
)
def _(original, points):
    return [True] * len(points)


@PLANNING.twin(
    "commands start twice as many rows as were simulated",
    "rayk.planner.command:server_options",
    "test_plan.py::test_a_command_starts_the_engines_that_were_simulated",
)
def _(original, spec, candidate):
    family = replace(candidate.family, max_seqs=2 * candidate.family.max_seqs)
    return original(spec, replace(candidate, family=family))


@PLANNING.twin(
    "a search takes the plan of the most GPUs",
    "rayk.planner.search:Search.rank",
    "test_plan.py::test_the_fewest_gpus_that_keep_up_are_what_all_plans_simulated_say",
)
def _(original, self, plan):
    is_missed, size, *rest = original(self, plan)
    return is_missed, -size, *rest


@PLANNING.twin(
    "data sheets pass for measurements",
    "rayk.planner.summary:trust_of",
    "test_plan.py::test_a_data_sheet_marks_all_that_comes_of_it",
)
def _(original, best, plan, rows):
    return original(best, plan, rows) | {"unmeasured": False}


@PLANNING.twin(
    "answers that break the limits are good enough",
    "rayk.planner.search:Search.keeps",
    "test_plan.py::test_the_highest_rate_is_where_a_dense_scan_finds_it",
)
def _(original, self, result):
    return not result.refusal


@PLANNING.twin(
    "the host takes as long where all costs are higher",
    "rayk.planner.trial:slowed_engine",
    "test_by_hand.py::test_a_lone_request_takes_the_sum_of_its_stages_and_all_of_them_grow_with_costs",
)
def _(original, costs, factor):
    return replace(original(costs, factor), host_ns=costs.host_ns)


@PLANNING.twin(
    "a last chunk is thought to be free where it shares its step",
    "rayk.planner.estimate:EngineSide.prompt_ns",
    "test_by_hand.py::test_a_long_prompt_is_estimated_by_its_chunks",
)
def _(original, self, num_tokens, num_cached=0.0, *, alone=False):
    whole = num_tokens - (0 if alone else num_tokens % self.max_batch_tokens)
    return original(self, whole, num_cached, alone=alone)


@PLANNING.twin(
    "blocks that prompts share are looked for from their ends",
    "rayk.planner.traffic:_shared_tokens",
    "test_by_hand.py::test_what_a_trace_shares_is_counted_in_blocks",
)
def _(original, rows, block_tokens):
    return original([replace(row, hash_ids=row.hash_ids[::-1]) for row in rows], block_tokens)
