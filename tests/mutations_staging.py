"""Bugs to plant in what is read, the way it takes and what is made of it; and the test that must notice."""

from __future__ import annotations

from tests.mutation import Mutation

PAIRS = "tests/transfer/test_any_pair.py::test_windows_chunks_and_states_between_groups_of_other_layers"
STAGING = "tests/transfer/test_staging.py"
COSTS = "tests/transfer/test_costs.py"
CONVERT = "tests/transfer/test_convert.py"
GUARDS = "tests/transfer/test_guards.py"
COPY_RUNS = "tests/kernels/test_copy_runs.py"
LATENTS = "tests/kernels/test_quantised_latents.py"
QUANTISE = "tests/kernels/test_quantise.py"

PARTS = (
    Mutation(
        "a layer sees what its group keeps",
        "rayk/transfer/plan.py",
        "live = spec.live_rows(num_tokens)",
        "live = self.consumer.groups[group].group.spec.live_rows(num_tokens)",
        PAIRS,
    ),
    Mutation(
        "layers bring their neighbours",
        "rayk/transfer/plan.py",
        "kept = read.layers if layers is None else tuple(n for n in read.layers if n in layers)",
        "kept = read.layers if layers is None or set(layers) & set(read.layers) else ()",
        PAIRS,
    ),
    Mutation(
        "a segment moves when its first row is there",
        "rayk/transfer/segments.py",
        "else min(found.stop, self._at(among.stop))",
        "else min(found.stop, self._at(among.stop - 1) + 1)",
        PAIRS,
    ),
    Mutation(
        "layers that see less bring what others see",
        "rayk/transfer/segments.py",
        "yield chosen, range(first, stop)",
        "yield chosen, range(first, borders[-1])",
        PAIRS,
    ),
    Mutation(
        "pushes of every producer rank",
        "rayk/transfer/plan.py",
        "mine = tuple(r for r in plan.reads if r.producer_rank == producer.tp_rank)",
        "mine = plan.reads if producer.tp_rank in plan.producer_ranks else ()",
        PAIRS,
    ),
)

STAGED = (
    Mutation(
        "what is lent overlaps",
        "rayk/transfer/staging.py",
        "if start + num_bytes <= first:",
        "if start < first:",
        f"{STAGING}::test_requests_that_wait_for_room_take_turns",
    ),
    Mutation(
        "what arrives late is copied all the same",
        "rayk/transfer/staging.py",
        "            if self.failure is None:\n                self._repack(chunk)",
        "            if state is TransferState.DONE:\n                self._repack(chunk)",
        f"{STAGING}::test_an_end_in_the_middle_leaves_nothing",
    ),
    Mutation(
        "a staged read that is cancelled is over",
        "rayk/transfer/reads.py",
        "is_over = self._staged[index][0].cancel()",
        "is_over = self._staged[index][0].cancel() or True",
        f"{STAGING}::test_a_lease_is_kept_and_its_blocks_are_taboo_until_late_chunks_are_here",
    ),
    Mutation(
        "gaps of any length are read along",
        "rayk/transfer/extents.py",
        "(source[1:] - ends[:-1] > gap_bytes)",
        "(source[1:] - ends[:-1] > 2 * gap_bytes)",
        f"{STAGING}::test_extents_cover_every_run_and_nothing_twice",
    ),
    Mutation(
        "those that spare least are staged first",
        "rayk/transfer/costs.py",
        "key=lambda i: -options[i].num_saved",
        "key=lambda i: options[i].num_saved",
        f"{COSTS}::test_a_request_of_too_many_descriptors_stages_those_that_spare_most",
    ),
    Mutation(
        "writes do not wait for their layers",
        "rayk/transfer/costs.py",
        "end = max(end, last * layer_ns) + write_ns[last - first - 1]",
        "end = end + write_ns[last - first - 1]",
        f"{COSTS}::test_pushes_wait_as_little_as_any_granularity_allows",
    ),
    Mutation(
        "runs end where they begin",
        "rayk/kernels/copy_runs/table.py",
        "high = int((offset + int(blocks.max()) * stride + lengths).max())",
        "high = int((offset + int(blocks.max()) * stride).max())",
        f"{COPY_RUNS}::test_runs_that_leave_a_buffer",
    ),
    Mutation(
        "a word more is copied on a GPU",
        "rayk/kernels/copy_runs/triton.py",
        "m = o_word[None, :] < num_words[:, None]",
        "m = o_word[None, :] <= num_words[:, None]",
        f"{COPY_RUNS}::test_every_alignment",
    ),
)

CONVERTED = (
    Mutation(
        "any format can be made any other",
        "rayk/transfer/handshake.py",
        "if formats and not can_convert(ours.spec, theirs.spec):",
        "if formats and can_convert(ours.spec, theirs.spec):",
        f"{GUARDS}::test_formats_may_differ_where_they_can_be_converted",
    ),
    Mutation(
        "converted with the producer's scales",
        "rayk/transfer/convert.py",
        "made = quantise(values, formats[1], own_scale, impl=impl)",
        "made = quantise(values, formats[1], wire_scale, impl=impl)",
        f"{CONVERT}::test_every_pair_of_formats_is_within_its_bound[float32-fp8_e4m3]",
    ),
    Mutation(
        "the first layer is proven to be converted",
        "rayk/transfer/convert.py",
        "            wrong += compare_digests(",
        "            wrong += [] if index else compare_digests(",
        f"{CONVERT}::test_a_wrong_conversion_is_named[places]",
    ),
    Mutation(
        "the first block of the wire cache stays taken",
        "rayk/transfer/wire.py",
        "self._pool.free([b for b in table if b != NULL_BLOCK])",
        "self._pool.free([b for b in table if b > NULL_BLOCK + 1])",
        f"{CONVERT}::test_every_pair_of_formats_is_within_its_bound[float32-fp8_e4m3]",
    ),
    Mutation(
        "requests do not wait for room in the wire cache",
        "rayk/transfer/wire.py",
        "if self.num_needed(num_tokens) > self._pool.num_free_blocks:",
        "if self.num_needed(num_tokens) > self._pool.num_blocks:",
        f"{CONVERT}::test_a_request_waits_for_room",
    ),
    Mutation(
        "ties of e2m1 go up",
        "rayk/kernels/quantise/reference.py",
        "((size > middle) if lower % 2 == 0 else (size >= middle))",
        "(size >= middle)",
        f"{QUANTISE}::test_nvfp4_is_as_published",
    ),
    Mutation(
        "ties of e4m3 go up on a GPU",
        "rayk/kernels/quantise/triton.py",
        "b_clipped + 0x7FFFF + ((b_clipped >> 20) & 1)",
        "b_clipped + 0x80000",
        f"{QUANTISE}::test_e4m3_agrees_with_torchs_own_cast",
    ),
    Mutation(
        "the smallest e4m3 are zeros on a GPU",
        "rayk/kernels/quantise/triton.py",
        "b_code = tl.where(b_clipped < 0x3C800000, b_subnormal, b_normal)",
        "b_code = tl.where(b_clipped < 0x3C800000, 0, b_normal)",
        f"{QUANTISE}::test_e4m3_agrees_with_torchs_own_cast",
    ),
    Mutation(
        "a scale passes over NaN on a GPU",
        "rayk/kernels/quantise/triton.py",
        "return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.float32, bitcast=True)",
        "return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis)",
        f"{QUANTISE}::test_nan_stays_nan_and_the_rest_finite",
    ),
    Mutation(
        "a latents' scale is for scores alone",
        "rayk/kernels/mla_attention/triton.py",
        "b_acc *= row_scale",
        "b_acc *= 1.0",
        f"{LATENTS}::test_numbers_match_float64",
    ),
    Mutation(
        "a rotated key has the latent's own scale",
        "rayk/kernels/mla_attention/triton.py",
        "p_rope, p_scale + 1, m_rope",
        "p_rope, p_scale, m_rope",
        f"{LATENTS}::test_numbers_match_float64",
    ),
    Mutation(
        "latents have the scale of values",
        "rayk/models/builders/mla.py",
        "kv_scale, _ = build.kv_scales(index)",
        "_, kv_scale = build.kv_scales(index)",
        "tests/engine/test_quantised_latents.py::test_the_keys_scale_is_the_latents",
        needs_fixtures=True,
    ),
    Mutation(
        "scales of latents are not told",
        "rayk/models/decoder.py",
        "if isinstance(owner, Attention | Mla)",
        "if isinstance(owner, Attention)",
        "tests/engine/test_quantised_latents.py::test_engines_with_other_scales_do_not_meet",
        needs_fixtures=True,
    ),
)

STAGED_READS = PARTS + STAGED + CONVERTED
