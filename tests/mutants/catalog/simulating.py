"""Bugs of simulated engines, of what joins them, and of whoever sends them requests."""

from __future__ import annotations

from dataclasses import replace

from tests.mutants.mutant import Catalog

SIMULATING = Catalog("tests/simulate")


@SIMULATING.twin(
    "readers keep what they were lent",
    "rayk.simulate.extension:SimExtension._release",
    "test_pairs.py::test_a_hand_over_takes_what_its_parts_take",
)
def _(original, self, ticket):
    pass


@SIMULATING.twin(
    "blocks that are handed out again are not missed",
    "rayk.simulate.extension:SimExtension.generations",
    "test_pairs.py::test_blocks_that_are_handed_out_again_are_missed[fail]",
)
def _(original, self, block_ids):
    return tuple(0 for _ in block_ids)


@SIMULATING.twin(
    "reads under way do not share what moves",
    "rayk.simulate.links:SimLinks.num_at",
    "test_pairs.py::test_reads_of_devices_move_beside_steps_and_share_what_there_is",
)
def _(original, self, engine):
    return min(1, original(self, engine))


@SIMULATING.twin(
    "what arrived of a read that failed is not used",
    "rayk.simulate.extension:SimExtension._proofs",
    "test_pairs.py::test_a_read_that_comes_too_late_fails[recompute]",
)
def _(original, self, command):
    return []


@SIMULATING.twin(
    "a lease is renewed but once",
    "rayk.simulate.extension:SimExtension._renew",
    "test_pairs.py::test_a_lease_that_is_renewed_holds_while_its_ticket_waits_for_blocks",
)
def _(original, self, request_id):
    if not self._held[request_id].renewals.num_sent:
        original(self, request_id)


@SIMULATING.twin(
    "an engine without a step to run does not look whether a ticket's blocks are free",
    "rayk.simulate.engine:SimEngine._look_again",
    "test_pairs.py::test_a_lease_that_is_renewed_holds_while_its_ticket_waits_for_blocks",
)
def _(original, self, extension):
    pass


@SIMULATING.twin(
    "what a decode engine has of a prompt is read all the same",
    "rayk.simulate.reads:ReadPlans._rank_rows",
    "test_same_handovers.py::test_decisions_are_equal[qwen3-(1, 1)]",
)
def _(original, self, request_id, plan, num_tokens, tables, first_row):
    return original(self, request_id, plan, num_tokens, tables, 0)


@SIMULATING.twin(
    "a dead engine tells the end of its last turn",
    "rayk.simulate.engine:SimEngine._hand_on",
    "test_deaths.py::test_a_server_that_hands_over_loses_no_request",
)
def _(original, self, told):
    was_dead, self.is_dead = self.is_dead, False
    original(self, told)
    self.is_dead = was_dead


@SIMULATING.twin(
    "no engine that died is formed again",
    "rayk.simulate.fleet:SimFleet._form_again",
    "test_deaths.py::test_requests_of_a_cell_wait_for_the_engine_that_is_formed_again",
)
def _(original, self, member, again, back_s):
    pass


@SIMULATING.twin(
    "blocks of a request whose decode engine died are kept until their lease ends",
    "rayk.simulate.flow:RequestFlow._settle",
    "test_deaths.py::test_blocks_lent_to_an_engine_that_died_come_free_at_once",
)
def _(original, self):
    pass


@SIMULATING.twin(
    "a request whose time is over is ended once more by the waiting room",
    "rayk.simulate.entry:ServerEntry.carry_out",
    "test_servers.py::test_requests_end_when_their_time_is_over_wherever_they_are",
)
def _(original, self, actions):
    for flow, _ in self._asking.values():
        flow.is_over = False
    original(self, actions)


@SIMULATING.twin(
    "a step loses nothing to what begins beside it later",
    "rayk.simulate.host:SimHost._settle",
    "test_neighbours.py::test_two_engines_are_worked_out_by_hand",
)
def _(original, self, engine):
    self._last.pop(engine, None)


@SIMULATING.twin(
    "a hand-over's digest pays for what the step before it lost",
    "rayk.simulate.host:SimHost.work",
    "test_pairs.py::test_what_steps_lose_to_neighbours_is_not_booked_to_hand_overs",
)
def _(original, self, engine, num_ranks, begin_ns, length_ns):
    owed_ns = round(self._owed_ns.pop(engine, 0.0))
    return original(self, engine, num_ranks, begin_ns, length_ns + owed_ns)


@SIMULATING.twin(
    "a step loses by the class of its neighbour, and beside its own",
    "rayk.costs.losses:StepLosses.stretch",
    "test_neighbours.py::test_two_engines_are_worked_out_by_hand",
)
def _(original, self, met, *, is_decode):
    swapped = replace(
        self,
        prefill_beside_decode=self.decode_beside_prefill,
        decode_beside_prefill=self.prefill_beside_decode,
    )
    return original(swapped, met, is_decode=is_decode)


@SIMULATING.twin(
    "a host tier does not give back what it does not read",
    "rayk.simulate.tier:_TierRank.let_go",
    "test_same_tiers.py::test_what_is_stored_loaded_and_swapped_is_equal[qwen3-1]",
)
def _(original, self, request_id):
    pass


@SIMULATING.twin(
    "a host tier reads what it has once more",
    "rayk.simulate.tier:_TierRank.start",
    "test_tiers.py::test_a_tier_reads_only_what_it_has_not",
)
def _(original, self, ticket, tables, deadline_ns, first_row):
    original(self, ticket, tables, deadline_ns, 0)


@SIMULATING.twin(
    "equal prompts get outputs of their own",
    "rayk.simulate.tokens:TokenRule.begin",
    "test_cached_share.py::test_a_traces_cached_share_is_as_served_one_after_another",
)
def _(original, self, request_id, *, prompt=None, num_output_tokens=None):
    original(self, request_id, num_output_tokens=num_output_tokens)


# Quiet steps that are taken at once.

FAST = "test_spans.py::test_a_fast_world_is_as_one_that_takes_each_step"


@SIMULATING.twin(
    "a span that is cut takes a turn that had not begun",
    "rayk.simulate.spans:QuietSpan.num_begun",
    FAST,
)
def _(original, self, at_ns, *, is_over=True):
    return min(len(self.ends_ns), original(self, at_ns, is_over=is_over) + 1)


@SIMULATING.twin(
    "a span goes on though a read has ended",
    "rayk.simulate.spans:QuietSpans.plan",
    FAST,
)
def _(original, self, begin_ns, until_ns, give_up_ns):
    return original(self, begin_ns, None, give_up_ns)


@SIMULATING.twin(
    "a step in flight after a span ends a moment late",
    "rayk.simulate.rank:SimRank.go_on",
    FAST,
)
def _(original, self, features, took_ns, free_ns):
    original(self, features, took_ns, free_ns + 1)


@SIMULATING.twin(
    "mere tokens of many steps are told as of one",
    "rayk.simulate.late_sink:LateSink.note_all",
    FAST,
)
def _(original, self, tokens, times_ns):
    original(self, tokens, times_ns[-1:] * len(tokens))


@SIMULATING.twin(
    "what is drawn for steps that were not taken is drawn anew",
    "rayk.simulate.rank:StepTimer.passed",
    FAST,
)
def _(original, self, num_steps):
    original(self, len(self._drawn))
