"""Bugs of what moves KV between engines, and of who may write where until when."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np

from tests.mutants.mutant import Catalog

TRANSFER = Catalog("tests/transfer")


@TRANSFER.twin(
    "every turn reads the same replica",
    "rayk.transfer.plan:plan_transfer",
    "test_links.py::test_over_the_turns_every_replica_is_read_as_often",
)
def _(original, producers, consumer, turn=0):
    return original(producers, consumer)


@TRANSFER.twin(
    "a replica that nobody reads is never told",
    "rayk.transfer.plan:release_senders",
    "test_plan.py::test_every_producer_rank_is_told_when_to_free",
)
def _(original, producers, consumers, turn=0):
    from rayk.transfer.plan import plan_transfer

    read = {rank for c in consumers for rank in plan_transfer(producers, c, turn).producer_ranks}
    return tuple(s if rank in read else () for rank, s in enumerate(original(producers, consumers, turn)))


@TRANSFER.twin(
    "a last block of one row is not moved",
    "rayk.transfer.segments:CopySegments.holding",
    "test_plan.py::test_live_rows_arrive_for_any_blocks_groups_and_windows",
)
def _(original, self, live):
    return original(self, live[:-1])


@TRANSFER.twin(
    "data lands where it lay at the producer",
    "rayk.transfer.link:pattern_lists",
    "test_rank.py::test_all_layout_pairs",
)
def _(original, producer, consumer, pattern):
    runs = replace(pattern.runs, destination=pattern.runs.source)
    return original(producer, consumer, replace(pattern, runs=runs))


@TRANSFER.twin(
    "descriptor lists are freed under a read",
    "rayk.transfer.link:PreparedReads.take",
    "test_prepared.py::test_the_least_recently_used_are_freed_when_no_read_uses_them",
)
def _(original, self, pattern):
    handle = original(self, pattern)
    self.give_back(pattern.key)
    return handle


@TRANSFER.twin(
    "a ticket of another life is accepted",
    "rayk.transfer.rank:TransferRank.start",
    "test_rank.py::test_a_ticket_of_an_earlier_life_is_refused",
)
def _(original, self, ticket, *args, **options):
    lives = [epoch for epoch in range(8) if self._links.of(ticket.engine, epoch)]
    original(self, replace(ticket, epoch=lives[0] if lives else ticket.epoch), *args, **options)


@TRANSFER.twin(
    "generations are not read",
    "rayk.transfer.session:Session.__init__",
    "test_rank.py::test_a_block_reused_while_being_read_is_named",
)
def _(original, self, request_id, *, fences, **options):
    original(self, request_id, fences={}, **options)


@TRANSFER.twin(
    "the fence is posted behind the first read",
    "rayk.transfer.session:Session.handle",
    "test_guards.py::test_fence_after_all_data_digests_after_all_fences_release_after_the_verdict",
)
def _(original, self, event, now_ns):
    if type(event).__name__ == "ReadDone":
        self._reads_left &= {event.read}
    return original(self, event, now_ns)


@TRANSFER.twin(
    "the deadline of a read is not kept",
    "rayk.transfer.session:Session.handle",
    "test_guards.py::test_a_read_that_ends_after_the_deadline_is_not_waited_for",
)
def _(original, self, event, now_ns):
    return original(self, event, 0)


@TRANSFER.twin(
    "blocks come free while a read still writes there",
    "rayk.transfer.draining:DrainingSession.is_drained",
    "test_guards.py::test_blocks_are_taboo_until_the_last_read_has_ended",
)
def _(original, self):
    return self.phase.name == "OVER"


@TRANSFER.twin(
    "one release frees a lease that several ranks read",
    "rayk.transfer.lease:LeaseTable.on_release",
    "test_guards.py::test_a_lease_ends_when_every_consumer_rank_has_told_not_when_one_told_twice",
)
def _(original, self, message):
    original(self, replace(message, num_expected=1))


@TRANSFER.twin(
    "facts of the model are not compared",
    "rayk.transfer.handshake:check",
    "test_guards.py::test_every_field_that_must_agree_is_compared",
)
def _(original, producer, consumer, *rest):
    original(replace(producer, fingerprint=consumer.fingerprint), consumer, *rest)


@TRANSFER.twin(
    "digests do not depend on what is digested",
    "rayk.transfer.verify:compute_digests",
    "test_rank.py::test_a_mismatch_keeps_the_lease_until_it_is_given_up",
)
def _(original, *args, **options):
    return np.zeros_like(original(*args, **options))


@TRANSFER.twin(
    "a wrong map is told as wrong bytes",
    "rayk.transfer.diagnose:classify",
    "test_state_faults.py::test_faults_of_the_map_are_named",
)
def _(original, difference):
    return "wrong bytes"


@TRANSFER.twin(
    "notifications are read without a look at their checksum",
    "rayk.transfer.checked_message:unpack",
    "test_hostile_peers.py::test_a_message_of_which_a_bit_flipped_is_not_read",
)
def _(original, message):
    return original(b"%08x" % zlib.crc32(message[8:]) + message[8:])


@TRANSFER.twin(
    "a prompt that was preempted goes on with its old attempt",
    "rayk.transfer.push_session:PushSession.handle",
    "test_push_session.py::test_blocks_taken_after_the_last_chunk_make_all_of_it_void",
)
def _(original, self, event, now_ns):
    return [] if type(event).__name__ == "Preempted" else original(self, event, now_ns)


@TRANSFER.twin(
    "anybody speaks for a producer rank",
    "rayk.transfer.arrivals:Arrivals.take",
    "test_arrivals.py::test_nobody_speaks_for_a_producer_rank",
)
def _(original, self, message, peer):
    found = self._open.get(message.reservation_id)
    ranks = found.link.producers if found is not None else ()
    known = message.producer_rank < len(ranks)
    original(self, message, ranks[message.producer_rank].agent_name if known else peer)


@TRANSFER.twin(
    "all lives of an engine end at once",
    "rayk.transfer.reservation_state:ReservationTable.on_engine_gone",
    "test_reservation_state.py::test_the_end_of_one_life_says_nothing_of_the_next",
)
def _(original, self, engine, epoch):
    for life in range(epoch, epoch + 4):
        original(self, engine, life)


@TRANSFER.twin(
    "blocks are handed out while a push reads them",
    "rayk.transfer.pusher:Pusher.void",
    "test_simulated_faults.py::test_worlds_without_faults_pass",
)
def _(original, self, block_ids):
    is_free = original(self, block_ids)
    is_free.set()
    return is_free


@TRANSFER.twin(
    "what was not proven is kept",
    "rayk.transfer.valid_prefix:longest_valid_prefix",
    "test_valid_prefix.py::test_longest_valid_prefix_by_trying_all",
)
def _(original, groups, proofs, num_tokens):
    return num_tokens


@TRANSFER.twin(
    "a conversion is not proven",
    "rayk.transfer.convert:Conversion.check",
    "test_convert.py::test_a_wrong_conversion_is_named",
)
def _(original, self, *args, **options):
    original(self, *args, **options)


@TRANSFER.twin(
    "stretches of the staging buffer overlap",
    "rayk.transfer.stretches:Stretches.take",
    "test_staging.py::test_requests_that_wait_for_room_take_turns",
)
def _(original, self, count):
    original(self, count)
    return range(count)


@TRANSFER.twin(
    "a rank that is gone counts as wired",
    "rayk.transfer.try_read:Wirings.step",
    "test_wire.py::test_a_rank_that_is_gone_is_named",
)
def _(original, self, engine, handles, timeout_s):
    return True


@TRANSFER.twin(
    "block tables of a peer are not looked at",
    "rayk.transfer.plan:checked_tables",
    "test_hostile_peers.py::test_tables_of_either_side_are_looked_at_where_they_are_used",
)
def _(original, side, tables, rank):
    return [np.asarray(table, dtype=np.int64) for table in tables]


@TRANSFER.twin(
    "pinned memory is lent again before its copy has run",
    "rayk.transfer.staging:StagedRead._repack",
    "test_host_staging.py::test_all_arrives_in_host_memory_and_is_kept_until_it_was_copied",
)
def _(original, self, chunk):
    original(self, chunk)
    chunk.copied = None


@TRANSFER.twin(
    "what reads cost is measured and not used",
    "rayk.transfer.costs:CostTable.of",
    "test_measuring.py::test_reads_go_the_way_that_was_measured_to_be_cheaper",
)
def _(original, self, transport, device, peer_device):
    from rayk.transfer.costs import transfer_costs

    return transfer_costs(transport, device)


@TRANSFER.twin(
    "a GPU that was measured stands for the host's memory",
    "rayk.transfer.costs:_row",
    "test_measuring.py::test_a_table_keeps_rows_by_kinds_of_devices",
)
def _(original, transport, device, peer_device):
    return original(transport, device, device)


@TRANSFER.twin(
    "only digests are warmed up",
    "rayk.transfer.warm_up:every_form",
    "test_warm_up.py::test_no_transfer_compiles_after_it",
)
def _(original, device):
    return []


@TRANSFER.twin(
    "page maps deal tokens in runs twice as long",
    "rayk.parallel.shard:Stripe.rows",
    "test_divided.py::test_an_interleave_off_by_one_is_named",
)
def _(original, self, block_tokens):
    longer = replace(self, interleave=2 * self.interleave)
    return original(longer if block_tokens % longer.period == 0 else self, block_tokens)


@TRANSFER.twin(
    "digests look for tokens where runs twice as long had put them",
    "rayk.parallel.shard:Stripe.local",
    "test_divided.py::test_a_last_stripe_too_short_is_named",
)
def _(original, self, positions):
    return original(replace(self, interleave=2 * self.interleave), positions)


@TRANSFER.twin(
    "every stage but the first has the layers behind its own",
    "rayk.parallel.shard:EngineShape.share",
    "test_divided.py::test_a_stages_layers_shifted_by_one_are_named",
)
def _(original, self, rank):
    share = original(self, rank)
    if not share.stage:
        return share
    return replace(share, layers=range(share.layers.start + 1, share.layers.stop + 1))


@TRANSFER.twin(
    "tokens that no rank holds are not missed",
    "rayk.transfer.election:_first_held",
    "test_election.py::test_what_meets_and_who_holds_it_are_those_of_every_position",
)
def _(original, parts, wanted, times):
    return original(parts, wanted, times) if times else None


@TRANSFER.twin(
    "wire caches have blocks that end within a turn of the consumer's deal",
    "rayk.transfer.wire_geometry:_of_whole_turns",
    "test_convert.py::test_formats_are_converted_whoever_deals_tokens",
)
def _(original, group, period):
    return group


@TRANSFER.twin(
    "of an engine with stages only the scales of rank 0's are known",
    "rayk.transfer.handshake:engine_scales",
    "../handover/test_staged_formats.py::test_rows_are_those_of_engines_without_stages",
)
def _(original, ranks):
    return original(list(ranks)[:1])
