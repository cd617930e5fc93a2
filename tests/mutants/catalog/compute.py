"""Bugs of what models compute, what their layers see of a step, and how tokens are chosen."""

from __future__ import annotations

from dataclasses import replace

from tests.mutants.mutant import Catalog

COMPUTE = Catalog("tests")


@COMPUTE.twin(
    "the window's oldest key is lost",
    "rayk.attention.transforms:sliding_window",
    "attention/test_transforms.py::test_every_token_sees_what_it_should",
)
def _(original, common, window):
    return original(common, window - 1)


@COMPUTE.twin(
    "layers that see the same are built for apart",
    "rayk.attention.groups:make_attention_groups",
    "attention/test_groups.py::test_like_layers_share_a_group_in_layer_order",
)
def _(original, layers):
    return tuple(group for layer in layers for group in original([layer]))


@COMPUTE.twin(
    "every token is one position late",
    "rayk.engine.inputs:InputBuilder.build",
    "engine/test_inputs.py::test_steps_match_a_loop_over_tokens",
)
def _(original, self, batch):
    inputs = original(self, batch)
    return replace(inputs, positions=inputs.positions + 1)


@COMPUTE.twin(
    "padding of a recorded step sees what an older row saw",
    "rayk.engine.graphs:DecodeGraphs._fill",
    "engine/test_graphs.py::test_what_a_view_sees_is_in_its_own_buffers",
)
def _(original, self, arrays, batch):
    return original(self, {name: rows[: len(batch.requests)] for name, rows in arrays.items()}, batch)


@COMPUTE.twin(
    "fast prefill computes every token in every layer",
    "rayk.models.config:DecoderConfig.fast_prefill_layers",
    "engine/test_fast_prefill.py::test_a_model_drawn_here",
)
def _(original, self):
    return original(self)[:0]


@COMPUTE.twin(
    "the temperature is forgotten",
    "rayk.engine.filters:candidates",
    "engine/test_filters.py::test_filters_leave_what_transformers_leave",
)
def _(original, scores, params, *, narrow):
    return original(scores, [replace(p, temperature=1.0) for p in params], narrow=narrow)


@COMPUTE.twin(
    "every token of a request draws the same numbers",
    "rayk.engine.noise:draw_key",
    "engine/test_noise.py::test_no_two_requests_or_indices_share_their_numbers",
)
def _(original, seed, index):
    return original(seed, 0)


@COMPUTE.twin(
    "a stop string that two tokens share is not found",
    "rayk.engine.stopping:StopStrings.feed",
    "engine/test_stop_strings.py::test_a_stop_string_is_found_with_the_token_that_completes_it",
)
def _(original, self, token_id):
    self._tail = ""
    return original(self, token_id)


@COMPUTE.twin(
    "queries grow a token too late",
    "rayk.models.layers.places:query_factors",
    "models/test_llama4.py::test_factors_of_queries",
)
def _(original, config, positions):
    return original(config, positions - 1)


@COMPUTE.twin(
    "gates are not cut",
    "rayk.kernels.pointwise.reference:GateThreshold.apply",
    "models/test_gemma3n.py::test_gates_are_cut_as_transformers_cuts_them",
)
def _(original, self, gate):
    return gate


@COMPUTE.twin(
    "scales are not rounded first",
    "rayk.models.layers.embedding:rounded_scale",
    "models/test_gemma3n_scales.py::test_bits_are_those_of_transformers",
)
def _(original, scale, dtype):
    return scale


@COMPUTE.twin(
    "who shares with whom is no fact of a model",
    "rayk.models.fingerprint:fingerprint",
    "transfer/test_local_groups.py::test_engines_that_share_otherwise_are_refused_by_name",
)
def _(original, path, config):
    return {name: value for name, value in original(path, config).items() if "source" not in name}


COMPUTE.constant(
    "activations are mixed up",
    "rayk.kernels.pointwise.native:ACTIVATIONS",
    {"silu": 1, "gelu_tanh": 0},
    "kernels/test_pointwise.py::test_gated_activations",
)


@COMPUTE.twin(
    "a kernel rounds towards zero",
    "rayk.kernels.quantise.reference:to_e4m3",
    "kernels/test_quantise.py",
)
def _(original, values):
    return original(values * (1 - 2**-5))


@COMPUTE.twin(
    "runs that leave a buffer are copied",
    "rayk.kernels.copy_runs.table:RunTable.check",
    "kernels/test_copy_runs.py::test_runs_that_leave_a_buffer",
)
def _(original, self, *args):
    return None


@COMPUTE.twin(
    "scales of quantised layers are not told",
    "rayk.models.decoder:Decoder.kv_scales",
    "engine/test_quantised_latents.py::test_engines_with_other_scales_do_not_meet",
)
def _(original, self):
    return {}


@COMPUTE.twin(
    "a fused norm passes on the sum without what was added",
    "rayk.kernels.pointwise.triton:norm_triton",
    "kernels/test_pointwise.py::test_a_sum_is_rounded_before_it_is_normed",
)
def _(original, x, weight, *, added=None, **options):
    total, out = original(x, weight, added=added, **options)
    return (x if added is not None else total), out


@COMPUTE.twin(
    "sums and norms are launched apart",
    "rayk.kernels.pointwise:add_rms_norm",
    "models/test_launches.py::test_launches_of_a_layer",
)
def _(original, x, added, weight, **options):
    return original(x, added, weight, **(options | {"impl": "reference"}))


@COMPUTE.twin(
    "rows that none of the rank's experts computed are added up",
    "rayk.kernels.expert_rows:combine_rows",
    "models/test_moe.py::test_the_products_of_accelerators_give_the_same",
)
def _(original, rows, places, shares, num_copies, *, num_rows=None, impl=None):
    return original(rows, places, shares, num_copies, impl=impl)


COMPUTE.constant(
    "top-p does not see the last bit of a score",
    "rayk.engine.filters:_DIGITS",
    ((21, 11), (10, 11), (1, 9)),
    "engine/test_sampling_on_devices.py::test_scores_that_differ_in_their_last_bit_are_told_apart",
)


@COMPUTE.twin(
    "minus zero is less than zero",
    "rayk.engine.filters:_ranks",
    "engine/test_sampling_on_devices.py::test_zeros_of_both_signs_are_equal",
)
def _(original, scores):
    import torch

    bits = scores.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().add_(1 << 31)


@COMPUTE.twin(
    "a step is planned before tokens that it needs are known",
    "rayk.engine.leader:needs_last_token",
    "engine/test_async_scheduling.py::test_sampling_is_the_same_as_without",
)
def _(original, state):
    return False


@COMPUTE.twin(
    "a draw ahead is that of the step before",
    "rayk.engine.sampling:_output_tokens",
    "engine/test_async_scheduling.py::test_sampling_is_the_same_as_without",
)
def _(original, state):
    return state.output_token_ids


@COMPUTE.twin(
    "the token that only the device knows is another row's",
    "rayk.engine.rank:EngineRank.keep",
    "engine/test_async_scheduling.py::test_ranks_take_the_tokens_that_rank_0_sampled",
)
def _(original, self, tokens):
    original(self, tokens if tokens is None else tokens.flip(0))


@COMPUTE.twin(
    "inputs of a step are overwritten before they were copied",
    "rayk.engine.staging:HostBuffers.next",
    "engine/test_staging.py::test_a_buffer_is_filled_again_once_its_copy_has_run",
)
def _(original, self, num_bytes):
    self._waits = [lambda: None] * 2
    return original(self, num_bytes)


@COMPUTE.twin(
    "tokens are read before they were copied",
    "rayk.engine.staging:Fetching.begin",
    "engine/test_staging.py::test_two_steps_tokens_are_fetched_apart",
)
def _(original, self, tokens):
    self._turn = 0
    return original(self, tokens)


@COMPUTE.twin(
    "operators of torch are not replayed",
    "rayk.kernels.replay.recording:_is_view",
    "kernels/test_replay.py::test_kernels_and_operators_are_done_again_on_new_inputs",
)
def _(original, out, inputs):
    return True


@COMPUTE.twin(
    "memory that is in use is given out",
    "rayk.kernels.replay.recording:Pool.empty",
    "kernels/test_replay.py::test_memory_that_was_given_back_is_used_again",
)
def _(original, self, shape, dtype):
    import torch

    if not self._storages:
        self._storages.append(torch.UntypedStorage(1 << 20))
    return torch.empty(0, dtype=dtype).set_(self._storages[0], 0, tuple(shape))


@COMPUTE.twin(
    "only prefills are warmed up",
    "rayk.engine.warm_up:warm_up_batches",
    "engine/test_warm_up.py::test_no_step_compiles_after_the_warm_up[qwen3]",
)
def _(original, *args, **options):
    return [(what, batch) for what, batch in original(*args, **options) if not what.startswith("decode")]


@COMPUTE.twin(
    "all lanes of a launch read the first group's rows",
    "rayk.kernels.digest.lanes:LaneTable.for_request",
    "kernels/test_on_devices.py::test_all_kinds_of_caches_are_digested_as_by_the_reference",
)
def _(original, self, num_rows, first_group, rows_at):
    return original(self, num_rows, first_group, 0 * rows_at)


@COMPUTE.twin(
    "a rank's last stripe is a token too long",
    "rayk.parallel.shard:Stripe.count",
    "parallel/test_shard.py::test_a_stripe_is_runs_dealt_in_turn",
    "parallel/test_shard.py::test_a_stripe_is_what_vllm_keeps",
)
def _(original, self, num_tokens):
    return original(self, num_tokens + 1)


@COMPUTE.twin(
    "digests take the tokens of slots from the geometry",
    "rayk.engine.rank:EngineRank.slot_tokens",
    "handover/test_token_shards.py::test_slots_of_another_interleave_at_d_are_named",
)
def _(original, self):
    return tuple(group.tokens for group in self.caches.geometry.groups)


@COMPUTE.twin(
    "a stage computes the step that came a turn too late",
    "rayk.engine.pipeline:Pipeline.__init__",
    "engine/test_pipeline.py::test_a_stage_computes_what_came_as_many_turns_before_as_it_has_stages_before_it",
)
def _(original, self, rank):
    original(self, rank)
    self._coming.extend([None] * (rank.stage > 0))


@COMPUTE.twin(
    "a step's commands are executed a step too late on later stages",
    "rayk.engine.pipeline:Pipeline.tick",
    "handover/test_stages.py::test_tokens_are_transformers",
)
def _(original, self, batch, commands=()):
    self._held, commands = commands, getattr(self, "_held", ()) if self._rank.stage else commands
    return original(self, batch, commands)


@COMPUTE.twin(
    "a roll-back takes one draft too many back",
    "rayk.engine.rollback:StateRollback.run",
    "engine/test_drafts.py::test_rejected_drafts_leave_no_trace",
)
def _(original, self, rollbacks):
    original(self, [one._replace(num_kept=max(1, one.num_kept - 1)) for one in rollbacks])


@COMPUTE.twin(
    "rows share a scratch of states",
    "rayk.kv.scratch:StateScratch.blocks",
    "kv/test_scratch.py::test_every_state_has_a_block_of_its_own_behind_the_pool",
)
def _(original, self, group, rows, drafts):
    return original(self, group, 0 * rows, drafts)
