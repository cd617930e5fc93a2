"""Bugs of simulated hand-overs."""

from __future__ import annotations

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
    "an engine without a step to run does not look for commands",
    "rayk.simulate.engine:SimEngine._look_again",
    "test_pairs.py::test_a_hand_over_takes_what_its_parts_take",
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
