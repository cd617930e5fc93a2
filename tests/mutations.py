"""Bugs to plant, and the test that must notice each. Run by mutants.py."""

from __future__ import annotations

from tests.mutation import Mutation
from tests.mutations_attention import ATTENTION
from tests.mutations_bench import BENCH
from tests.mutations_dashboards import DASHBOARDS
from tests.mutations_disk import ON_DISK
from tests.mutations_engine import ENGINE
from tests.mutations_fronts import FRONTS
from tests.mutations_http import HTTP
from tests.mutations_kv import KV
from tests.mutations_metrics import METERS
from tests.mutations_models import MODELS
from tests.mutations_offload import OFFLOADED
from tests.mutations_policies import POLICIES
from tests.mutations_prefix import PREFIXES
from tests.mutations_push import PUSHED
from tests.mutations_reports import COMPARED
from tests.mutations_sampling import SAMPLING
from tests.mutations_serving import SERVED
from tests.mutations_simulator import SIMULATED
from tests.mutations_stages import STAGE_TIMES
from tests.mutations_staging import STAGED_READS
from tests.mutations_swapping import SWAPPING
from tests.mutations_tiers import TIERS
from tests.mutations_timeline import TIMES
from tests.mutations_transfer import STATES
from tests.mutations_views import VIEWS

PLAN = "tests/transfer/test_plan.py"
RANK = "tests/transfer/test_rank.py"
GUARDS = "tests/transfer/test_guards.py"
LINKS = "tests/transfer/test_links.py"
LOGPROBS = "tests/experiments/test_logprobs.py"
CULPRIT = "tests/experiments/test_culprit.py"

TRANSFER = (
    Mutation(
        "every turn reads the same replica",
        "rayk/transfer/plan.py",
        "rank = holders[(first + turn) % len(holders)]",
        "rank = holders[first]",
        f"{LINKS}::test_over_the_turns_every_replica_is_read_as_often",
    ),
    Mutation(
        "releases are counted as in the first turn",
        "rayk/transfer/plan.py",
        "for rank in plan_transfer(producers, consumer, turn).producer_ranks:",
        "for rank in plan_transfer(producers, consumer).producer_ranks:",
        f"{PLAN}::test_replicas_take_turns",
    ),
    Mutation(
        "a peer is forgotten with the first of its links",
        "rayk/transfer/links.py",
        "if not self._num_users[peer]:",
        "if True:",
        f"{LINKS}::test_a_link_ends_and_leaves_the_other_turns_theirs",
    ),
    Mutation(
        "links to an engine's old life stay",
        "rayk/transfer/links.py",
        "known == name or (link.engine == producer.engine and link.epoch != producer.epoch)",
        "known == name",
        f"{LINKS}::test_a_new_life_ends_all_links_to_the_old_one",
    ),
    Mutation(
        "all readers use the first replica",
        "rayk/transfer/plan.py",
        "rank = holders[(first + turn) % len(holders)]",
        "rank = holders[turn % len(holders)]",
        f"{PLAN}::test_readers_are_spread_over_replicas",
    ),
    Mutation(
        "a rank without the unit is elected",
        "rayk/transfer/plan.py",
        "for rank, units in enumerate(held) if unit in units]",
        "for rank, units in enumerate(held) if units]",
        f"{PLAN}::test_all_layout_pairs",
    ),
    Mutation(
        "rows cut at the consumer's blocks only",
        "rayk/transfer/segments.py",
        "dtype=np.int64) for n in self._sizes]",
        "dtype=np.int64) for n in self._sizes[1:]]",
        f"{PLAN}::test_live_rows_arrive_for_any_blocks_groups_and_windows",
    ),
    Mutation(
        "last block dropped when it holds one row",
        "rayk/transfer/segments.py",
        "range(self._at(live.start), self._at(live.stop - 1) + 1)",
        "range(self._at(live.start), self._at(live.stop - 2) + 1)",
        f"{PLAN}::test_live_rows_arrive_for_any_blocks_groups_and_windows",
    ),
    Mutation(
        "source and destination swapped",
        "rayk/transfer/plan.py",
        "match_rows(source, destination, read.units, layers=read.layers, **rows)",
        "match_rows(destination, source, read.units, layers=read.layers, **rows)",
        f"{PLAN}::test_all_layout_pairs",
    ),
    Mutation(
        "block strides swapped",
        "rayk/transfer/plan.py",
        "source_strides=block_strides(source, runs.source),",
        "source_strides=block_strides(destination, runs.destination),",
        f"{PLAN}::test_all_layout_pairs",
    ),
    Mutation(
        "source indices counted in the consumer's blocks",
        "rayk/transfer/plan.py",
        "self._indices(num_source_blocks, self.source_blocks)",
        "self._indices(num_destination_blocks, self.source_blocks)",
        f"{PLAN}::test_descriptor_indices_of_the_fixture",
    ),
    Mutation(
        "a replica nobody reads is never told",
        "rayk/transfer/plan.py",
        "tuple(r) if r else (rank % len(consumers),)",
        "tuple(r)",
        f"{PLAN}::test_every_producer_rank_is_told_when_to_free",
    ),
    Mutation(
        "generations are not read",
        "rayk/transfer/session.py",
        "self._fences_left = set(self._fences)\n",
        "self._fences_left = set()\n",
        f"{RANK}::test_a_block_reused_while_being_read_is_named",
    ),
    Mutation(
        "the fence is posted with the data",
        "rayk/transfer/session.py",
        "return [PostReads(tuple(range(self._num_reads)))]",
        "return [PostReads(tuple(range(self._num_reads))), *self._after_reads()]",
        f"{RANK}::test_a_block_reused_after_the_data_but_before_the_fence_is_refused",
    ),
    Mutation(
        "a mismatch gives up the lease",
        "rayk/transfer/session.py",
        "return [Finish(mismatch, is_draining=False)]",
        "return [*self.release(), Finish(mismatch, is_draining=False)]",
        f"{RANK}::test_a_mismatch_keeps_the_lease_until_it_is_given_up",
    ),
    Mutation(
        "the deadline is not kept",
        "rayk/transfer/session.py",
        "if now_ns >= self._deadline_ns and not isinstance(event, Verified):",
        "if now_ns < 0 and not isinstance(event, Verified):",
        f"{RANK}::test_a_deadline_ends_a_slow_transfer_and_frees_the_producer",
    ),
    Mutation(
        "only V is compared",
        "rayk/transfer/verify.py",
        "np.flatnonzero((theirs != found[words.index]) & moved)",
        "np.flatnonzero((theirs != found[words.index]) & moved & (lanes.field_index[words.lane] > 0))",
        f"{RANK}::test_a_mismatch_keeps_the_lease_until_it_is_given_up",
    ),
    Mutation(
        "digests stay in a block's first kernel block",
        "rayk/transfer/verify.py",
        "ids = table[block] * (rows // self.kernel_block_size) + kernel_block",
        "ids = table[block] * (rows // self.kernel_block_size)",
        f"{RANK}::test_unlike_blocks_kernel_blocks_and_windows",
    ),
    Mutation(
        "generations read from the pages",
        "rayk/transfer/link.py",
        "producer.base_address + producer.geometry.generations_offset",
        "producer.base_address",
        f"{RANK}::test_kv_arrives_verified_and_every_producer_rank_is_released",
    ),
    Mutation(
        "data lands where it lay at the producer",
        "rayk/transfer/link.py",
        "consumer.base_address + runs.destination",
        "consumer.base_address + runs.source",
        f"{RANK}::test_all_layout_pairs",
    ),
    Mutation(
        "reused blocks keep their generation",
        "rayk/kv/caches.py",
        "table.numpy()[ids] += 1",
        "table.numpy()[ids] += 0",
        f"{RANK}::test_a_block_reused_while_being_read_is_named",
    ),
    Mutation(
        "a ticket of another life is accepted",
        "rayk/transfer/rank.py",
        "if link is None or link.epoch != ticket.epoch:",
        "if link is None:",
        f"{RANK}::test_a_ticket_of_an_earlier_life_is_refused",
    ),
    Mutation(
        "the fence is posted after the first read",
        "rayk/transfer/session.py",
        "return [] if self._reads_left else self._after_reads()",
        "return self._after_reads()",
        f"{GUARDS}::test_fence_after_all_data_digests_after_all_fences_release_after_the_verdict",
    ),
    Mutation(
        "digests are computed before all generations are here",
        "rayk/transfer/session.py",
        "return [] if self._fences_left else self._after_fences()",
        "return self._after_fences()",
        f"{GUARDS}::test_fence_after_all_data_digests_after_all_fences_release_after_the_verdict",
    ),
    Mutation(
        "an older generation passes",
        "rayk/transfer/session.py",
        "if expected != found:",
        "if expected < found:",
        f"{GUARDS}::test_any_other_generation_is_a_reused_block",
    ),
    Mutation(
        "drained although a read still writes",
        "rayk/transfer/session.py",
        "return self.phase is Phase.OVER and not self._reads_left and not self._fences_left",
        "return self.phase is Phase.OVER and not self._fences_left",
        f"{GUARDS}::test_blocks_are_taboo_until_the_last_read_has_ended",
    ),
    Mutation(
        "one release frees a lease that several ranks read",
        "rayk/transfer/lease.py",
        "and len(self.told_by) >= self.num_expected",
        "and len(self.told_by) >= 1",
        f"{GUARDS}::test_a_lease_ends_when_every_consumer_rank_has_told_not_when_one_told_twice",
    ),
    Mutation(
        "releases are counted, not ranks",
        "rayk/transfer/lease.py",
        "lease.told_by.add(message.consumer)",
        "lease.told_by.add(str(len(lease.told_by)))",
        f"{GUARDS}::test_a_lease_ends_when_every_consumer_rank_has_told_not_when_one_told_twice",
    ),
    Mutation(
        "leases never expire",
        "rayk/transfer/lease.py",
        "if lease.ends_ns is not None and lease.ends_ns <= now_ns",
        "if lease.ends_ns is None",
        f"{GUARDS}::test_a_lease_nobody_releases_expires_once_at_its_deadline",
    ),
    Mutation(
        "the KV dtype is not compared",
        "rayk/transfer/handshake.py",
        'return {"kv_dtype": spec.dtype} | {',
        "return {",
        f"{GUARDS}::test_every_layer_is_compared_field_by_field",
    ),
    Mutation(
        "a fact only the consumer has is passed over",
        "rayk/transfer/handshake.py",
        "names = [*ours, *(name for name in theirs if name not in ours)]",
        "names = [*ours]",
        f"{GUARDS}::test_every_field_that_must_agree_is_compared",
    ),
    Mutation(
        "windows are not compared",
        "rayk/transfer/handshake.py",
        '"live_rows(1000000)": str(live)',
        '"live_rows(1000000)": str(live.stop)',
        f"{GUARDS}::test_every_layer_is_compared_field_by_field",
    ),
)

CHECKS = (
    Mutation(
        "single errors may lie beyond the bound",
        "rayk/experiments/noise.py",
        "if not bound.quantiles and bool((errors > bound.worst).any()):",
        "if not bound.quantiles and bool((errors > bound.worst).all()):",
        f"{LOGPROBS}::test_what_the_bounds_let_through",
    ),
    Mutation(
        "small errors everywhere are let through",
        "rayk/experiments/noise.py",
        "(RMS_FACTOR + RMS_SPREAD / root)",
        "100",
        f"{LOGPROBS}::test_what_the_bounds_let_through",
    ),
    Mutation(
        "routed errors are judged one by one",
        "rayk/experiments/noise.py",
        "if not bound.quantiles and bool((errors > bound.worst).any()):",
        "if bool((errors > bound.worst).any()):",
        f"{LOGPROBS}::test_flipped_routes_are_let_through_and_a_lost_head_is_not",
    ),
    Mutation(
        "greedy choices are not compared",
        "rayk/experiments/logprobs.py",
        "found = _tensor(gaps)",
        "found = 0 * _tensor(gaps)",
        f"{LOGPROBS}::test_what_the_bounds_let_through",
    ),
    Mutation(
        "a head is compared with its neighbour",
        "rayk/experiments/compare.py",
        "errors = row_errors(values, truth[name][head])",
        "errors = row_errors(values, truth[name][head - 1])",
        "tests/experiments/test_verdict.py::test_equal_caches_have_no_difference",
    ),
    Mutation(
        "sliding rows are named from zero",
        "rayk/experiments/compare.py",
        "wrong.first_token + int(rows[0])",
        "int(rows[0])",
        "tests/experiments/test_verdict.py::test_sliding_rows_are_named_by_their_position",
    ),
    Mutation(
        "keys are un-rotated the wrong way round",
        "rayk/experiments/culprit.py",
        "_turn(values, rope, -keys.tokens)",
        "_turn(values, rope, keys.tokens)",
        f"{CULPRIT}::test_mistakes_in_keys",
    ),
    Mutation(
        "speeds are known but for whole turns",
        "rayk/experiments/culprit.py",
        "speed = (over + 2 * math.pi * turns) / step",
        "speed = over / step",
        f"{CULPRIT}::test_mistakes_in_keys",
    ),
)

MUTATIONS = (
    ATTENTION
    + KV
    + TRANSFER
    + CHECKS
    + SAMPLING
    + STATES
    + ENGINE
    + MODELS
    + SIMULATED
    + STAGED_READS
    + PUSHED
    + BENCH
    + SERVED
    + POLICIES
    + FRONTS
    + HTTP
    + PREFIXES
    + TIMES
    + VIEWS
    + SWAPPING
    + DASHBOARDS
    + METERS
    + ON_DISK
    + OFFLOADED
    + TIERS
    + COMPARED
    + STAGE_TIMES
)
