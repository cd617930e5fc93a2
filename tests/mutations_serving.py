"""Bugs to plant in how a server lets requests in, takes them through engines and saves them."""

from __future__ import annotations

from tests.mutation import Mutation

DESK = "tests/actors/test_desk.py"
ROUTER = "tests/actors/test_router.py"
WIRE = "tests/transfer/test_wire.py"

LET_IN = (
    Mutation(
        "a server that ends turns away what it began",
        "rayk/actors/desk.py",
        "if self.is_draining and not again:",
        "if self.is_draining:",
        f"{DESK}::test_a_desk_that_drains_takes_only_what_it_had_taken_before",
    ),
    Mutation(
        "who lost a place waits with the others",
        "rayk/actors/desk.py",
        "room = self._rooms[0 if again else 1]",
        "room = self._rooms[1]",
        f"{DESK}::test_a_full_room_turns_requests_away_but_not_those_that_lost_their_place",
    ),
    Mutation(
        "silent fronts keep their places",
        "rayk/actors/desk.py",
        "if front.heard_ns < before_ns]",
        "if front.heard_ns < 0]",
        f"{DESK}::test_a_silent_fronts_attempts_are_given_back_with_their_engines",
    ),
    Mutation(
        "an engine keeps its old role",
        "rayk/actors/desk.py",
        "        self.close(engine)\n        self._needs_decode",
        "        self._needs_decode",
        f"{DESK}::test_an_engine_has_one_role_at_a_time",
    ),
    Mutation(
        "an attempt that ended before it came takes a place for ever",
        "rayk/actors/desk.py",
        "if name in self._early:",
        "if name in self._fronts:",
        f"{DESK}::test_what_ended_before_it_came_never_takes_a_place",
    ),
    Mutation(
        "nobody comes in when a request ends",
        "rayk/actors/desk.py",
        "            self._end(name)\n        self._pump()\n\n    def gone",
        "            self._end(name)\n\n    def gone",
        f"{DESK}::test_whoever_waits_comes_in_by_priority_when_a_request_ends",
    ),
)

ROUTED = (
    Mutation(
        "a lost request queues as a new one",
        "rayk/actors/router.py",
        "again=number > 0",
        "again=False",
        f"{ROUTER}::test_a_lost_request_goes_on_behind_what_was_delivered",
    ),
    Mutation(
        "the prompt is told of twice",
        "rayk/actors/router.py",
        "None if self._has_prompt_logprobs else event.prompt_logprobs",
        "event.prompt_logprobs",
        f"{ROUTER}::test_after_a_second_prefill_its_first_token_is_not_told_again",
    ),
    Mutation(
        "an abort that nobody asked for ends the request",
        "rayk/actors/router.py",
        "if row.finish_reason == FinishReason.ABORT:",
        "if row.finish_reason == FinishReason.ERROR:",
        f"{ROUTER}::test_what_the_fleet_aborts_though_the_client_is_there_is_placed_again",
    ),
    Mutation(
        "of news that came together the last ones are told",
        "rayk/actors/router.py",
        "token_ids=first.token_ids + second.token_ids,",
        "token_ids=second.token_ids,",
        f"{ROUTER}::test_news_that_came_together_go_together_in_order",
    ),
    Mutation(
        "a request past its deadline goes on in its engine",
        "rayk/actors/router.py",
        "if not stream.is_over:",
        "if stream.is_over:",
        f"{ROUTER}::test_a_request_past_its_deadline_is_aborted_where_it_runs",
    ),
    Mutation(
        "a request is placed for ever",
        "rayk/actors/router.py",
        "number + 1 >= self._settings.max_attempts",
        "number > 2 * self._settings.max_attempts",
        f"{ROUTER}::test_attempts_are_bounded",
    ),
    Mutation(
        "an engine that was told of tokens seems to begin anew",
        "rayk/actors/flight.py",
        'index = len(arguments.get("output_token_ids", ()))',
        "index = 0",
        f"{ROUTER}::test_a_lost_request_goes_on_behind_what_was_delivered",
    ),
    Mutation(
        "a rank that is gone counts as wired",
        "rayk/transfer/try_read.py",
        "self._fail(rank, error.reason)",
        "pass",
        f"{WIRE}::test_a_rank_that_is_gone_is_named",
    ),
)

SERVED = LET_IN + ROUTED
