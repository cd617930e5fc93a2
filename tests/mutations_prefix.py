"""Bugs to plant in the prefix cache and in what heeds it, and the test that must notice each."""

from __future__ import annotations

from tests.mutation import Mutation

POOL = "tests/kv/test_block_pool.py"
CACHE = "tests/kv/test_prefix_cache.py"
ENGINE = "tests/engine/test_prefix_caching.py"
HANDOVER = "tests/actors/test_prefix_handover.py"
END_TO_END = "tests/test_prefix_end_to_end.py"
SCHEDULES = "tests/actors/test_prefix_schedules.py"

PREFIXES = (
    Mutation(
        "the newest kept block goes first",
        "rayk/kv/block_pool.py",
        "when = np.where(self._kept[free], self._freed_at[free], 0)",
        "when = np.where(self._kept[free], -self._freed_at[free], 0)",
        f"{POOL}::test_kept_blocks_are_lost_last_and_the_oldest_first",
    ),
    Mutation(
        "a lost block can still be found",
        "rayk/kv/block_pool.py",
        "            if self._on_lost is not None:",
        "            if self._on_lost is None:",
        f"{CACHE}::TestCacheWalk",
    ),
    Mutation(
        "a block found again stays free",
        "rayk/kv/block_pool.py",
        "            self._references[block] += 1\n            self._free[block] = False",
        "            self._references[block] += 1",
        f"{POOL}::test_kept_blocks_are_lost_last_and_the_oldest_first",
    ),
    Mutation(
        "keys know a block's tokens only",
        "rayk/kv/prefix_cache.py",
        "            self._num_hashed = end",
        "            self._num_hashed, self._hash = end, hashlib.blake2b(key=_SECRET)",
        f"{CACHE}::test_keys_depend_on_every_token_and_on_nothing_else",
    ),
    Mutation(
        "a hit lacks its last window",
        "rayk/kv/prefix_cache.py",
        "return n if found[at].stop == wanted.stop else",
        "return n if num_found else",
        f"{CACHE}::TestCacheWalk",
    ),
    Mutation(
        "a gap hides shorter prefixes that end before the window",
        "rayk/kv/prefix_cache.py",
        "n if fits == n else max(fits, nothing_until(lane))",
        "fits",
        f"{CACHE}::test_a_state_that_is_missing_does_not_hide_what_needs_none",
    ),
    Mutation(
        "rows that never arrived are found",
        "rayk/kv/block_tables.py",
        "return tuple(0 if row <= first else min(row, stop) for row in since)",
        "return tuple(0 if row < stop else stop for row in since)",
        f"{CACHE}::test_blocks_of_which_only_some_rows_arrived_serve_those_who_need_no_more",
    ),
    Mutation(
        "windows are gone on from where they never arrived",
        "rayk/kv/prefix_cache.py",
        "return lane is not None and bool(since) and since[lane] > first",
        "return False",
        f"{CACHE}::test_blocks_of_which_only_some_rows_arrived_serve_those_who_need_no_more",
    ),
    Mutation(
        "a block that lacks rows stands for one that has all",
        "rayk/kv/manager.py",
        "if outdone is not None and outdone != block:",
        "if False:",
        f"{CACHE}::test_blocks_of_which_only_some_rows_arrived_serve_those_who_need_no_more",
    ),
    Mutation(
        "a block that is written is found",
        "rayk/kv/manager.py",
        "            num_full = num_computed_tokens // g.spec.block_size",
        "            num_full = min(len(t.blocks), -(-num_computed_tokens // g.spec.block_size))",
        f"{CACHE}::TestCacheWalk",
    ),
    Mutation(
        "the last token's logits are taken from the cache",
        "rayk/sched/batching.py",
        "            return len(self.tokens) - 1\n        return",
        "            return len(self.tokens)\n        return",
        f"{ENGINE}::test_a_prompt_that_came_before_is_taken_from_the_cache",
        needs_fixtures=True,
    ),
    Mutation(
        "prompt logprobs of cached tokens are left out",
        "rayk/sched/batching.py",
        "        return len(self.prompt_logprobs) - 1\n",
        "        return len(self.tokens) - 1\n",
        f"{ENGINE}::test_what_tells_of_the_prompt_is_computed",
        needs_fixtures=True,
    ),
    Mutation(
        "a request that finds no room keeps what it found",
        "rayk/sched/batching.py",
        "                    self.allocator.unmatch(state.request_id)\n",
        "",
        f"{ENGINE}::test_many_requests_in_a_small_pool[qwen3-0]",
        needs_fixtures=True,
    ),
    Mutation(
        "cached blocks are handed out anew while they are leased",
        "rayk/sched/batching.py",
        "held = tuple(start for start, _ in updates)",
        "held = tuple(0 * start for start, _ in updates)",
        f"{HANDOVER}::test_leases_keep_cached_blocks_from_others",
        needs_fixtures=True,
    ),
    Mutation(
        "a push leaves out what was cached",
        "rayk/actors/pushing.py",
        "return 0 if is_first else share.num_computed_tokens",
        "return share.num_computed_tokens",
        f"{HANDOVER}::test_a_push_brings_what_the_prefill_engine_had_cached_and_the_decode_engine_had_not[qwen3]",
        needs_fixtures=True,
    ),
    Mutation(
        "what the consumer holds is pushed into blocks that others share",
        "rayk/transfer/push.py",
        "range(min(action.stop, max(action.start, reservation.num_held_tokens)), action.stop)",
        "range(action.start, action.stop)",
        f"{HANDOVER}::test_a_push_brings_what_the_prefill_engine_had_cached_and_the_decode_engine_had_not[qwen3]",
        needs_fixtures=True,
    ),
    Mutation(
        "what is held is moved all the same",
        "rayk/transfer/consumer.py",
        "rows = range(self.first_row, ticket.num_tokens) if self.first_row else None",
        "rows = None",
        f"{END_TO_END}::test_what_the_decode_engine_holds_is_not_moved",
        needs_fixtures=True,
    ),
    Mutation(
        "held rows are not proven by those that move",
        "rayk/transfer/verify.py",
        "moved = words.row_group >= first_row // rows_per_group",
        "moved = words.row_group >= 0",
        f"{END_TO_END}::test_what_the_decode_engine_holds_is_not_moved",
        needs_fixtures=True,
    ),
    Mutation(
        "what is computed anew is written into held blocks",
        "rayk/actors/receiving.py",
        "if num_valid < incoming.held.num_tokens:",
        "if False:",
        f"{HANDOVER}::test_where_windows_are_missing_the_cache_is_asked_again",
        needs_fixtures=True,
    ),
    Mutation(
        "held rows are converted again",
        "rayk/transfer/convert.py",
        "rows = range(max(live.start, first_row), live.stop)",
        "rows = range(live.start, live.stop)",
        f"{HANDOVER}::test_what_is_converted_on_its_way_is_held_too",
        needs_fixtures=True,
    ),
    Mutation(
        "what is held is handed out before it is used",
        "rayk/kv/manager.py",
        "            self.pool.share(here)\n",
        "",
        f"{SCHEDULES}::test_conversations_whatever_comes_together[qwen3-5]",
        needs_fixtures=True,
    ),
    Mutation(
        "keys of requests that were handed over are kept",
        "rayk/kv/manager.py",
        "        self._keys.pop(request_id, None)\n        self._leases[lease_id]",
        "        self._leases[lease_id]",
        f"{SCHEDULES}::test_conversations_whatever_comes_together[qwen3-5]",
        needs_fixtures=True,
    ),
)
