"""Bugs to plant in placement policies, the waiting room and arrivals; see mutations.py."""

from __future__ import annotations

from tests.mutation import Mutation

PLACES = "tests/sched/test_policies.py"
INDEX = "tests/sched/test_prefix_index.py"
ROOM = "tests/sched/test_waiting_room.py"
LOADS = "tests/sched/test_loads.py"
CELLS = "tests/actors/test_cell_arrivals.py"
SPECS = "tests/specs/test_arrivals.py"

POLICIES = (
    Mutation(
        "a large engine counts as a small one",
        "rayk/sched/work.py",
        "- spared.get(e.name, 0.0)) / e.tp",
        "- spared.get(e.name, 0.0))",
        f"{PLACES}::test_least_loaded_takes_who_has_least_to_do",
    ),
    Mutation(
        "ties go to the first engine",
        "rayk/sched/work.py",
        "        picked[best.name] = self._picks\n",
        "",
        f"{PLACES}::test_idle_engines_that_are_alike_take_turns",
    ),
    Mutation(
        "what a decode engine holds is moved all the same",
        "rayk/sched/policies/prefix_aware.py",
        "spared = {name: move * num for name, num in held.here.items()}",
        "spared: dict[str, float] = {}",
        f"{PLACES}::test_prefix_aware_weighs_what_is_held_against_what_is_to_do",
    ),
    Mutation(
        "the last token of a cached prompt is not computed",
        "rayk/sched/policies/prefix_aware.py",
        "min(num, most) for name, num in self.index",
        "num for name, num in self.index",
        f"{PLACES}::test_prefix_aware_weighs_what_is_held_against_what_is_to_do",
    ),
    Mutation(
        "short prompts pile up on a decode engine",
        "rayk/sched/policies/conditional.py",
        "num_new + consumer.num_prompt_tokens <=",
        "num_new <=",
        f"{PLACES}::test_conditional_computes_little_prompts_where_they_are_decoded",
    ),
    Mutation(
        "sessions heed no TP size",
        "rayk/sched/policies/session_affinity.py",
        "-math.log(uniform) / engine.tp",
        "-math.log(uniform)",
        f"{PLACES}::test_sessions_are_spread_in_proportion_to_tp_sizes",
    ),
    Mutation(
        "a session's lot is the same for all engines but for a shift",
        "rayk/sched/policies/session_affinity.py",
        "_mix(session ^ seed)",
        "(session ^ seed)",
        f"{PLACES}::test_a_session_stays_whatever_the_load_and_moves_only_with_its_engine",
    ),
    Mutation(
        "who held a prefix before is forgotten when it is used again",
        "rayk/sched/prefix_index.py",
        "[(young.get(key) or old.get(key, 0)) | mask for key in keys]",
        "[young.get(key, 0) | mask for key in keys]",
        f"{INDEX}::test_the_index_knows_what_a_search_through_all_prompts_finds",
    ),
    Mutation(
        "an engine's successor inherits its cache",
        "rayk/sched/prefix_index.py",
        "{key: mask & ~bit for key, mask",
        "{key: mask for key, mask",
        f"{INDEX}::test_the_index_knows_what_a_search_through_all_prompts_finds",
    ),
    Mutation(
        "blocks are known by their own tokens alone",
        "rayk/sched/asking.py",
        "        digest.update(packed[start : start + size])",
        "        digest = blake2b(packed[start : start + size], digest_size=8, key=secret)",
        f"{INDEX}::test_keys_are_digests_of_all_tokens_up_to_a_block_s_end",
    ),
    Mutation(
        "clients can tell keys of prefixes",
        "rayk/sched/asking.py",
        "digest = blake2b(digest_size=8, key=secret)",
        "digest = blake2b(digest_size=8)",
        f"{INDEX}::test_keys_are_those_of_one_prefix_and_one_secret",
    ),
    Mutation(
        "the index grows past its bound",
        "rayk/sched/prefix_index.py",
        "if len(self._young) + len(keys) > self._half:",
        "if len(self._young) > self._half:",
        f"{INDEX}::test_the_index_knows_what_a_search_through_all_prompts_finds",
    ),
    Mutation(
        "what was not used lately is never forgotten",
        "rayk/sched/prefix_index.py",
        "self._old, self._young = self._young, {}",
        "self._old, self._young = self._old | self._young, {}",
        f"{INDEX}::test_the_index_knows_what_a_search_through_all_prompts_finds",
    ),
    Mutation(
        "cached tokens count as work",
        "rayk/sched/loads.py",
        "num_new = asked.num_prompt_tokens - placed.num_cached_tokens",
        "num_new = asked.num_prompt_tokens",
        f"{LOADS}::test_loads_are_the_sums_over_requests",
    ),
    Mutation(
        "priorities are ignored",
        "rayk/sched/waiting_room.py",
        "(priority, self._num_arrivals)",
        "(0, self._num_arrivals)",
        f"{ROOM}::test_a_room_does_what_a_list_does",
    ),
    Mutation(
        "who is late gets a place all the same",
        "rayk/sched/waiting_room.py",
        "if deadline_ns is None or now_ns < deadline_ns:",
        "if deadline_ns is None or now_ns <= deadline_ns:",
        f"{ROOM}::test_a_room_does_what_a_list_does",
    ),
    Mutation(
        "what takes the place of one that leaves never sinks",
        "rayk/sched/keyed_heap.py",
        "self._sink(self._rise(index))",
        "self._rise(index)",
        f"{ROOM}::test_the_heap_keeps_its_order_whoever_leaves",
    ),
    Mutation(
        "a quiet night makes a server slow",
        "rayk/sched/waiting_room.py",
        "        if not self._waiting:\n            self._pace.rest()",
        "        if not self._waiting:\n            pass",
        f"{ROOM}::test_time_in_which_nobody_waited_is_not_held_against_the_server",
    ),
    Mutation(
        "a server that stands still looks as fast as ever",
        "rayk/sched/waiting_room.py",
        "return max(mean_ns, (closed_ns + open_ns) / (len(self._gaps_ns) + 1))",
        "return mean_ns",
        f"{ROOM}::test_a_server_that_stands_still_says_later_and_later",
    ),
    Mutation(
        "latency counts from when the coordinator got to it",
        "rayk/actors/cell_run.py",
        "arrival_ns=started_ns + due_ns,",
        "arrival_ns=time.monotonic_ns(),",
        f"{CELLS}::test_requests_start_when_due_and_count_from_then",
    ),
    Mutation(
        "requests go to the dead",
        "rayk/actors/cell_run.py",
        "[e.name for e in side if engines.is_live(e)] or",
        "",
        f"{CELLS}::test_who_comes_after_a_death_goes_to_those_that_live",
    ),
    Mutation(
        "every repeat has the same arrivals",
        "rayk/specs/cells.py",
        "stream=1 + repeat,",
        "stream=1,",
        f"{SPECS}::test_times_are_those_of_the_seed_in_every_cell_and_anew_in_every_repeat",
    ),
    Mutation(
        "policies count on caches that no engine has",
        "rayk/specs/cells.py",
        "if not any(e.prefix_caching for e in self.engines):",
        "if False:",
        f"{SPECS}::test_without_prefix_caches_policies_remember_none",
    ),
    Mutation(
        "what the host tier has costs nothing",
        "rayk/sched/policies/prefix_aware.py",
        "+ (1 - self._settings.host_cost) * held.num_host_tokens(engine)",
        "+ held.num_host_tokens(engine)",
        f"{PLACES}::test_what_the_host_tier_has_is_worth_a_shorter_queue_by_its_cost",
    ),
    Mutation(
        "what an engine holds is loaded from the host tier once more",
        "rayk/sched/policies/prefix_aware.py",
        "return max(0, self.tiers.get(engine.tier, 0) - self.here.get(engine.name, 0))",
        "return self.tiers.get(engine.tier, 0)",
        f"{PLACES}::test_prefix_aware_weighs_what_is_held_against_what_is_to_do",
    ),
    Mutation(
        "the host tier has room for everything",
        "rayk/sched/policies/prefix_aware.py",
        "PrefixIndex(self._settings.block_tokens, self._settings.host_blocks)",
        "PrefixIndex(self._settings.block_tokens, 65536)",
        f"{PLACES}::test_the_tier_has_what_lost_engines_computed_and_no_more_than_it_has_room_for",
    ),
    Mutation(
        "what is loaded from the host tier counts as work",
        "rayk/sched/loads.py",
        " - placed.num_cached_tokens - placed.num_host_tokens",
        " - placed.num_cached_tokens",
        f"{PLACES}::test_prefix_aware_weighs_what_is_held_against_what_is_to_do",
    ),
    Mutation(
        "a host tier that nothing is loaded from is weighed",
        "rayk/specs/cells.py",
        """settings is None or settings.load == "never" or""",
        "settings is None or",
        f"{SPECS}::test_a_host_tier_is_weighed_as_far_as_it_has_room",
    ),
    Mutation(
        "what a lost host tier had is still there",
        "rayk/sched/policies/prefix_aware.py",
        "        self._tiers.pop(engine, None)\n",
        "",
        f"{PLACES}::test_a_tier_that_is_lost_has_nothing_and_one_of_another_node_neither",
    ),
    Mutation(
        "host tiers of all nodes are one",
        "rayk/sched/policies/prefix_aware.py",
        "return max(0, self.tiers.get(engine.tier, 0) -",
        "return max(0, max(self.tiers.values(), default=0) -",
        f"{PLACES}::test_a_tier_that_is_lost_has_nothing_and_one_of_another_node_neither",
    ),
    Mutation(
        "nobody is told which host tier was lost",
        "rayk/actors/tiers.py",
        "        self.on_lost(tier.name)\n",
        "",
        "tests/actors/test_tiers.py::test_the_name_of_a_lost_tier_is_told_and_no_engine_has_it_any_more",
    ),
    Mutation(
        "an engine whose host tier was lost has it still",
        "rayk/actors/tiers.py",
        'engine.tier, engine.tier_name = None, ""',
        "engine.tier = None",
        "tests/actors/test_tiers.py::test_the_name_of_a_lost_tier_is_told_and_no_engine_has_it_any_more",
    ),
)
