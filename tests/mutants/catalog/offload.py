"""Bugs of the host tier, its disk, and of what engines do with it."""

from __future__ import annotations

from tests.mutants.mutant import Catalog

OFFLOAD = Catalog("tests/offload")


@OFFLOAD.twin(
    "a page whose bits flipped is served",
    "rayk.offload.page_file:check_page",
    "test_disk_faults.py::test_every_damaged_file_is_reported_and_none_is_served",
)
def _(original, *args):
    return original(*args).replace("flipped", "")


@OFFLOAD.twin(
    "the identity of pages forgets what engines compute in",
    "rayk.offload.pages:identity_of",
    "test_identity.py::test_engines_of_another_dtype_find_nothing_in_a_folder",
)
def _(original, groups, like, dtype):
    return original(groups, like, "any")


@OFFLOAD.twin(
    "a second owner of a folder is let in",
    "rayk.offload.disk_folder:_wait_for_lock",
    "test_disk.py::test_a_second_process_is_refused_and_other_pages_are_apart",
)
def _(original, descriptor):
    return None


@OFFLOAD.twin(
    "a page that is being read is evicted",
    "rayk.offload.disk:DiskTier.get",
    "test_disk.py::test_a_page_being_read_is_not_evicted",
)
def _(original, self, names, into, done):
    original(self, names, into, done)
    for page in self._pages.values():
        page.num_readers = 0


@OFFLOAD.twin(
    "pages that changed in memory are written to disk",
    "rayk.offload.pages:DiskPages.write",
    "test_pages.py::test_a_page_that_changed_in_host_memory_is_not_written",
)
def _(original, self, host, name, token_ids, num_tokens, num_known_tokens):
    return original(self, host, name, token_ids, num_tokens, 0)


@OFFLOAD.twin(
    "what is lent is digested as it is now",
    "rayk.offload.block_digests:BlockDigests.recall",
    "test_block_digests.py::test_pages_that_change_in_host_memory_are_not_served_and_then_forgotten",
)
def _(original, self, tables, num_tokens, first_row=0):
    return self.prove(tables, num_tokens, first_row)


@OFFLOAD.twin(
    "a ticket that was changed on the way is stored",
    "rayk.offload.host:is_whole",
    "test_tier.py::test_a_ticket_that_was_changed_on_the_way_is_refused_and_stores_nothing",
)
def _(original, ticket):
    return True


@OFFLOAD.twin(
    "failures are never left alone for a while",
    "rayk.offload.backoff:Backoff.may_try",
    "test_backoff.py::test_pauses_double_up_to_the_longest_and_one_is_tried_after_each",
)
def _(original, self, now_ns):
    return True


@OFFLOAD.twin(
    "a swap need not come back",
    "rayk.offload.costs:CostModel.swap",
    "test_costs.py::test_the_choice_is_the_cheaper_one_but_near_the_break_even",
)
def _(original, self, bytes_out, bytes_in, num_tokens, setting="auto"):
    return original(self, bytes_out, 0, num_tokens, setting)


@OFFLOAD.twin(
    "word of a lost tier's end ends the next one",
    "rayk.handover.offloading:Offloading.lost",
    "test_faults.py::test_word_of_a_lost_tiers_end_does_not_end_the_next_one",
)
def _(original, self, why, epoch=None):
    original(self, why)


@OFFLOAD.twin(
    "the blocks of a store that failed stay held",
    "rayk.handover.storing:Storing.end_all",
    "test_faults.py::test_a_tier_that_is_killed_in_the_middle_of_stores",
)
def _(original, self):
    return None


@OFFLOAD.twin(
    "blocks of an outbox are handed out uncounted",
    "rayk.offload.outbox:Outbox.hand_out",
    "test_outbox.py::test_blocks_that_are_handed_out_again_spoil_a_late_read_only",
)
def _(original, self, tables):
    before = self.caches.generations.clone()
    original(self, tables)
    self.caches.generations.copy_(before)
    return tuple(tuple(before.numpy()[list(table)].tolist()) for table in tables)


@OFFLOAD.twin(
    "a store's own blocks stay held until the tier has read its copy",
    "rayk.handover.storing:Storing._leave",
    "test_outbox_engines.py::test_blocks_are_free_when_they_are_copied_not_when_the_tier_has_read_them",
)
def _(original, self, store):
    if store.name not in self._stores:
        original(self, store)


@OFFLOAD.twin(
    "blocks of outboxes are not given back",
    "rayk.handover.outbox_room:OutboxRoom.give_back",
    "test_outbox_engines.py::test_a_tier_that_dies_leaves_outboxes_empty",
)
def _(original, self, tables):
    return None


@OFFLOAD.twin(
    "a tier knows the scales of rank 0's stage only",
    "rayk.transfer.handshake:like_engine",
    "test_stages.py::test_a_tier_knows_the_scales_of_all_stages",
)
def _(original, ranks):
    return ranks[0]
