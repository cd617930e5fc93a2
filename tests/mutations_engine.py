"""Bugs to plant in what an engine tells its layers of a step, and in how its settings are checked."""

from __future__ import annotations

from tests.mutation import Mutation

STEPS = "tests/engine/test_inputs.py::test_steps_match_a_loop_over_tokens"
GRAPHS = "tests/engine/test_graphs.py"
SPECS = "tests/specs/test_engines.py"

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
        "self._rows.seq_lens[:num_requests] = inputs.positions + 1",
        "self._rows.seq_lens[:num_requests] = inputs.positions",
        f"{GRAPHS}::test_a_step_sees_only_its_own_rows_and_padding_that_stores_nothing",
    ),
    Mutation(
        "kernel blocks of a kind are not checked",
        "rayk/specs/engines.py",
        "rows = sizes.get(kind, engine.kernel_block_size)",
        "rows = engine.kernel_block_size",
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
)
