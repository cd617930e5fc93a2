"""Bugs to plant in models, and the test that must notice each. Run by mutants.py."""

from __future__ import annotations

from tests.mutation import Mutation

LLAMA4 = "tests/models/test_llama4.py"
LLAMA4_CONFIG = "tests/models/test_llama4_config.py"
FORMS = "tests/models/test_expert_forms.py"

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
)
