"""Bugs to plant in what an engine tells its layers of a step, and in how its settings are checked."""

from __future__ import annotations

from tests.mutation import Mutation

STEPS = "tests/engine/test_inputs.py::test_steps_match_a_loop_over_tokens"
GRAPHS = "tests/engine/test_graphs.py"
SPECS = "tests/specs/test_engines.py"
FAST = "tests/engine/test_fast_prefill.py::test_a_model_drawn_here"
VIEWS = f"{GRAPHS}::test_what_a_view_sees_is_in_its_own_buffers"
FAST_SPECS = "tests/specs/test_fast_prefill.py"
HOST_TIER = "rayk/specs/host_tier.py"
HOST_TIER_SPECS = "tests/specs/test_host_tier.py"

ENGINE = (
    Mutation(
        "a state is read where the next token's goes",
        "rayk/engine/inputs.py",
        "last_blocks=np.maximum(step.computed - 1, 0) // size",
        "last_blocks=step.computed // size",
        STEPS,
    ),
    Mutation(
        "a request begins from what its first slot holds",
        "rayk/engine/inputs.py",
        "np.where(step.computed > 0,",
        "np.where(step.computed >= 0,",
        STEPS,
    ),
    Mutation(
        "the last segment ends with its block",
        "rayk/engine/inputs.py",
        "np.minimum((blocks + 1) * size, step.seq_lens[request_of])",
        "(blocks + 1) * size",
        STEPS,
    ),
    Mutation(
        "a step that ends with a block has a segment more",
        "rayk/engine/inputs.py",
        "counts = (step.seq_lens - 1) // size - first + 1",
        "counts = step.seq_lens // size - first + 1",
        STEPS,
    ),
    Mutation(
        "segments are counted from the request's first token",
        "rayk/engine/inputs.py",
        "(step.starts[:-1] - step.computed)[request_of] + end_positions",
        "step.starts[:-1][request_of] + end_positions",
        STEPS,
    ),
    Mutation(
        "groups of all block sizes share one step's segments",
        "rayk/engine/inputs.py",
        "self._cuts(size, step) for size in sizes",
        "self._cuts(max(sizes), step) for size in sizes",
        STEPS,
    ),
    Mutation(
        "padding keeps its state where an older row did",
        "rayk/engine/graphs.py",
        "self._writes[num_requests:size] = NO_SLOT",
        "self._writes[num_requests:num_requests] = NO_SLOT",
        f"{GRAPHS}::test_states_of_a_step_lie_where_it_says_and_padding_keeps_none",
    ),
    Mutation(
        "a recorded step sees one token less",
        "rayk/engine/graphs.py",
        "self._seq_lens[:num_requests] = common.seq_lens",
        "self._seq_lens[:num_requests] = common.seq_lens - 1",
        f"{GRAPHS}::test_a_step_sees_only_its_own_rows_and_padding_that_stores_nothing",
    ),
    Mutation(
        "kernel blocks of a kind are not checked",
        "rayk/kv/kernel_blocks.py",
        "rows = by_kind.get(kind, default)",
        "rows = default",
        f"{SPECS}::test_settings_that_the_model_has_no_place_for",
    ),
    Mutation(
        "the pool is checked with whole blocks of states",
        "rayk/models/kv_specs.py",
        "state_block_size=engine.state_block_size,",
        "state_block_size=None,",
        f"{SPECS}::test_the_pool_check_counts_states_and_grown_blocks",
    ),
    Mutation(
        "a side's empty mapping is taken for none",
        "rayk/specs/cells.py",
        "return getattr(shared, name) if value is None else value",
        "return value or getattr(shared, name)",
        f"{SPECS}::test_a_side_may_have_its_own",
    ),
    Mutation(
        "padding sees what an older row saw",
        "rayk/engine/graphs.py",
        "self._table[num_requests:size, :1] = 0",
        "self._table[num_requests:size, :0] = 0",
        VIEWS,
    ),
    Mutation(
        "padding has the length of an older row",
        "rayk/engine/graphs.py",
        "self._seq_lens[num_requests:size] = 1",
        "self._seq_lens[size:size] = 1",
        VIEWS,
    ),
    Mutation(
        "views of a KV group that differ in their window share buffers",
        "rayk/engine/graphs.py",
        "return replace(view, fast_prefill=False)",
        "return replace(view, fast_prefill=False, window=None)",
        VIEWS,
    ),
    Mutation(
        "a window's buffers hold no block that it begins in the middle of",
        "rayk/engine/graphs.py",
        "most = min(most, view.window + block_size - 1)",
        "most = min(most, view.window)",
        VIEWS,
    ),
    Mutation(
        "a chunk's buffers are as wide as the longest sequence",
        "rayk/engine/graphs.py",
        "most = min(most, view.chunk)",
        "most = max(most, view.chunk)",
        VIEWS,
    ),
    Mutation(
        "fast prefill is never done",
        "rayk/engine/rank.py",
        "fast = bool(self.fast_prefill_layers) and len(inputs.wanted) < len(inputs.token_ids)",
        "fast = False",
        FAST,
    ),
    Mutation(
        "fast prefill is left out where a step samples nothing",
        "rayk/engine/rank.py",
        "fast = bool(self.fast_prefill_layers) and len(inputs.wanted) < len(inputs.token_ids)",
        "fast = bool(self.fast_prefill_layers) and 0 < len(inputs.wanted) < len(inputs.token_ids)",
        FAST,
    ),
    Mutation(
        "layers with fast prefill see the step as others do",
        "rayk/engine/rank.py",
        "fast_prefill=index in self.fast_prefill_layers,",
        "fast_prefill=False,",
        FAST,
    ),
    Mutation(
        "the first of a step's tokens are kept, not those that are sampled",
        "rayk/engine/rank.py",
        "wanted = inputs.logits_index if fast else None",
        "wanted = inputs.logits_index * 0 if fast else None",
        FAST,
    ),
    Mutation(
        "sampled tokens are placed where the step begins",
        "rayk/models/decoder.py",
        "self._placing.at(positions[wanted])",
        "self._placing.at(positions[: len(wanted)])",
        FAST,
    ),
    Mutation(
        "tokens are counted before they are left out",
        "rayk/models/decoder.py",
        "self.num_token_layers += x.shape[-2]",
        "self.num_token_layers += len(token_ids)",
        FAST,
    ),
    Mutation(
        "the last step alone is counted",
        "rayk/engine/rank.py",
        "self.num_token_layers += self.decoder.num_token_layers",
        "self.num_token_layers = self.decoder.num_token_layers",
        FAST,
    ),
    Mutation(
        "prompt logprobs are computed from tokens that are not there",
        "rayk/engine/leader.py",
        "if error is None and self._fast_prefill and not prefilled:",
        "if error is None and self._fast_prefill and prefilled:",
        "tests/engine/test_fast_prefill.py::test_who_is_refused",
    ),
    Mutation(
        "a side's own fast_prefill is not heeded",
        "rayk/specs/cells.py",
        'fast_prefill=own("fast_prefill"),',
        "fast_prefill=shared.fast_prefill,",
        f"{FAST_SPECS}::test_it_is_an_axis_of_both_sides_and_of_each",
    ),
    Mutation(
        "the check of logprobs asks for those of prompts that are not there",
        "rayk/specs/cells.py",
        'told = ("logprobs",) if fast_prefill else ("logprobs", "prompt_logprobs")',
        'told = ("logprobs", "prompt_logprobs")',
        f"{FAST_SPECS}::test_the_check_of_logprobs_leaves_prompts_out",
    ),
    Mutation(
        "a decode engine's fast_prefill forbids prompt logprobs",
        "rayk/specs/checks.py",
        "if cell.prefill.fast_prefill and cell.spec.sampling.prompt_logprobs is not None:",
        "if (cell.decode or cell.prefill).fast_prefill and cell.spec.sampling.prompt_logprobs is not None:",
        f"{FAST_SPECS}::test_decode_engines_tell_nothing_of_prompts",
    ),
    Mutation(
        "one engine's count stands for all of its side",
        "rayk/experiments/judge.py",
        "return sum(known) if known and len(known) == len(told) else None",
        "return known[0] if known and len(known) == len(told) else None",
        "tests/experiments/test_token_layers.py::test_all_engines_of_a_side_and_all_repeats_are_added_up",
    ),
    Mutation(
        "a wrong input is put down to a layer that keeps nothing",
        "rayk/experiments/culprit.py",
        "not wrong.model.layers[last].parts:",
        "not wrong.model.layers[last].mixer_parts:",
        "tests/experiments/test_culprit.py::"
        "test_a_wrong_input_comes_from_what_was_computed_since_the_last_cache",
    ),
    Mutation(
        "settings of a host tier that no cell has are passed over",
        HOST_TIER,
        "    if given and not tiers:\n",
        "    if given and not cells:\n",
        f"{HOST_TIER_SPECS}::test_settings_without_a_host_tier_are_refused_by_name",
    ),
    Mutation(
        "cells without a host tier may not stand beside others",
        HOST_TIER,
        "    if given and not tiers:\n",
        "    if given and len(tiers) < len(cells):\n",
        f"{HOST_TIER_SPECS}::test_cells_without_a_host_tier_may_stand_beside_cells_with_one",
    ),
    Mutation(
        "a folder below a file is found out when all is up",
        HOST_TIER,
        "frozenset({errno.ENOTDIR, ",
        "frozenset({",
        f"{HOST_TIER_SPECS}::test_a_folder_that_can_be_none_is_refused_before_anything_starts",
        needs_fixtures=True,
    ),
)
