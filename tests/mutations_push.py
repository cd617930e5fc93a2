"""Bugs to plant in pushes, reservations, leases and recoveries, and the test that must notice each."""

from __future__ import annotations

from tests.mutation import Mutation

ARRIVALS = "tests/transfer/test_arrivals.py"
SESSION = "tests/transfer/test_push_session.py"
RESERVATION = "tests/transfer/test_reservation.py"
LEASE = "tests/transfer/test_lease.py"
PUSH = "tests/actors/test_push.py"
HANDOVER = "tests/actors/test_handover.py"
RECOMPUTE = "tests/actors/test_recompute.py"
STRIKES = "tests/actors/test_strikes.py"
WAITS = "tests/actors/test_waits.py"

MESSAGES = (
    Mutation(
        "the last message stands for all",
        "rayk/transfer/arrivals.py",
        "return all(write in self.writes for write in range(self.end.num_writes))",
        "return True",
        "tests/transfer/test_hostile_peers.py::test_writes_that_were_never_announced_make_no_arrival_whole",
    ),
    Mutation(
        "messages of a void attempt count",
        "rayk/transfer/arrivals.py",
        "if attempt is None or attempt.number < message.attempt:",
        "if attempt is None or attempt.number != message.attempt:",
        f"{ARRIVALS}::test_an_attempt_is_here_when_all_of_it_is",
    ),
    Mutation(
        "who sends nothing is waited for",
        "rayk/transfer/arrivals.py",
        "if rank not in link.plan.producer_ranks:",
        "if rank in link.plan.producer_ranks[1:]:",
        f"{ARRIVALS}::test_after_the_tickets_attempt_nobody_needs_to_be_asked",
    ),
    Mutation(
        "the null block has a generation",
        "rayk/transfer/arrivals.py",
        "if block != NULL_BLOCK and was != is_now:",
        "if was != is_now:",
        f"{ARRIVALS}::test_a_block_that_was_handed_out_again_is_named",
    ),
    Mutation(
        "writes held for a void attempt are posted",
        "rayk/transfer/push_session.py",
        "        self._attempt_began_at = self._next_write\n        self._held.clear()\n",
        "        self._attempt_began_at = self._next_write\n",
        f"{SESSION}::test_writes_that_were_held_when_blocks_are_taken_again_are_never_posted",
    ),
    Mutation(
        "an arrival counts void writes",
        "rayk/transfer/push_session.py",
        "NotifyArrived(self.attempt, self._next_write - self._attempt_began_at)",
        "NotifyArrived(self.attempt, self._next_write)",
        f"{SESSION}::test_an_arrival_counts_the_writes_of_one_attempt",
    ),
    Mutation(
        "a prompt that was preempted is still computed",
        "rayk/transfer/push_session.py",
        "        self._gathered.clear()\n        self._is_computed = False\n",
        "        self._gathered.clear()\n",
        f"{SESSION}::test_blocks_taken_after_the_last_chunk_make_all_of_it_void",
    ),
    Mutation(
        "all lives of an engine end at once",
        "rayk/transfer/reservation.py",
        "if (found.engine, found.epoch) == (engine, epoch):",
        "if found.engine == engine:",
        f"{RESERVATION}::test_the_end_of_one_life_says_nothing_of_the_next",
    ),
    Mutation(
        "an arrival of any attempt is a rank's last word",
        "rayk/transfer/reservation.py",
        "found.attempts.items() if last == attempt}",
        "found.attempts.items() if last >= 0}",
        f"{RESERVATION}::test_an_arrival_of_the_tickets_attempt_is_a_ranks_last_word",
    ),
    Mutation(
        "a lease is renewed beyond its deadline",
        "rayk/transfer/lease.py",
        "lease.ends_ns = min(lease.deadline_ns, now_ns + lease.lease_ns)",
        "lease.ends_ns = now_ns + lease.lease_ns",
        f"{LEASE}::test_a_lease_ends_at_its_deadline_however_often_it_was_renewed",
    ),
    Mutation(
        "old renewals count",
        "rayk/transfer/lease.py",
        "if is_late or message.number <= lease.renewed.get(message.consumer, -1):",
        "if is_late or message.number < 0:",
        f"{LEASE}::test_old_and_repeated_renewals_do_not_count",
    ),
    Mutation(
        "who has released renews",
        "rayk/transfer/lease.py",
        "if lease is None or lease.lease_ns is None or message.consumer in lease.told_by:",
        "if lease is None or lease.lease_ns is None:",
        f"{LEASE}::test_any_consumer_keeps_a_lease_until_it_has_released_it",
    ),
    Mutation(
        "one renewal a lease",
        "rayk/transfer/lease.py",
        "RENEWALS_PER_LEASE = 3",
        "RENEWALS_PER_LEASE = 1",
        f"{LEASE}::test_renewals_come_three_times_within_a_length",
    ),
)

ENGINES = (
    Mutation(
        "blocks are handed out while they are read",
        "rayk/transfer/pusher.py",
        "        if not hit:\n            return\n",
        "        if hit or not hit:\n            return\n",
        f"{PUSH}::test_blocks_that_are_read_are_not_handed_out_before_that_ends",
        needs_fixtures=True,
    ),
    Mutation(
        "pushes wait for the last layer",
        "rayk/transfer/push.py",
        "if self.is_void or chunk.attempt != self.attempt:",
        "if self.is_void or chunk.attempt != self.attempt or not self.is_computed():",
        f"{PUSH}::test_early_layers_are_written_before_the_last_is_computed",
        needs_fixtures=True,
    ),
    Mutation(
        "chunks that come after a push has failed are pushed",
        "rayk/transfer/pusher.py",
        "            self._stopped.stop(reservation_id)\n            self._computed",
        "            self._computed",
        f"{PUSH}::test_nothing_is_written_after_a_rank_said_that_it_stopped",
        needs_fixtures=True,
    ),
    Mutation(
        "a new attempt goes on with the old one's writes",
        "rayk/transfer/push.py",
        "        self._num_writes = 0\n        self._sums.clear()",
        "        self._sums.clear()",
        f"{PUSH}::test_a_preempted_prompt_is_pushed_again",
        needs_fixtures=True,
    ),
    Mutation(
        "reservations are held for ever",
        "rayk/actors/reservations.py",
        "if h.until_ns <= now]",
        "if h.until_ns <= 0]",
        f"{PUSH}::test_a_reservation_that_nobody_uses_is_given_up[1to1]",
        needs_fixtures=True,
    ),
    Mutation(
        "newcomers take the last block",
        "rayk/actors/reservations.py",
        "if manager.pool.num_free_blocks < num_here * len(manager.groups):",
        "if manager.pool.num_free_blocks < 0:",
        f"{HANDOVER}::test_a_newcomer_leaves_running_requests_a_block_to_go_on_with",
        needs_fixtures=True,
    ),
    Mutation(
        "what was not proven is kept",
        "rayk/actors/receiving.py",
        "self._go_on(incoming, longest_valid_prefix(groups, proofs, command.ticket.num_tokens))",
        "self._go_on(incoming, command.ticket.num_tokens)",
        f"{RECOMPUTE}::test_full_attention_keeps_what_stands_before_the_damage[100-1to1]",
        needs_fixtures=True,
    ),
    Mutation(
        "all is computed again",
        "rayk/actors/receiving.py",
        "self.leader.start(incoming.request, incoming.output_token_ids, num_valid)",
        "self.leader.start(incoming.request, incoming.output_token_ids, 0 * num_valid)",
        f"{RECOMPUTE}::test_a_read_that_arrived_but_was_fenced_off_is_kept_whole[qwen3]",
        needs_fixtures=True,
    ),
    Mutation(
        "blocks that reads were left are free",
        "rayk/actors/receiving.py",
        "self.leader.manager.lease(request_id, lease_id)",
        "self.leader.manager.free(request_id)",
        f"{RECOMPUTE}::test_reads_that_do_not_end_keep_their_blocks_and_the_request_goes_on",
        needs_fixtures=True,
    ),
    Mutation(
        "who lost a rank is believed before the rank itself",
        "rayk/actors/engines.py",
        "await asyncio.wait({self.died}, timeout=BLAME_S)",
        "await asyncio.sleep(0)",
        f"{WAITS}::test_what_a_rank_died_of_is_told_rather_than_that_another_lost_it[True]",
    ),
    Mutation(
        "a read that is posted late ends whoever polls it",
        "rayk/transfer/strikes.py",
        "            except TransferError:\n",
        "            except ZeroDivisionError:\n",
        f"{STRIKES}::test_a_read_that_is_posted_when_its_peer_is_dead_fails_and_ends_nobody_else[post]",
        needs_fixtures=True,
    ),
    Mutation(
        "a pushing connector writes into blocks for as long as its own request may take",
        "rayk/transfer/push_connectors.py",
        "min(sending.until_ns, stop_ns),",
        "sending.until_ns,",
        "tests/conformance/test_push_connectors.py::test_a_producer_that_comes_too_late_writes_nothing",
    ),
    Mutation(
        "a pushing connector begins what nobody may write any more",
        "rayk/transfer/push_connectors.py",
        " or now >= stop_ns:",
        ":",
        "tests/conformance/test_push_connectors.py::test_a_reservation_that_is_over_is_refused",
    ),
    Mutation(
        "a pushing connector calls what it never wrote a failure only at the deadline",
        "rayk/transfer/push_connectors.py",
        "if why or now >= room.stop_ns:",
        "if now >= room.stop_ns:",
        "tests/conformance/test_push_connectors.py::test_blocks_come_back_early_when_the_producer_gives_up",
    ),
)

PUSHED = MESSAGES + ENGINES
