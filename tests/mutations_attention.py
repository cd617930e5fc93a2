"""Bugs to plant in how layers see a step."""

from __future__ import annotations

from tests.mutation import Mutation

TRANSFORMS = "rayk/attention/transforms.py"
GROUPS = "rayk/attention/groups.py"
SEES = "tests/attention/test_transforms.py::test_every_token_sees_what_it_should"
UNCHANGED = "tests/attention/test_transforms.py::test_what_changes_nothing_returns_what_it_was_given"
FIXTURE = "tests/attention/test_transforms.py::test_virtual_batches_of_the_fixture"
ONCE = "tests/attention/test_groups.py::test_each_transform_and_each_build_is_done_once_a_step"

ATTENTION = (
    Mutation(
        "a step that ends with a run has a virtual batch more",
        TRANSFORMS,
        "counts = (seq_lens - 1) // chunk - first + 1",
        "counts = seq_lens // chunk - first + 1",
        "tests/attention/test_transforms.py::test_fast_prefill_first_builds_fewer_virtual_batches_of_the_same",
    ),
    Mutation(
        "the last virtual batch ends with its run",
        TRANSFORMS,
        "ends = np.minimum(key_starts + chunk, seq_lens[requests])",
        "ends = key_starts + chunk",
        SEES,
    ),
    Mutation(
        "tokens before the step are queries of the first run",
        TRANSFORMS,
        "query_lens=ends - np.maximum(key_starts, computed[requests]),",
        "query_lens=ends - key_starts,",
        FIXTURE,
    ),
    Mutation(
        "virtual batches read their request's table from its first column on",
        TRANSFORMS,
        "first_columns = batches.key_starts // size",
        "first_columns = batches.key_starts * 0",
        SEES,
    ),
    Mutation(
        "a run that has just begun is taken for the one before",
        TRANSFORMS,
        "if common.max_seq_len <= chunk:",
        "if common.max_seq_len <= chunk + 1:",
        UNCHANGED,
    ),
    Mutation(
        "the window's oldest key is lost at a block's border",
        TRANSFORMS,
        "np.maximum(seq_lens - query_lens + 1 - window, 0)",
        "np.maximum(seq_lens - query_lens + 2 - window, 0)",
        SEES,
    ),
    Mutation(
        "the window is that of the last token",
        TRANSFORMS,
        "np.maximum(seq_lens - query_lens + 1 - window, 0)",
        "np.maximum(seq_lens - window, 0)",
        SEES,
    ),
    Mutation(
        "windows cut no columns off",
        TRANSFORMS,
        "if not first_columns.any():\n        return common",
        "if first_columns.any():\n        return common",
        "tests/attention/test_transforms.py::test_a_window_leaves_no_whole_block_in_front",
    ),
    Mutation(
        "requests without wanted tokens stay",
        TRANSFORMS,
        "kept = np.flatnonzero(counts)",
        "kept = np.arange(len(counts))",
        "tests/attention/test_transforms.py::test_requests_without_wanted_tokens_vanish",
    ),
    Mutation(
        "what is left keeps the tables of the first requests",
        TRANSFORMS,
        "reduced = _rebuilt(common, kept, query_lens, seq_lens[kept], np.zeros_like(kept))",
        "reduced = _rebuilt(common, np.arange(len(kept)), query_lens, seq_lens[kept], np.zeros_like(kept))",
        SEES,
    ),
    Mutation(
        "any tokens may be wanted",
        TRANSFORMS,
        "assert np.array_equal(wanted, last_ones)",
        "assert len(wanted) <= common.num_tokens",
        "tests/attention/test_transforms.py::test_tokens_that_are_not_the_last_cannot_be_wanted",
    ),
    Mutation(
        "layers of other keys keep slots to store in",
        TRANSFORMS,
        "return replace(reduced, slot_mapping=slots)",
        "return replace(reduced, slot_mapping=common.slot_mapping[: len(slots)])",
        "tests/attention/test_transforms.py::test_fast_prefill_of_the_fixture",
    ),
    Mutation(
        "columns beyond the table are the next request's",
        TRANSFORMS,
        "columns.clamp_(max=table.shape[1] - 1).add_(rows * table.shape[1])",
        "columns.add_(rows * table.shape[1])",
        SEES,
    ),
    Mutation(
        "every view transforms for itself",
        GROUPS,
        "self._chunked = cache(chunked_local)",
        "self._chunked = chunked_local",
        "tests/attention/test_groups.py::test_what_comes_to_the_same_is_built_once",
    ),
    Mutation(
        "every group builds for itself",
        GROUPS,
        "if key not in shared:",
        "if key not in built:",
        ONCE,
    ),
    Mutation(
        "windows are cut before runs",
        GROUPS,
        "        if seen is not None and view.chunk is not None:\n"
        "            seen = self._chunked(seen, view.chunk)\n"
        "        if seen is not None and view.window is not None:\n"
        "            seen = self._windowed(seen, view.window)\n",
        "        if seen is not None and view.window is not None:\n"
        "            seen = self._windowed(seen, view.window)\n"
        "        if seen is not None and view.chunk is not None:\n"
        "            seen = self._chunked(seen, view.chunk)\n",
        "tests/attention/test_views.py::test_exactly_the_keys_of_the_definition_are_counted",
    ),
    Mutation(
        "every layer is computed for wanted tokens only",
        GROUPS,
        "if view.fast_prefill and self._reduced is not None:",
        "if self._reduced is not None:",
        ONCE,
    ),
    Mutation(
        "layers in a window share what is built for all keys",
        GROUPS,
        "key = group.backend, common, *local",
        "key = group.backend, common",
        "tests/attention/test_groups.py::test_a_window_that_cuts_nothing_is_still_told_to_the_kernels",
    ),
    Mutation(
        "groups may be formed again",
        GROUPS,
        'assert self._groups is None, "attention groups are already initialised"',
        "assert layers is not None",
        "tests/attention/test_groups.py::test_initialising_twice_is_an_error",
    ),
    Mutation(
        "fast layers share the others' group",
        GROUPS,
        "key = (id(item.backend), item.spec, item.num_query_heads, item.view)",
        "key = (id(item.backend), item.spec, item.num_query_heads, item.view.kv_group, item.view.window)",
        "tests/attention/test_groups.py::test_any_difference_makes_another_group",
    ),
)
