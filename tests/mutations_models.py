"""Bugs to plant in models, and the test that must notice each. Run by mutants.py."""

from __future__ import annotations

from tests.mutation import Mutation

LLAMA4 = "tests/models/test_llama4.py"
LLAMA4_CONFIG = "tests/models/test_llama4_config.py"
GEMMA3N = "tests/models/test_gemma3n.py"
SCALES = "tests/models/test_gemma3n_scales.py"
FORMS = "tests/models/test_expert_forms.py"
POINTWISE = "tests/kernels/test_pointwise.py"

MODELS = (
    Mutation(
        "queries grow a token too late",
        "rayk/models/layers/places.py",
        "(positions.float() + 1) / config.floor",
        "positions.float() / config.floor",
        f"{LLAMA4}::test_factors_of_queries",
    ),
    Mutation(
        "queries do not grow",
        "rayk/models/layers/attention.py",
        "if places.query_factors is not None:",
        "if places.query_factors is None and len(x) < 0:",
        f"{LLAMA4}::test_logits_equal_transformers",
    ),
    Mutation(
        "queries that are rotated grow, too",
        "rayk/models/families/llama4.py",
        "temperature=temperature if layer.rope is None else None,",
        "temperature=temperature,",
        f"{LLAMA4_CONFIG}::test_which_layers_are_what",
    ),
    Mutation(
        "layers without positions attend in chunks, too",
        "rayk/models/families/llama4.py",
        "[FULL if layer.rope is None else CHUNKED for layer in layers]",
        "[CHUNKED for layer in layers]",
        f"{LLAMA4_CONFIG}::test_which_layers_are_what",
    ),
    Mutation(
        "every layer has its queries and keys normed behind the rotation",
        "rayk/models/builders/attention.py",
        "if config.turned_norm_eps is None or config.layers[index].rope is None:",
        "if config.turned_norm_eps is None:",
        f"{LLAMA4}::test_logits_equal_transformers",
    ),
    Mutation(
        "cos and sin of a rotation in float32 are rounded",
        "rayk/models/layers/rope.py",
        "if not self.config.wide:",
        "if self.config.wide or not self.config.wide:",
        f"{LLAMA4}::test_rotation_is_transformers_own",
    ),
    Mutation(
        "what experts give is weighed, and what they get",
        "rayk/models/layers/moe.py",
        "result if self._config.weighs_inputs else result * share",
        "result * share",
        f"{FORMS}::test_experts_equal_transformers",
    ),
    Mutation(
        "all experts see a token with weight 1 where all are run",
        "rayk/models/layers/moe.py",
        "inputs = self._weighed(x.expand(w.count, *x.shape), local.mT[:, :, None])",
        "inputs = x.expand(w.count, *x.shape)",
        f"{FORMS}::test_the_dense_way_gives_the_same",
    ),
    Mutation(
        "sigmoids of the chosen logits are made a softmax",
        "rayk/models/layers/router.py",
        "best.values.float().sigmoid()",
        "best.values.float().softmax(-1)",
        f"{LLAMA4}::test_router_is_transformers_own",
    ),
    Mutation(
        "per-layer inputs are added to the first stream, too",
        "rayk/models/layers/altup.py",
        "streams[1:] += ",
        "streams[:] += ",
        f"{GEMMA3N}::test_logits_equal_transformers",
    ),
    Mutation(
        "tokens beyond the table of per-layer embeddings read its last row",
        "rayk/models/layers/altup.py",
        "token_ids.where(token_ids < self._table_size, 0)",
        "token_ids.clamp(max=self._table_size - 1)",
        f"{GEMMA3N}::test_logits_equal_transformers",
    ),
    Mutation(
        "streams are predicted by transposed weights",
        "rayk/models/layers/altup.py",
        ".view(-1, num_streams, num_streams)",
        ".view(-1, num_streams, num_streams).mT",
        f"{GEMMA3N}::test_logits_equal_transformers",
    ),
    Mutation(
        "the active stream is taken to be the first",
        "rayk/models/layers/altup.py",
        "self._modalities(streams[self._active])",
        "self._modalities(streams[0])",
        f"{GEMMA3N}::test_logits_equal_transformers",
    ),
    Mutation(
        "corrections start from what the layer got",
        "rayk/models/layers/altup.py",
        "self.altup.correct(predicted, out)",
        "self.altup.correct(x, out)",
        f"{GEMMA3N}::test_logits_equal_transformers",
    ),
    Mutation(
        "gates that are kept lose nothing",
        "rayk/models/layers/mlp.py",
        "F.relu(gate - cut[:, None])",
        "gate.where(gate > cut[:, None], 0)",
        f"{GEMMA3N}::test_gates_are_cut_as_transformers_cuts_them",
    ),
    Mutation(
        "a small deviation of gates is lost in their squares",
        "rayk/models/layers/mlp.py",
        "wide = gate.double()",
        "wide = gate.float()",
        f"{GEMMA3N}::test_gates_far_from_zero_are_cut_as_transformers_cuts_them",
    ),
    Mutation(
        "a variance that rounding made negative has a root",
        "rayk/models/layers/mlp.py",
        ".clamp(min=0).sqrt()",
        ".sqrt()",
        f"{GEMMA3N}::test_nothing_is_left_of_gates_that_are_alike",
    ),
    Mutation(
        "every rank cuts by the mean of its own gates",
        "rayk/models/layers/mlp.py",
        "if self._comm.size > 1:",
        "if self._comm.size < 0:",
        f"{GEMMA3N}::test_gates_are_cut_as_transformers_cuts_them",
    ),
    Mutation(
        "per-layer inputs are not picked out with the tokens that are wanted",
        "rayk/models/decoder.py",
        "None if per_layer_inputs is None else per_layer_inputs.index_select(-2, wanted)",
        "per_layer_inputs",
        f"{GEMMA3N}::test_computing_only_wanted_tokens_changes_none_of_their_logits",
    ),
    Mutation(
        "the size of embeddings is not rounded first",
        "rayk/models/loader.py",
        "scale = rounded_scale(scale, pieces.dtype)",
        "scale = float(scale)",
        f"{SCALES}::test_bits_are_those_of_transformers",
    ),
    Mutation(
        "the size of per-layer embeddings is not rounded first",
        "rayk/models/builders/altup.py",
        "scale=scale(altup.per_layer_size**0.5)",
        "scale=altup.per_layer_size**0.5",
        f"{SCALES}::test_bits_are_those_of_transformers",
    ),
    Mutation(
        "the router's scale is not rounded first",
        "rayk/models/builders/altup.py",
        "rounded_scale(1 / hidden, build.pieces.dtype)",
        "1 / hidden",
        f"{SCALES}::test_bits_are_those_of_transformers",
    ),
    Mutation(
        "the scale of projected embeddings is not rounded first",
        "rayk/models/builders/altup.py",
        "projection_scale=scale(hidden**-0.5)",
        "projection_scale=hidden**-0.5",
        f"{SCALES}::test_bits_are_those_of_transformers",
    ),
    Mutation(
        "the scale of per-layer inputs is not rounded first",
        "rayk/models/builders/altup.py",
        "sum_scale=scale(2**-0.5)",
        "sum_scale=2**-0.5",
        f"{SCALES}::test_bits_are_those_of_transformers",
    ),
    Mutation(
        "values are not normed",
        "rayk/models/builders/attention.py",
        "Norm(None, config.norm) if config.v_norm else None",
        "None",
        f"{GEMMA3N}::test_logits_equal_transformers",
    ),
    Mutation(
        "heads that follow others in a row of a projection are read as if they stood alone",
        "rayk/kernels/pointwise/native.py",
        "num_heads, stride_h = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)",
        "num_heads, stride_h = (x.shape[1], 0) if x.dim() == 3 else (1, 0)",
        f"{POINTWISE}::test_rms_norm_of_heads_has_a_weight_of_each",
    ),
    Mutation(
        "every head is normed with the weight of the first",
        "rayk/kernels/pointwise/native.py",
        "stride_w = weight.stride(0)",
        "stride_w = 0",
        f"{POINTWISE}::test_rms_norm_of_heads_has_a_weight_of_each",
    ),
    Mutation(
        "activations are mixed up",
        "rayk/kernels/pointwise/native.py",
        'ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}',
        'ACTIVATIONS = {"silu": 1, "gelu_tanh": 0}',
        f"{POINTWISE}::test_gated_activations",
    ),
    Mutation(
        "values of another dtype than the cache's are copied as they are",
        "rayk/kernels/store_kv/native.py",
        "k.dtype == v.dtype == kv_cache.dtype",
        "k.dtype == v.dtype",
        "tests/kernels/test_store_kv.py::test_values_are_copied_or_rounded_once",
    ),
)
