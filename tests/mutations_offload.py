"""Bugs to plant in the host tier; see mutations.py."""

from __future__ import annotations

from tests.mutation import Mutation

HOST = "rayk/offload/host.py"
PAGES = "rayk/offload/pages.py"
WORDS = "rayk/offload/block_digests.py"
BY_BLOCK = "tests/offload/test_block_digests.py"
PAIRS = "tests/offload/test_pairs.py"
TIER = "tests/offload/test_tier.py"
ROWS = "tests/offload/test_tier_rows.py"
WALK = "tests/offload/test_walk.py"

OFFLOADED = (
    Mutation(
        "what is lent is digested as it is now",
        HOST,
        "self._digests.recall(tables",
        "self._digests.prove(tables",
        f"{BY_BLOCK}::test_pages_that_change_in_host_memory_are_not_served_and_then_forgotten",
    ),
    Mutation(
        "digests outlive what was in a block",
        HOST,
        "        self._digests.forget(block_ids)\n",
        "",
        f"{BY_BLOCK}::test_pages_from_disk_are_not_taken_for_what_was_in_their_blocks",
    ),
    Mutation(
        "pages that changed are found again",
        HOST,
        "num_gone = self.manager.forget(changed)",
        "num_gone = len(changed)",
        f"{BY_BLOCK}::test_pages_that_change_in_host_memory_are_not_served_and_then_forgotten",
    ),
    Mutation(
        "words count whatever rows of a cell they are of",
        WORDS,
        "self._keep(kept, span, part, added) - taken",
        "self._keep(kept, span, part, added)",
        f"{BY_BLOCK}::test_they_are_those_of_the_rows_however_much_is_known",
    ),
    Mutation(
        "rows between known and wanted ones are left out",
        WORDS,
        "added = [[low, first], [last, high]]",
        "added = [[low, np.minimum(high, first)], [np.maximum(low, last), high]]",
        f"{BY_BLOCK}::test_they_are_those_of_the_rows_however_much_is_known",
    ),
    Mutation(
        "a block that is cut is digested as it is now",
        WORDS,
        "is_known = known[:, 1] > known[:, 0]",
        "is_known = (known == wanted).all(axis=1)",
        f"{BY_BLOCK}::test_a_changed_row_of_a_window_that_begins_within_a_block_is_not_served",
    ),
    Mutation(
        "what is proven anew takes the place of what is known",
        WORDS,
        "np.where(part.is_known[span.block], rest, found)",
        "found - kept.words[span.ids[span.block], span.within].T",
        f"{BY_BLOCK}::test_a_change_is_lent_to_nobody_whatever_prefix_is_asked_for",
    ),
    Mutation(
        "words of a block's parts are one",
        WORDS,
        "within = np.arange(cells.start, cells.stop) - block * (size // cell)",
        "within = 0 * block",
        f"{BY_BLOCK}::test_they_are_those_of_the_rows_however_much_is_known",
    ),
    Mutation(
        "stores are read from the first replicas only",
        HOST,
        "            self._reads[engine] += 1\n",
        "",
        f"{TIER}::test_replicas_are_read_in_turns",
    ),
    Mutation(
        "lookups take a replica's turn",
        HOST,
        "turn = self._reads[engine] % self._turns[engine]",
        "turn = next(self._numbers) % self._turns[engine]",
        f"{TIER}::test_replicas_are_read_in_turns",
    ),
    Mutation(
        "blocks that a store fills keep their generations",
        HOST,
        "self._hand_out([b for table in tables for b in table if b and b not in here])",
        "self._hand_out([])",
        f"{ROWS}::test_a_load_that_comes_after_its_lease_is_told_that_the_blocks_were_reused",
    ),
    Mutation(
        "blocks that a store shares get new generations",
        HOST,
        "for b in table if b and b not in here])",
        "for b in table if b or b in here])",
        f"{ROWS}::test_a_load_is_not_disturbed_by_a_longer_store_of_the_same",
    ),
    Mutation(
        "a changed ticket is stored",
        HOST,
        "if not is_whole(ticket):",
        "if is_whole(ticket) is None:",
        f"{TIER}::test_a_ticket_that_was_changed_on_the_way_is_refused_and_stores_nothing",
    ),
    Mutation(
        "tickets of an earlier life are taken",
        HOST,
        "if self._epochs.get(engine) != ticket.epoch or name in self._storing:",
        "if engine not in self._epochs or name in self._storing:",
        f"{TIER}::test_a_ticket_of_another_life_or_of_a_stranger_is_refused",
    ),
    Mutation(
        "a missing beginning is not asked about",
        HOST,
        "if held.num_tokens < ticket.first_row:",
        "if held.num_tokens < 0:",
        f"{TIER}::test_a_store_whose_beginning_is_gone_is_refused",
    ),
    Mutation(
        "what is there is stored again",
        HOST,
        "if ask.keep_as is None and self._has_all(name, tokens, num_tokens):",
        "if ask.keep_as is None and False:",
        f"{PAIRS}::test_nothing_is_stored_twice",
    ),
    Mutation(
        "storing what is there is no use of it",
        HOST,
        "if found.num_tokens < num_tokens or self.manager.adopt(name, found) is None:",
        "if found.num_tokens < num_tokens:",
        f"{TIER}::test_what_was_used_longest_ago_goes_first",
    ),
    Mutation(
        "a refused store leaves the engine's lease open",
        HOST,
        "        if can_release:\n            self._let_go(storing.ask.ticket)\n",
        "",
        f"{TIER}::test_no_room_where_all_is_read_or_kept",
    ),
    Mutation(
        "blocks come free while a read that failed still writes",
        HOST,
        "            if outcome.is_draining:\n",
        "            if outcome.is_draining and not outcome.rows:\n",
        f"{TIER}::test_a_store_that_never_comes_holds_its_blocks_until_nothing_writes_there",
    ),
    Mutation(
        "a store that was not proven is remembered",
        HOST,
        "        if outcome.error is not None:\n",
        "        if outcome.error is not None and not isinstance(outcome.error, KVMismatch):\n",
        f"{TIER}::test_a_flipped_bit_on_the_way_in_is_seen_and_nothing_is_kept",
    ),
    Mutation(
        "kept sequences outlive their engine",
        HOST,
        "[k for k, (whose, _) in self._kept.items() if whose == engine]",
        "[k for k, (whose, _) in self._kept.items() if whose is None]",
        f"{TIER}::test_kept_sequences_are_dropped_by_name_and_by_the_end_of_their_engine",
    ),
    Mutation(
        "what is dropped on its way in is kept",
        HOST,
        "            if storing.ask.keep_as == kept_as:\n",
        "            if storing.ask.keep_as is None:\n",
        f"{ROWS}::test_a_kept_sequence_that_is_dropped_on_its_way_in_is_not_kept",
    ),
    Mutation(
        "leases of loads never end",
        HOST,
        "for lease_id in self.rank.expired(now):",
        "for lease_id in self.rank.expired(0):",
        f"{TIER}::test_what_is_offered_and_never_read_comes_free_when_its_lease_ends",
    ),
    Mutation(
        "what an engine holds is offered again",
        HOST,
        "self._lend(loading, name, found.num_tokens, ask.held_tokens)",
        "self._lend(loading, name, found.num_tokens, 0)",
        f"{ROWS}::test_what_an_engine_holds_is_not_loaded_again",
    ),
    Mutation(
        "offers that bring too little are made",
        HOST,
        "if found.num_tokens < ask.held_tokens + ask.min_tokens:",
        "if found.num_tokens < ask.held_tokens:",
        f"{ROWS}::test_what_an_engine_holds_is_not_loaded_again",
    ),
    Mutation(
        "blocks that a load brought back have no name",
        HOST,
        "            self.manager.remember(name, loading.ask.token_ids, found.num_tokens)\n",
        "",
        f"{TIER}::test_pages_on_disk_are_found_by_a_tier_of_another_layout_after_a_restart",
    ),
    Mutation(
        "a page of a window's last rows is named as a whole one",
        PAGES,
        "rows if any(rows) else ()",
        "()",
        f"{ROWS}::test_rows_that_were_never_stored_are_not_served",
    ),
    Mutation(
        "a page on disk keeps the padding of the tier that wrote it",
        PAGES,
        "page[to : to + length] = buffer[source : source + length]",
        "page[to : to + length] = buffer[int(runs.source[0]) + to : int(runs.source[0]) + to + length]",
        f"{TIER}::test_pages_on_disk_are_found_by_a_tier_of_another_layout_after_a_restart",
    ),
    Mutation(
        "pages that the disk lost are asked for again",
        PAGES,
        "if found is not None and PageName(group, key, found) not in self._disk:",
        "if found is not None and PageName(group, key, found) not in self._disk and found:",
        "tests/offload/test_pages.py::test_a_page_that_the_disk_gave_up_is_known_no_more",
    ),
)
