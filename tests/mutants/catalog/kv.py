"""Bugs of where KV lies, and of who holds which block."""

from __future__ import annotations

from dataclasses import replace

from tests.mutants.mutant import Catalog

KV = Catalog("tests/kv")


@KV.twin(
    "every row of a block lies where the first one does",
    "rayk.kv.geometry:FieldGeometry.address",
    "test_geometry.py::test_every_address_is_where_the_layout_puts_it",
)
def _(original, self, position, block, slot, row):
    return original(self, position, block, slot, 0 * row)


@KV.twin(
    "heads are taken by place instead of id",
    "rayk.kv.maps:match_rows",
    "test_maps.py::test_match_rows_between_unlike_shards_kernel_blocks_and_rows",
)
def _(original, source, destination, units, **rows):
    turned = tuple(replace(field, units=field.units[::-1]) for field in source.fields)
    return original(replace(source, fields=turned), destination, units, **rows)


@KV.twin(
    "a shared block is free after one holder",
    "rayk.kv.block_pool:BlockPool.share",
    "test_block_pool.py::test_references_are_counted",
)
def _(original, self, block_ids):
    original(self, [block for block in block_ids if not self.references(block)])


@KV.twin(
    "of kept blocks the newest go first",
    "rayk.kv.block_pool:BlockPool.free",
    "test_block_pool.py::test_kept_blocks_are_lost_last_and_the_oldest_first",
)
def _(original, self, block_ids):
    original(self, tuple(block_ids)[::-1])


@KV.twin(
    "names of blocks do not know a sequence's first token",
    "rayk.kv.prefix_cache:PrefixKeys.extend",
    "test_prefix_cache.py::test_keys_depend_on_every_token_and_on_nothing_else",
)
def _(original, self, token_ids, num_tokens):
    original(self, [0, *token_ids[1:]], num_tokens)


@KV.twin(
    "rows that never arrived are found",
    "rayk.kv.prefix_cache:CachedPrefixes.blocks",
    "test_prefix_cache.py::test_blocks_of_which_only_some_rows_arrived_serve_those_who_need_no_more",
)
def _(original, self, group, keys, wanted, lane=None, elsewhere=None):
    return original(self, group, keys, wanted, None, elsewhere)


@KV.twin(
    "blocks under a lease are handed out",
    "rayk.kv.manager:KVCacheManager.lease",
    "test_manager.py::test_leased_blocks_are_not_reused_before_release",
)
def _(original, self, request_id, lease_id):
    blocks = [block for table in self.block_tables(request_id) for block in table]
    original(self, request_id, lease_id)
    self.pool.free(blocks)


@KV.twin(
    "a block that is still in the window is given back",
    "rayk.kv.manager:KVCacheManager.trim",
    "test_manager.py::TestManagerWalk",
)
def _(original, self, request_id, num_computed_tokens):
    pairs = zip(self.groups, self.block_tables(request_id), strict=True)
    num_rows = min(len(table) * group.spec.block_size for group, table in pairs)
    original(self, request_id, min(num_rows, num_computed_tokens + 16))


@KV.twin(
    "layers that read another one's cache are not bound to it",
    "rayk.kv.caches:CanonicalKVCaches.bind",
    "test_sharing.py::test_a_reader_sees_its_targets_memory",
)
def _(original, self, owners, readers=()):
    original(self, owners)


@KV.twin(
    "reused blocks keep their generation",
    "rayk.kv.caches:CanonicalKVCaches.bump_generations",
    "../transfer/test_rank.py::test_a_block_reused_while_being_read_is_named",
)
def _(original, self, block_ids):
    original(self, ())


@KV.twin(
    "the window is one token too long",
    "rayk.kv.specs:SlidingWindowSpec.live_rows",
    "test_specs.py::test_live_rows_are_what_a_later_token_sees",
)
def _(original, self, num_tokens):
    return range(max(0, original(self, num_tokens).start - 1), num_tokens)


KV.constant(
    "blocks cost nothing but their bytes when layers are grouped",
    "rayk.kv.groups:BLOCK_COST_BYTES",
    0,
    "test_groups.py::test_beaten_groupings",
)


@KV.twin(
    "kernel blocks are not held to chunks",
    "rayk.kv.kernel_blocks:kernel_block_sizes",
    "test_chunked_plans.py::test_kernel_blocks_are_the_largest_that_chunks_begin_with",
)
def _(original, groups, default, by_kind, chunks=None):
    return original(groups, default, by_kind)


@KV.twin(
    "a layer may share whichever cache it likes",
    "rayk.models.config:why_bad_source",
    "test_sharing.py::test_what_a_layer_may_not_use_is_refused_by_name",
)
def _(original, layers, index):
    return None
