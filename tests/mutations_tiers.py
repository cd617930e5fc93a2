"""Bugs to plant where engines use a host tier, and where it may be lost; see mutations.py."""

from __future__ import annotations

from tests.mutation import Mutation

OFFLOADING = "rayk/actors/offloading.py"
STORING = "rayk/actors/storing.py"
SWAPPING = "rayk/actors/swapping.py"
FAULTS = "tests/offload/test_faults.py"
REFUSALS = "tests/offload/test_refusals.py"
CHOICES = "tests/offload/test_load_choices.py"
DISK = "tests/offload/test_disk_stack.py"
RELAY = "tests/offload/test_relay.py"

TIERS = (
    Mutation(
        "large stores go together",
        STORING,
        "return not known or (small and len(known) < ACTIVE_STORES)",
        "return len(known) < ACTIVE_STORES",
        f"{FAULTS}::test_small_stores_go_together_and_large_ones_one_after_the_other",
        needs_fixtures=True,
    ),
    Mutation(
        "the tier is not told of pages that were read wrong",
        "rayk/actors/tier_side.py",
        "            self.tier.doubt(ticket)\n",
        "            pass\n",
        f"{FAULTS}::test_pages_that_change_in_host_memory_are_computed_again_and_stored_anew",
        needs_fixtures=True,
    ),
    Mutation(
        "an answer about a request that is gone is the next one's of its id",
        OFFLOADING,
        "        looking = self._looking.get(request_id)\n"
        "        if looking is not None and not looking.is_over:\n"
        "            looking.is_over = True\n",
        "        looking = self._looking.pop(request_id, None)\n        if looking is not None:\n",
        f"{FAULTS}::test_an_answer_that_comes_late_is_nobody_elses",
        needs_fixtures=True,
    ),
    Mutation(
        "a lost tier's answer is that of the next one",
        OFFLOADING,
        "is_awaited = self._looking.get(name) is looking",
        "is_awaited = name in self._looking",
        f"{FAULTS}::test_answers_of_a_lost_tier_are_nobodys_though_its_ids_are_free",
        needs_fixtures=True,
    ),
    Mutation(
        "word of a lost tier's end ends the next one",
        OFFLOADING,
        "if side.tier is None or epoch not in (None, side.facts.epoch):",
        "if side.tier is None:",
        f"{FAULTS}::test_word_of_a_lost_tiers_end_does_not_end_the_next_one",
        needs_fixtures=True,
    ),
    Mutation(
        "a tier that is silent is asked for ever",
        OFFLOADING,
        "if len(self._looking) - self.num_looking >= MAX_UNANSWERED:",
        "if False:",
        f"{FAULTS}::test_a_tier_that_is_silent_is_not_waited_for_and_soon_not_asked",
        needs_fixtures=True,
    ),
    Mutation(
        "a lost tier's stores keep their blocks",
        OFFLOADING,
        "        self.storing.end_all()\n",
        "",
        f"{FAULTS}::test_a_tier_that_is_killed_in_the_middle_of_stores",
        needs_fixtures=True,
    ),
    Mutation(
        "what a lost tier had of swapped requests is waited for",
        OFFLOADING,
        "        self.swapping.tier_lost()\n",
        "",
        f"{FAULTS}::test_a_tier_that_is_killed_in_the_middle_of_swaps[away]",
        needs_fixtures=True,
    ),
    Mutation(
        "a store that is not answered holds its blocks",
        STORING,
        "for store in [s for s in self._begun.values() if s.began_ns < late_ns]:",
        "for store in []:",
        f"{FAULTS}::test_requests_that_a_silent_tier_has_are_computed_again[store]",
        needs_fixtures=True,
    ),
    Mutation(
        "what came too late to be wanted is kept",
        STORING,
        "                side.tier.drop(answer.name)  #",
        "                pass  #",
        f"{FAULTS}::test_requests_that_a_silent_tier_has_are_computed_again[store]",
        needs_fixtures=True,
    ),
    Mutation(
        "a swapped request waits for an answer for ever",
        SWAPPING,
        "swapped.asked_ns is not None and swapped.asked_ns < late_ns",
        "False",
        f"{FAULTS}::test_requests_that_a_silent_tier_has_are_computed_again[load]",
        needs_fixtures=True,
    ),
    Mutation(
        "what is known of a finished request stays where nothing is stored",
        STORING,
        "        if state.finish_reason is not None:\n            self.left(state.request_id)\n",
        "        if state.finish_reason is not None and self._side.settings.store:\n"
        "            self.left(state.request_id)\n",
        f"{FAULTS}::test_what_is_known_of_requests_goes_with_them",
        needs_fixtures=True,
    ),
    Mutation(
        "a load that failed is taken for whole",
        OFFLOADING,
        "        looking.begin(num_valid, is_loaded=True)\n",
        "        looking.begin(answer.num_tokens, is_loaded=True)\n",
        f"{FAULTS}::test_a_flipped_bit_in_a_load_is_found_and_computed_again",
        needs_fixtures=True,
    ),
    Mutation(
        "what was refused is digested again at each step",
        STORING,
        "        if store.first_row:\n            self._asked.pop(",
        "        if True:\n            self._asked.pop(",
        f"{REFUSALS}::test_what_a_small_tier_refuses_is_digested_again_only_after_so_many_tokens",
        needs_fixtures=True,
    ),
    Mutation(
        "a store builds on rows that are gone",
        STORING,
        "        self.last_failure = why\n        self._stored.pop(store.request_id, None)\n",
        "        self.last_failure = why\n",
        f"{REFUSALS}::test_what_built_on_rows_that_are_gone_is_stored_anew_at_once",
        needs_fixtures=True,
    ),
    Mutation(
        "a digest that failed ends the engine",
        "rayk/actors/digesting.py",
        "except Exception as error:",
        "except KeyError as error:",
        f"{REFUSALS}::test_a_digest_that_fails_is_a_store_that_is_refused[1-MemoryError]",
        needs_fixtures=True,
    ),
    Mutation(
        "nobody hears of a digest that failed",
        STORING,
        "for name, why in news.unstored:",
        "for name, why in ():",
        f"{REFUSALS}::test_a_digest_that_fails_is_a_store_that_is_refused[1-MemoryError]",
        needs_fixtures=True,
    ),
    Mutation(
        "a lease that nobody was told of is kept",
        STORING,
        "            side.commands.append(EndLease(store.name))",
        "            pass",
        f"{REFUSALS}::test_a_digest_that_fails_is_a_store_that_is_refused[1-MemoryError]",
        needs_fixtures=True,
    ),
    Mutation(
        "tokens behind others are weighed as a prompt's first",
        OFFLOADING,
        "num_here=looking.num_here)",
        "num_here=0)",
        f"{CHOICES}::test_what_is_here_is_weighed_as_what_the_rest_sees",
        needs_fixtures=True,
    ),
    Mutation(
        "damaged pages are lent",
        "rayk/offload/host.py",
        "            if bad:\n",
        "            if False:\n",
        f"{DISK}::test_a_thousand_flipped_bits_cost_no_answer",
        needs_fixtures=True,
    ),
    Mutation(
        "what nobody will load is kept when it comes",
        "rayk/offload/host.py",
        "storing.ask = replace(storing.ask, keep_as=None)",
        "pass",
        f"{RELAY}::test_what_nobody_wants_any_more_is_not_kept_when_it_comes",
        needs_fixtures=True,
    ),
    Mutation(
        "a hand-over that was given up stays in the tier",
        "rayk/actors/tiers.py",
        "        handle.drop.remote(kept_as)  #",
        "        pass  #",
        f"{RELAY}::test_what_fails_on_the_way_is_an_error_of_the_transfer_and_leaves_nothing",
        needs_fixtures=True,
    ),
    Mutation(
        "a dead tier is handed on to",
        "rayk/actors/tiers.py",
        "        prefill.tier = decode.tier = None\n",
        "",
        f"{RELAY}::test_what_fails_on_the_way_is_an_error_of_the_transfer_and_leaves_nothing",
        needs_fixtures=True,
    ),
    Mutation(
        "an ask with another number of tokens is heeded",
        "rayk/offload/host.py",
        "if len(tokens) != num_tokens:",
        "if len(tokens) < num_tokens:",
        "tests/offload/test_tier.py::test_an_ask_with_too_many_tokens_or_too_few_is_refused_and_ends_nothing",
    ),
)
