"""Bugs to plant in how states travel and are proven, and the test that must notice each."""

from __future__ import annotations

from tests.mutation import Mutation

FAMILIES = "tests/transfer/test_families.py"
FAULTS = "tests/transfer/test_state_faults.py"
COST = "tests/transfer/test_digest_cost.py"
CUTS = "tests/transfer/test_cuts.py"
GUARDS = "tests/transfer/test_guards.py"

STATES = (
    Mutation(
        "every field is where the first one is",
        "rayk/transfer/plan.py",
        "held = [set(side.fields[position].units) for side in sides]",
        "held = [set(side.fields[0].units) for side in sides]",
        f"{FAMILIES}::test_every_family_at_tp_pairs_even_and_uneven",
    ),
    Mutation(
        "all bundles have the first one's block stride",
        "rayk/transfer/plan.py",
        "destination_strides=block_strides(destination, runs.destination),",
        "destination_strides=block_strides(destination, runs.destination[:1].repeat(len(runs))),",
        f"{FAMILIES}::test_one_group_of_b_and_c_at_every_tp_pair",
    ),
    Mutation(
        "a state's row is its token",
        "rayk/transfer/segments.py",
        "destination_row = here // self._tokens_per_row[0], there // self._tokens_per_row[1]",
        "destination_row = here // self._tokens_per_row[0], there",
        f"{FAMILIES}::test_every_family_at_tp_pairs_even_and_uneven",
    ),
    Mutation(
        "a tail is cut short of its last rows",
        "rayk/transfer/segments.py",
        "stop = min((last // quantum + 1) * quantum, num_rows)",
        "stop = min((last // quantum + 0) * quantum + 1, num_rows)",
        f"{CUTS}::test_a_tail_is_cut_at_a_sixteenth",
    ),
    Mutation(
        "what lies before a window moves with it",
        "rayk/transfer/segments.py",
        "first = (here + max(live.start - start, 0))",
        "first = (here + max(live.start - start, 0) * 0)",
        f"{CUTS}::test_a_window_is_cut_at_both_ends",
    ),
    Mutation(
        "cuts are free",
        "rayk/transfer/plan.py",
        "> num_more * BLOCK_COST_BYTES else whole",
        "> num_more * 0 else whole",
        f"{CUTS}::test_a_cut_that_saves_less_than_its_descriptors_cost_is_not_made",
    ),
    Mutation(
        "lists are freed under a read",
        "rayk/transfer/link.py",
        "if not prepared.num_users]",
        "if prepared.num_users >= 0]",
        "tests/transfer/test_prepared.py::test_the_least_recently_used_are_freed_when_no_read_uses_them",
    ),
    Mutation(
        "digests look for a state's row at its token",
        "rayk/transfer/verify.py",
        "row = token // (spec.block_size // rows)",
        "row = token % self.kernel_block_size * (rows == 1) + token",
        f"{FAMILIES}::test_every_family_arrives_verified",
    ),
    Mutation(
        "only the first field is compared",
        "rayk/transfer/verify.py",
        "np.flatnonzero((theirs != found[words.index]) & moved)",
        "np.flatnonzero((theirs != found[words.index]) & moved & (lanes.field_index[words.lane] == 0))",
        f"{FAULTS}::test_b_and_c_read_as_shards_of_a_replica",
    ),
    Mutation(
        "a field's units are those of the view before",
        "rayk/transfer/digest_words.py",
        "for unit in seen.units:",
        "for unit in view.fields[0].units[: len(seen.units)]:",
        f"{FAMILIES}::test_every_family_arrives_verified",
    ),
    Mutation(
        "row groups are counted from the request's first token",
        "rayk/transfer/digest_words.py",
        "first_group[self.view[lane]] + within",
        "within",
        f"{COST}::test_every_differing_word_is_named_and_no_other",
    ),
    Mutation(
        "all units of a row are digested as its first",
        "rayk/kernels/digest/views.py",
        "of_unit[:, :, 0] += step[:, None]",
        "of_unit[:, :, 0] += step[:1, None]",
        f"{COST}::test_native_code_is_called_once",
    ),
    Mutation(
        "any dtype will do",
        "rayk/transfer/verify.py",
        "assert view.dtype == dtype,",
        "assert view.dtype == dtype or view.dtype,",
        f"{FAULTS}::test_a_view_of_another_dtype_is_refused",
    ),
    Mutation(
        "taps are not compared",
        "rayk/transfer/handshake.py",
        'taps = f", {field.taps} taps" if field.taps else ""',
        'taps = ""',
        f"{GUARDS}::test_states_are_compared_field_by_field",
    ),
    Mutation(
        "shifted taps go unnamed",
        "rayk/transfer/diagnose.py",
        "for by in range(1, taps):",
        "for by in range(2, taps):",
        f"{FAULTS}::test_faults_of_the_map_are_named",
    ),
    Mutation(
        "a shift passes for a slice",
        "rayk/transfer/diagnose.py",
        "if len(moves) == 1 or len({i - j for i, j in moves}) > 1:",
        "if moves:",
        f"{FAULTS}::test_faults_of_the_map_are_named",
    ),
    Mutation(
        "any wrong state is foreign",
        "rayk/transfer/diagnose.py",
        "if not blocks or not is_most:",
        "if not blocks:",
        f"{FAULTS}::test_a_few_wrong_bytes_of_a_state_are_not_called_foreign",
    ),
)
