"""Bugs of who is served when and where, of servers' doors, and of what engines are told."""

from __future__ import annotations

import time
from dataclasses import replace

from tests.mutants.mutant import Catalog

SERVING = Catalog("tests")


# Scheduling.


@SERVING.twin(
    "blocks of an aborted request come free before the last stage has written them",
    "rayk.sched.batching:Scheduler._last_step",
    "sched/test_batching.py::test_stages_have_a_step_each_and_blocks_of_the_aborted_wait_for_the_last",
    "handover/test_stages.py::test_what_arrives_in_blocks_of_the_aborted_is_not_written_over",
    "engine/test_pipeline.py::test_an_abort_in_flight_frees_blocks_once_no_stage_writes_them",
    "engine/test_not_finite.py::test_blocks_wait_for_stages_that_compute_what_follows",
)
def _(original, self, state):
    return original(self, state) and None


@SERVING.twin(
    "one step takes all running requests, whatever the other stages do",
    "rayk.sched.batching:Scheduler._most_decodes",
    "engine/test_pipeline.py::test_decodes_spread_over_as_many_steps_as_there_are_stages",
)
def _(original, self):
    return self._num_stages * original(self)


@SERVING.twin(
    "a large engine counts as a small one",
    "rayk.sched.loads:LoadBook.add",
    "sched/test_policies.py::test_least_loaded_takes_who_has_least_to_do",
)
def _(original, self, name, num_ranks=1):
    return original(self, name)


@SERVING.twin(
    "what an engine has to do is not looked at again",
    "rayk.sched.work:WorkOrder._catch_up",
    "sched/test_choices.py::test_kept_orders_choose_as_a_scan_does",
)
def _(original, self):
    pass


@SERVING.twin(
    "of engines that hold a prefix only those are met who have less to do than most",
    "rayk.sched.work:WorkOrder._best_of",
    "sched/test_choices.py::test_kept_orders_choose_as_a_scan_does",
)
def _(original, self, engines, own, spared, best):
    return best


@SERVING.twin(
    "engines that had held no prefix when a set was first looked at hold none later",
    "rayk.sched.prefix_index:PrefixIndex._bit",
    "sched/test_prefix_index.py::test_a_set_s_holders_are_those_of_its_engines_whenever_these_came",
)
def _(original, self, engine):
    kept = dict(self._masks)
    bit = original(self, engine)
    self._masks.update(kept)
    return bit


@SERVING.twin(
    "blocks of quiet steps are named and freed a step late",
    "rayk.sched.quiet:_QuietSteps._note_settle",
    "sched/test_quiet.py::test_quiet_steps_taken_at_once_are_as_many_single_ones",
)
def _(original, self, index, begin):
    original(self, index, begin + 1)


@SERVING.twin(
    "clients can tell the keys of prefixes",
    "rayk.sched.request_describer:prefix_keys",
    "sched/test_prefix_index.py::test_keys_are_those_of_one_prefix_and_one_secret",
)
def _(original, prompt_token_ids, block_tokens, secret):
    return original(prompt_token_ids, block_tokens, b"")


@SERVING.twin(
    "priorities are ignored",
    "rayk.sched.waiting_room:WaitingRoom.enter",
    "sched/test_waiting_room.py::test_a_room_does_what_a_list_does",
)
def _(original, self, name, item, *, priority=0, **options):
    original(self, name, item, **options)


@SERVING.twin(
    "later requests start while an earlier one is away",
    "rayk.sched.swapping:AwayRequests.precedes",
    "sched/test_swapping.py::test_long_walks_swap_in_every_way",
)
def _(original, self, state):
    return False


@SERVING.twin(
    "the last token of a prompt is taken from the cache",
    "rayk.sched.request_state:RequestState.max_cached_tokens",
    "engine/test_prefix_caching.py::test_a_prompt_that_came_before_is_taken_from_the_cache",
)
def _(original, self):
    return original(self) + 1


# Drafts.


@SERVING.twin(
    "one rejected token too many is accepted",
    "rayk.engine.verifying:DraftRows.kept",
    "engine/test_speculative.py::test_rows_count_up_to_the_first_that_differs",
    "engine/test_speculative.py::test_tokens_are_transformers",
)
def _(original, self, tokens):
    kept = set(original(self, tokens))
    return sorted(kept | {row + 1 for row in kept if row + 1 < len(tokens)})


@SERVING.twin(
    "tokens computed in vain count as computed",
    "rayk.sched.batching:Scheduler._computed",
    "sched/test_drafting.py::test_a_step_gives_what_was_accepted_and_one_more",
    "sched/test_drafting.py::test_rejected_tokens_are_never_found_in_the_prefix_cache",
    "engine/test_speculative.py::test_tokens_are_transformers",
)
def _(original, self, state, share, num_tokens):
    state.num_ahead += len(share.token_ids) - num_tokens
    return original(self, state, share, len(share.token_ids))


@SERVING.twin(
    "a drafted row is drawn as if the tokens before it were not there",
    "rayk.engine.verifying:DraftRows.rows",
    "engine/test_drafted_sampling.py::test_penalties_count_accepted_tokens",
    "engine/test_drafted_sampling.py::test_a_seed_gives_the_tokens_that_it_gives_without_drafts",
)
def _(original, self, *, rejects):
    rows = original(self, rejects=rejects)
    return [replace(r, output_token_ids=s.output_token_ids) for r, s in zip(rows, self.states, strict=True)]


@SERVING.twin(
    "drafts take tokens of requests behind them",
    "rayk.sched.drafting:Drafting.add",
    "sched/test_drafting.py::test_others_tokens_come_first",
)
def _(original, self, scheduled, states, num_tokens, num_blocks, extend):
    original(self, scheduled, states, 64, num_blocks, extend)


@SERVING.twin(
    "drafts take blocks that running requests need next",
    "rayk.sched.batching:Scheduler._num_spare_blocks",
    "sched/test_drafting.py::test_drafts_take_no_block_that_a_running_request_may_need",
)
def _(original, self):
    return self.allocator.num_free_blocks


@SERVING.twin(
    "all of a draft's states are rolled back to the first token",
    "rayk.sched.drafting:Rollback",
    "sched/test_drafting.py::test_states_are_rolled_back_where_drafts_cross_their_blocks_too",
)
def _(original, row, num_kept):
    return original(row, 1)


@SERVING.twin(
    "states are rolled back in blocks that their request has left",
    "rayk.sched.drafting:Drafting.forget",
    "sched/test_drafting.py::test_nobody_goes_back_in_blocks_that_others_may_have",
)
def _(original, self, row):
    pass


@SERVING.twin(
    "a kept proposal is kept once too often in twenty draws",
    "rayk.engine.rejecting:_uniform",
    "engine/test_rejecting.py::test_a_sure_drafter_changes_no_distribution",
)
def _(original, rows, stream, device):
    return original(rows, stream, device) * 0.8


@SERVING.twin(
    "what takes a rejected token's place may be that token",
    "rayk.engine.rejecting:_draft_probabilities",
    "engine/test_rejecting.py::test_a_sure_drafter_changes_no_distribution",
)
def _(original, rows, ids, drafted):
    return original(rows, ids, drafted) * 0.9


@SERVING.twin(
    "the mask behind a draft is that before it",
    "rayk.grammars.compiled:OutputGrammar.masks",
    "engine/test_drafted_sampling.py::test_forms_hold_inside_drafts",
)
def _(original, self, draft):
    return [self.mask()] * (1 + len(draft))


@SERVING.twin(
    "rows of a drafter take the token before the one that they are to take",
    "rayk.engine.proposing:Proposing._rows",
    "engine/test_drafters.py::test_a_model_foresees_what_it_says[llama-shape0-None]",
    "engine/test_proposals.py::test_they_are_an_oracles[eagle3-llama-{}-None]",
    "handover/test_proposals.py::test_d_proposes_as_if_there_had_been_no_hand_over[eagle3-llama-tp0-own_tp0-push]",
)
def _(original, self, batch, plan):
    rows, places = original(self, batch, plan)
    if rows is not None:
        shifted = [replace(r, token_ids=(r.token_ids[0], *r.token_ids[:-1])) for r in rows.requests]
        rows = replace(rows, requests=tuple(shifted))
    return rows, places


@SERVING.twin(
    "rows of a drafter take the hidden state of the row before",
    "rayk.engine.proposing:Proposing._rows",
    "engine/test_proposals.py::test_they_are_an_oracles[eagle3-llama-{}-None]",
    "handover/test_proposals.py::test_d_proposes_as_if_there_had_been_no_hand_over[eagle3-llama-tp0-own_tp0-push]",
)
def _(original, self, batch, plan):
    rows, places = original(self, batch, plan)
    return rows, (places - 1).clip(0)


@SERVING.twin(
    "a head takes the hidden states of its layers in another order",
    "rayk.models.decoder:Decoder._keep_tapped",
    "engine/test_proposals.py::test_they_are_an_oracles[eagle3-llama-{}-None]",
)
def _(original, self, streams):
    first, *others = streams.values()
    return original(self, dict(zip(streams, [*others, first], strict=True)))


@SERVING.twin(
    "rows of proposed tokens lie one slot too early",
    "rayk.engine.proposing:Proposing._one_more",
    "engine/test_drafters.py::test_a_model_foresees_what_it_says[llama-shape0-None]",
    "engine/test_proposals.py::test_they_are_an_oracles[eagle3-llama-{}-None]",
)
def _(original, self, requests, depth):
    return original(self, requests, depth - 1)


@SERVING.twin(
    "draft rows are found in the prefix cache whatever token is behind them",
    "rayk.kv.manager:KVCacheManager.__init__",
    "kv/test_rider_manager.py::test_rows_that_look_ahead_are_found_by_the_token_behind_them",
    "engine/test_proposals.py::test_they_are_the_same_after_a_cached_prefix[eagle3-llama]",
)
def _(original, self, *arguments, **named):
    original(self, *arguments, **named | {"looks_ahead": False})


@SERVING.twin(
    "states of rejected tokens are kept",
    "rayk.engine.rollback:StateRollback.run",
    "engine/test_drafts.py::test_rejected_drafts_leave_no_trace[qwen3_next-None-0]",
)
def _(original, self, rollbacks):
    return None


@SERVING.twin(
    "layers of a drafter are pushed before their rows are there",
    "rayk.engine.proposing:Proposing.run",
    "handover/test_drafters.py::test_all_is_foreseen_after_a_hand_over[qwen3-tp0-draft_tp0-layouts0-push]",
    "handover/test_proposals.py::test_d_proposes_as_if_there_had_been_no_hand_over[eagle3-llama-tp0-own_tp0-push]",
)
def _(original, self, batch, plan, hidden, on_layer):
    for layer in self.layers if on_layer is not None else ():
        on_layer(layer)
        time.sleep(0.01)
    return original(self, batch, plan, hidden, None)


@SERVING.twin(
    "blocks for proposed tokens are taken from those that wait",
    "rayk.sched.batching:Scheduler.plan_drafts",
    "sched/test_drafting.py::test_ranks_get_no_blocks_for_drafts_while_one_waits_that_may_start",
)
def _(original, self, batch):
    return self.drafting.plan(batch, self._settled, self._num_spare_blocks(), self.extend)


@SERVING.twin(
    "a drawn proposal is verified as if its drafter had been sure",
    "rayk.engine.verifying:DraftRows.rows",
    "engine/test_drafters.py::test_a_drafter_that_draws_as_the_model_does_is_believed",
)
def _(original, self, *, rejects):
    return [replace(row, draft_logits=None) for row in original(self, rejects=rejects)]


# Specs.


@SERVING.twin(
    "every repeat has the same arrivals",
    "rayk.specs.cells:Cell.due_ns",
    "specs/test_arrivals.py::test_times_are_those_of_the_seed_in_every_cell_and_anew_in_every_repeat",
)
def _(original, self, num_requests, repeat):
    return original(self, num_requests, 0)


@SERVING.twin(
    "settings that no cell heeds are passed over",
    "rayk.specs.host_tier:check_heeded",
    "specs/test_host_tier.py::test_settings_without_a_host_tier_are_refused_by_name",
)
def _(original, cells, loaded):
    return None


@SERVING.twin(
    "a server's pools have no room for what is handed over",
    "rayk.specs.server_plan:plan_server",
    "specs/test_server_plan.py::test_pools_hold_every_row_at_its_longest_or_what_memory_allows",
)
def _(original, options, **more):
    plan = original(options, **more)
    settings = plan.settings
    smaller = [replace(e.config, num_blocks=e.config.num_blocks // 3) for e in settings.engines]
    engines = tuple(replace(e, config=config) for e, config in zip(settings.engines, smaller, strict=True))
    return replace(plan, settings=replace(settings, engines=engines))


# Engines and fleets.


@SERVING.twin(
    "a server that ends turns away what it began",
    "rayk.sched.dispatcher:Dispatcher.arrive",
    "sched/test_admission.py::test_a_fleet_that_drains_takes_only_what_it_had_taken_before",
    "sched/test_admission.py::test_a_full_room_turns_requests_away_but_not_those_that_lost_their_place",
)
def _(original, self, *asked, again=False, **options):
    return original(self, *asked, **options)


@SERVING.twin(
    "a process that stands still is well until it is ended",
    "rayk.actors.members:Member.why_unwell",
    "actors/test_members.py::test_silence_and_standing_still_are_told_apart",
)
def _(original, self, now, patience_s):
    return ""


@SERVING.twin(
    "a stage that comes again forgets the first",
    "rayk.types.stage_clock:StageClock.lasted",
    "actors/test_stage_times.py::test_what_a_failed_attempt_took_is_told_and_adds_up",
)
def _(original, self, stage, length_ns):
    self._row.stage_ns.pop(stage, None)
    original(self, stage, length_ns)


@SERVING.twin(
    "lines serve whoever connects",
    "rayk.lines.line:_meet_caller",
    "lines/test_lines.py::test_nothing_is_unpickled_for_who_does_not_know_the_secret",
)
async def _(original, wire, secret):
    await original(wire, secret)
    return True


@SERVING.twin(
    "a worker has a coroutine, so that its calls no longer run side by side",
    "rayk.actors.worker:Worker.describe",
    "experiments/test_overlap_on_ray.py::test_requests_of_a_cell_decode_at_the_same_time",
)
async def _(original, self):
    return original(self)


# Doors.


@SERVING.twin(
    "any key is the right one",
    "rayk.serve.guard:has_key",
    "serve/test_guard.py::test_the_key_is_asked_for_everywhere_but_of_health",
)
def _(original, settings, scope):
    return True


@SERVING.twin(
    "heads of requests may be of any size",
    "rayk.serve.listener:BoundedHttp.data_received",
    "serve/test_listener.py::test_what_never_becomes_a_head_is_not_kept",
)
def _(original, self, data):
    self.max_head_bytes = 1 << 30
    original(self, data)


@SERVING.twin(
    "prompts may be as long as anybody likes",
    "rayk.serve.request_parsing:check_prompt",
    "serve/test_guard.py::test_what_is_wrong_is_named",
)
def _(original, front, prompt, max_tokens, asked_by="max_tokens"):
    return None


@SERVING.twin(
    "who goes is not noticed",
    "rayk.serve.replies:unless_gone",
    "serve/test_disconnect.py::test_every_choice_is_aborted_and_has_the_time_to_clean_up",
)
async def _(original, receive, work):
    return await work


@SERVING.twin(
    "half a character is told",
    "rayk.serve.text:Detokenizer.feed",
    "serve/test_text.py::test_deltas_join_to_the_tokenizers_own_text",
)
def _(original, self, token_id):
    return original(self, token_id) + self.end()


@SERVING.twin(
    "what stands behind the first part is not stopped",
    "rayk.serve.supervisor:stop_parts",
    "serve/test_supervisor.py::test_every_part_is_stopped_whatever_becomes_of_others",
)
async def _(original, parts, timeout_s, say):
    await original(parts[:1], timeout_s, say)


@SERVING.twin(
    "requests that their engine's death ended are those of clients who went",
    "rayk.handover.request_record:note_failure",
    "metrics/test_outcomes.py::test_a_request_is_counted_by_how_it_ended_for_its_client",
)
def _(original, row, error):
    return None


@SERVING.twin(
    "what arrived is still in transfer",
    "rayk.actors.phases:phases_of",
    "actors/test_phases.py::test_phases_follow_what_the_engine_tells",
)
def _(original, request_id, engine, mode):
    return original(request_id, engine, "whole")


@SERVING.twin(
    "every token tells when its request was begun with",
    "rayk.engine.leader:begin_times",
    "handover/test_stage_stamps.py::test_a_request_that_is_preempted_was_begun_with_once",
)
def _(original, state):
    state.is_reported = False
    return original(state)


@SERVING.twin(
    "requests come at another rate than is said",
    "rayk.sched.arrivals:due_times",
    "bench/test_arrivals.py::test_gaps_have_the_mean_and_deviation_of_their_process",
)
def _(original, process, *, rate, **options):
    return original(process, rate=2 * rate, **options)


@SERVING.twin(
    "tokens are delivered twice",
    "rayk.handover.request_record:_undelivered",
    "actors/test_router.py::test_after_a_second_prefill_its_first_token_is_not_told_again",
)
def _(original, event, num_known):
    return event
