"""Bugs to plant in swapping and in what weighs it; see mutations.py."""

from __future__ import annotations

from tests.mutation import Mutation

SCHEDULER = "rayk/sched/batching.py"
COSTS = "rayk/offload/costs.py"
WALKS = "tests/sched/test_swapping.py::test_long_walks_swap_in_every_way"
RULES = "tests/sched/test_swap_rules.py"
WEIGHED = "tests/offload/test_costs.py"

SWAPPING = (
    Mutation(
        "a second victim is taken while blocks are copied out",
        SCHEDULER,
        "            if self._away.any_leaving:\n                return None\n",
        "",
        WALKS,
    ),
    Mutation(
        "blocks that are copied out are not waited for",
        "rayk/sched/swapping.py",
        "        self._leaving.add(state.request_id)\n",
        "",
        WALKS,
    ),
    Mutation(
        "later requests start while an earlier one is away",
        SCHEDULER,
        "            if self._away.precedes(state):\n                break\n",
        "",
        WALKS,
    ),
    Mutation(
        "requests start on blocks that a pausing one waits for",
        SCHEDULER,
        "if not (self.is_short_of_blocks and self._running):",
        "if not (self.is_short_of_blocks and scheduled):",
        f"{RULES}::test_no_request_starts_while_one_pauses",
    ),
    Mutation(
        "who comes back goes to the end of the queue",
        SCHEDULER,
        "self._waiting.insert(next(later, len(self._waiting)), state)",
        "self._waiting.append(state)",
        WALKS,
    ),
    Mutation(
        "an away request returns before an earlier one that waits",
        SCHEDULER,
        "is_next = not self._waiting or first.arrival < self._waiting[0].arrival",
        "is_next = True",
        f"{RULES}::test_who_is_away_lets_one_before_it_have_its_row_first",
    ),
    Mutation(
        "an away request takes the blocks that one lacks who came before",
        SCHEDULER,
        "return is_next and not self.is_short_of_blocks",
        "return is_next",
        f"{RULES}::test_a_request_alone_is_away_itself_while_others_hold_the_blocks",
    ),
    Mutation(
        "room is made by two at a time",
        SCHEDULER,
        "and not self._running and not self._away.any_leaving",
        "and not self._running",
        f"{RULES}::test_room_is_made_for_the_first_away_by_those_that_came_later",
    ),
    Mutation(
        "room is made though a running request will end",
        SCHEDULER,
        "and not self._running and not self._away.any_leaving",
        "and not self._away.any_leaving",
        f"{RULES}::test_no_room_is_made_while_others_run",
    ),
    Mutation(
        "a head of the queue takes another victim while blocks are copied out",
        SCHEDULER,
        "may_take = not self._running and not self._away.any_leaving",
        "may_take = not self._running",
        WALKS,
    ),
    Mutation(
        "KV that did not come back is not given up",
        SCHEDULER,
        "        if state.num_computed < num_had:\n            self._count_preemption(state)\n",
        "",
        WALKS,
    ),
    Mutation(
        "a swapper is not told of an abort",
        SCHEDULER,
        "            self.swapper.forget(request_id)\n",
        "",
        WALKS,
    ),
    Mutation(
        "a swapped request looks its prompt up again",
        SCHEDULER,
        "if state.num_cached_tokens is not None and not state.was_admitted:",
        "if state.num_cached_tokens is not None:",
        f"{RULES}::test_a_request_goes_on_with_the_tokens_it_had",
    ),
    Mutation(
        "a prompt that is to be told of may be cached",
        SCHEDULER,
        "return 0 if request.sampling.prompt_logprobs is not None else len",
        "return len",
        f"{RULES}::test_nothing_is_cached_of_a_prompt_that_is_told_of",
    ),
    Mutation(
        "nothing known of computing: compute",
        COSTS,
        "moves = recompute_ns is None or move_ns < recompute_ns",
        "moves = recompute_ns is not None and move_ns < recompute_ns",
        f"{WEIGHED}::test_nothing_known_of_computing_moves",
    ),
    Mutation(
        "outliers count like others",
        COSTS,
        "trust = _EXACT / np.maximum(np.abs(costs - expected) / expected, _EXACT)",
        "trust = np.ones(len(seen))",
        f"{WEIGHED}::test_a_few_outliers_change_little",
    ),
    Mutation(
        "decode steps drive prompts out of memory",
        COSTS,
        "(self._seen if weight >= _FEW else self._few).append(seen)",
        "self._seen.append(seen)",
        f"{WEIGHED}::test_steps_with_few_tokens_weigh_little",
    ),
    Mutation(
        "a slow move is never tried again",
        COSTS,
        "                way.fade()\n",
        "                pass\n",
        f"{WEIGHED}::test_a_move_that_was_slow_once_is_tried_again",
    ),
    Mutation(
        "a prompt is one step however long",
        COSTS,
        "return num_steps * step_ns +",
        "return step_ns +",
        f"{WEIGHED}::test_the_choice_is_the_cheaper_one_but_near_the_break_even",
    ),
    Mutation(
        "attention costs nothing",
        COSTS,
        "+ _pairs(num_tokens, num_here) * pair_ns",
        "+ 0 * pair_ns",
        f"{WEIGHED}::test_estimates_come_near_the_truth",
    ),
    Mutation(
        "tokens behind others see none of them",
        COSTS,
        "return num_tokens * num_here + num_tokens * (num_tokens + 1) / 2",
        "return num_tokens * (num_tokens + 1) / 2",
        f"{WEIGHED}::test_tokens_behind_others_are_weighed_with_what_they_see_of_them",
    ),
    Mutation(
        "a swap need not come back",
        COSTS,
        "self._out.cost_ns(bytes_out) + self._in.cost_ns(bytes_in)",
        "self._out.cost_ns(bytes_out)",
        f"{WEIGHED}::test_the_choice_is_the_cheaper_one_but_near_the_break_even",
    ),
)
