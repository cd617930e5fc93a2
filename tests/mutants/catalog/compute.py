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
def _(original, self, arrays, inputs, seen, num_requests):
    original(self, {name: rows[:num_requests] for name, rows in arrays.items()}, inputs, seen, num_requests)


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
