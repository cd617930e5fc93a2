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
