"""Bugs to plant, and the test that must notice each. Run by mutants.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One textual change; `old` stands exactly once in `file`."""

    name: str
    file: str
    old: str
    new: str
    test: str
    """pytest node id of the test that must fail."""


GEOMETRY = "tests/kv/test_geometry.py"
MAPS = "tests/kv/test_maps.py"
CACHES = "tests/kv/test_caches.py"
MANAGER = "tests/kv/test_manager.py"
PLAN = "tests/transfer/test_plan.py"
RANK = "tests/transfer/test_rank.py"
GUARDS = "tests/transfer/test_guards.py"
LOGPROBS = "tests/experiments/test_logprobs.py"
CULPRIT = "tests/experiments/test_culprit.py"

KV = (
    Mutation(
        "axes laid out innermost first",
        "rayk/kv/layout.py",
        "for axis in reversed(self.name):",
        "for axis in self.name:",
        "tests/kv/test_layout.py::test_strides_are_numpys",
    ),
    Mutation(
        "V laid over K",
        "rayk/kv/geometry.py",
        "        offset += f.row_bytes\n",
        "        offset += 0\n",
        f"{GEOMETRY}::test_every_address_is_where_the_layout_puts_it",
    ),
    Mutation(
        "padded block stride of one position",
        "rayk/kv/geometry.py",
        'strides["B"] = padded_page_bytes * group.num_positions // ratio',
        'strides["B"] = padded_page_bytes // ratio',
        f"{GEOMETRY}::test_every_address_is_where_the_layout_puts_it",
    ),
    Mutation(
        "padded layer stride a block short",
        "rayk/kv/geometry.py",
        'strides["L"] = padded_page_bytes * num_blocks',
        'strides["L"] = padded_page_bytes * (num_blocks - 1)',
        f"{GEOMETRY}::test_a_block_is_the_same_bytes_in_every_group",
    ),
    Mutation(
        "kernel blocks forgotten in the B axis",
        "rayk/kv/geometry.py",
        '"B": num_blocks * ratio,',
        '"B": num_blocks,',
        f"{GEOMETRY}::test_every_address_is_where_the_layout_puts_it",
    ),
    Mutation(
        "describe gives kernel rows",
        "rayk/kv/geometry.py",
        'row=found["block"] % ratio * group.kernel_block_size + found["row"],',
        'row=found["row"],',
        f"{GEOMETRY}::test_describe_names_every_byte_and_padding_has_no_name",
    ),
    Mutation(
        "describe names padding",
        "rayk/kv/geometry.py",
        "if rest >= field.field.row_bytes:",
        "if rest > field.field.row_bytes:",
        f"{GEOMETRY}::test_describe_names_every_byte_and_padding_has_no_name",
    ),
    Mutation(
        "LHBNC accepts unlike groups",
        "rayk/kv/geometry.py",
        'if layout.name == "LHBNC" and len(shapes) > 1:',
        'if layout.name == "LHBNC" and len(shapes) > 2:',
        f"{GEOMETRY}::test_only_lhbnc_refuses_unlike_groups",
    ),
    Mutation(
        "generations overlap the pages",
        "rayk/kv/geometry.py",
        "return -(-self.pages_bytes // 64) * 64",
        "return self.pages_bytes // 64 * 64",
        f"{CACHES}::test_generations_lie_in_the_buffer_behind_the_pages",
    ),
    Mutation(
        "pages not aligned to every group's elements",
        "rayk/kv/geometry.py",
        "page = -(-page // alignment) * alignment",
        "page = max(page, alignment)",
        f"{CACHES}::test_views_lie_where_the_layout_puts_them",
    ),
    Mutation(
        "runs joined where one side continues",
        "rayk/kv/maps.py",
        "(source[1:] != source[:-1] + lengths[:-1]) | (",
        "(source[1:] != source[:-1] + lengths[:-1]) & (",
        f"{MAPS}::test_coalesce_joins_only_what_continues_on_both_sides",
    ),
    Mutation(
        "heads taken by place instead of id",
        "rayk/kv/maps.py",
        "slots = np.array([slot_of[u] for u in units], dtype=np.int64)",
        "slots = np.array([slot_of[u] and i for i, u in enumerate(units)], dtype=np.int64)",
        f"{MAPS}::test_match_rows_between_unlike_shards_kernel_blocks_and_rows",
    ),
    Mutation(
        "rows cross kernel blocks by the row stride",
        "rayk/kv/maps.py",
        "in_block = kernel_block * field.block_stride + row * field.row_stride",
        "in_block = rows * field.row_stride",
        f"{MAPS}::test_page_map_names_the_canonical_byte_of_every_byte",
    ),
    Mutation(
        "window one token too long",
        "rayk/kv/specs.py",
        "num_tokens + 1 - self.window",
        "num_tokens - self.window",
        "tests/kv/test_specs.py::test_live_rows_are_what_a_later_token_sees",
    ),
    Mutation(
        "window blocks counted as if aligned",
        "rayk/kv/specs.py",
        "min(whole, 1 + -(-(rows - 1) // spec.block_size))",
        "min(whole, -(-rows // spec.block_size))",
        "tests/kv/test_specs.py::test_published_window_block_counts",
    ),
    Mutation(
        "layers dealt in stretches",
        "rayk/kv/groups.py",
        "tuple(layers[i::num_groups])",
        "tuple(layers[i * size : (i + 1) * size])",
        "tests/kv/test_groups.py::test_published_dealing",
    ),
    Mutation(
        "a shared block is free after one holder",
        "rayk/kv/block_pool.py",
        "self._free[block] = self._references[block] == 0",
        "self._free[block] = True",
        "tests/kv/test_block_pool.py::test_references_are_counted",
    ),
    Mutation(
        "a run with gaps follows",
        "rayk/kv/block_pool.py",
        "run[-1] == after + num_blocks:",
        "run[-1] >= after + num_blocks:",
        "tests/kv/test_block_pool.py::test_allocation_prefers_consecutive_ids",
    ),
    Mutation(
        "trim frees a block still in the window",
        "rayk/kv/manager.py",
        "first = g.spec.live_rows(num_computed_tokens).start // g.spec.block_size",
        "first = -(-g.spec.live_rows(num_computed_tokens).start // g.spec.block_size)",
        f"{MANAGER}::TestManagerWalk",
    ),
    Mutation(
        "a shortage noticed per group only",
        "rayk/kv/manager.py",
        "if sum(missing) > self.pool.num_free_blocks:",
        "if max(missing) > self.pool.num_free_blocks:",
        f"{MANAGER}::test_short_of_blocks_changes_nothing",
    ),
    Mutation(
        "a leased request can still be freed",
        "rayk/kv/manager.py",
        "[t.blocks for t in self._tables.pop(request_id)]",
        "[t.blocks for t in self._tables[request_id]]",
        f"{MANAGER}::test_leased_blocks_are_not_reused_before_release",
    ),
    Mutation(
        "every layer gets the first one's view",
        "rayk/kv/caches.py",
        "offset = field.offset + position * field.layer_stride",
        "offset = field.offset + 0 * position",
        f"{CACHES}::test_views_lie_where_the_layout_puts_them",
    ),
    Mutation(
        "references include padding positions",
        "rayk/kv/caches.py",
        "used = [len(g.group.layers) * per_position",
        "used = [g.group.num_positions * per_position",
        f"{CACHES}::test_tensors_cover_all_pages_once_and_references_hold_their_blocks",
    ),
    Mutation(
        "bind passes over missing layers",
        "rayk/kv/caches.py",
        "assert cached == set(layers)",
        "assert cached >= set(layers)",
        f"{CACHES}::test_bind_refuses_other_layers_and_binds_none",
    ),
)

TRANSFER = (
    Mutation(
        "all readers use the first replica",
        "rayk/transfer/plan.py",
        "return holders[readers.index(consumer.tp_rank) * len(holders) // len(readers)]",
        "return holders[0]",
        f"{PLAN}::test_readers_are_spread_over_replicas",
    ),
    Mutation(
        "a rank without the unit is elected",
        "rayk/transfer/plan.py",
        "if unit in side.fields[0].units]",
        "if side.fields[0].units]",
        f"{PLAN}::test_all_layout_pairs",
    ),
    Mutation(
        "rows cut at the consumer's blocks only",
        "rayk/transfer/plan.py",
        "for size in {source_block_size, destination_block_size}",
        "for size in {destination_block_size}",
        f"{PLAN}::test_live_rows_arrive_for_any_blocks_groups_and_windows",
    ),
    Mutation(
        "last block dropped when it holds one row",
        "rayk/transfer/plan.py",
        "np.arange(live.start // size * size, live.stop, size, dtype=np.int64)",
        "np.arange(live.start // size * size, live.stop - 1, size, dtype=np.int64)",
        f"{PLAN}::test_live_rows_arrive_for_any_blocks_groups_and_windows",
    ),
    Mutation(
        "source and destination swapped",
        "rayk/transfer/plan.py",
        "            source,\n            destination,\n            read.units,",
        "            destination,\n            source,\n            read.units,",
        f"{PLAN}::test_all_layout_pairs",
    ),
    Mutation(
        "block strides swapped",
        "rayk/transfer/plan.py",
        "strides = block_stride(source), block_stride(destination)",
        "strides = block_stride(destination), block_stride(source)",
        f"{PLAN}::test_all_layout_pairs",
    ),
    Mutation(
        "source indices counted in the consumer's blocks",
        "rayk/transfer/plan.py",
        "source = runs * num_source_blocks",
        "source = runs * num_destination_blocks",
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
        "np.argwhere(theirs != ours)",
        "np.argwhere((theirs != ours) & (np.arange(theirs.shape[1]) > 0)[None, :, None])",
        f"{RANK}::test_a_mismatch_keeps_the_lease_until_it_is_given_up",
    ),
    Mutation(
        "digests stay in a block's first kernel block",
        "rayk/transfer/verify.py",
        "ids = table[block] * view.kernel_blocks_per_block + kernel_block",
        "ids = table[block] * view.kernel_blocks_per_block",
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
        "me.base_address + runs.destination",
        "me.base_address + runs.source",
        f"{RANK}::test_all_layout_pairs",
    ),
    Mutation(
        "reused blocks keep their generation",
        "rayk/transfer/rank.py",
        "self._caches.generations[ids] += 1",
        "self._caches.generations[ids] += 0",
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
        "if lease.deadline_ns is not None and lease.deadline_ns <= now_ns",
        "if lease.deadline_ns is None",
        f"{GUARDS}::test_a_lease_nobody_releases_expires_once_at_its_deadline",
    ),
    Mutation(
        "the KV dtype is not compared",
        "rayk/transfer/handshake.py",
        '    yield "kv_dtype", description.kv_dtype\n',
        "",
        f"{GUARDS}::test_every_field_that_must_agree_is_compared",
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
        "str(group.spec.live_rows(1_000_000))",
        "str(group.spec.live_rows(1_000_000).stop)",
        f"{GUARDS}::test_every_group_is_compared_field_by_field",
    ),
)

CHECKS = (
    Mutation(
        "any number of errors may lie beyond the bound",
        "rayk/experiments/noise.py",
        "if int(beyond.sum()) > bound.num_outliers(errors.numel()):",
        "if int(beyond.sum()) > errors.numel():",
        f"{LOGPROBS}::test_what_the_bounds_let_through",
    ),
    Mutation(
        "small errors everywhere are let through",
        "rayk/experiments/noise.py",
        "factor = RMS_FACTOR + RMS_SPREAD / math.sqrt(max(1, num_values))",
        "factor = 100.0",
        f"{LOGPROBS}::test_what_the_bounds_let_through",
    ),
    Mutation(
        "flipped routes widen the bound",
        "rayk/experiments/noise.py",
        "BULK_QUANTILE if routed else 1.0",
        "1.0",
        f"{LOGPROBS}::test_flipped_routes_are_let_through_and_a_lost_head_is_not",
    ),
    Mutation(
        "greedy choices are not compared",
        "rayk/experiments/logprobs.py",
        "if not gap <= tolerance]",
        "if not gap <= 1e9]",
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

MUTATIONS = KV + TRANSFER + CHECKS
