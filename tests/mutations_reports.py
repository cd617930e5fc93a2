"""Bugs to plant in reports and comparisons of runs and benches."""

from __future__ import annotations

from tests.mutation import Mutation

PAIRED = "tests/reports/test_paired.py"
DISCOVERIES = "tests/reports/test_discoveries.py"
TRUST = "tests/reports/test_trust.py"
LOADS = "tests/reports/test_load_report.py"
RERUN = "tests/reports/test_rerun.py"
COLOURS = "tests/reports/test_colours.py"

COMPARED = (
    Mutation(
        "an interval is one order statistic too narrow",
        "rayk/reports/paired.py",
        "    return ordered[rank - 1], ordered[count - rank]\n",
        "    return ordered[rank], ordered[count - rank - 1]\n",
        f"{PAIRED}::test_an_interval_holds_the_median_as_often_as_it_says",
    ),
    Mutation(
        "every cell is marked at the rate of one",
        "rayk/reports/discoveries.py",
        "if chance <= rate * i / total), default=0)",
        "if chance <= rate), default=0)",
        f"{DISCOVERIES}::test_findings_are_those_of_benjamini_and_hochberg",
    ),
    Mutation(
        "intervals are as wide as if every cell were found",
        "rayk/reports/discoveries.py",
        "error = rate * max(1, found) / max(1, total)",
        "error = rate",
        f"{DISCOVERIES}::test_equal_runs_have_few_findings",
    ),
    Mutation(
        "no cell is found unless all hold together",
        "rayk/reports/discoveries.py",
        "error = rate * max(1, found) / max(1, total)",
        "error = rate / max(1, total)",
        f"{DISCOVERIES}::test_findings_are_those_of_benjamini_and_hochberg",
    ),
    Mutation(
        "what a cell's requests share is no chance",
        "rayk/reports/discoveries.py",
        "math.sqrt(own + self.shared)",
        "math.sqrt(own)",
        f"{DISCOVERIES}::test_equal_runs_have_few_findings",
    ),
    Mutation(
        "counts need as many pairs as times",
        "rayk/reports/paired.py",
        "low, high = (self.ratio, self.ratio) if self.metric.is_count else (self.low, self.high)",
        "low, high = self.low, self.high",
        f"{PAIRED}::test_counts_are_told_exactly_however_few",
    ),
    Mutation(
        "nothing changed is not said",
        "rayk/reports/compare_tables.py",
        "*([_cells_section(levels[CELL])] if others else []),",
        "*([_cells_section(levels[CELL])] if levels[CELL] and others else []),",
        f"{PAIRED}::test_with_nothing_marked_the_page_says_so",
    ),
    Mutation(
        "an interval may lie across the margin",
        "rayk/reports/paired.py",
        "is_more, is_less = low > 1 + MARGIN,",
        "is_more, is_less = low > 1,",
        f"{PAIRED}::test_the_whole_interval_must_be_beyond_the_margin",
    ),
    Mutation(
        "a higher rate is a regression",
        "rayk/reports/paired.py",
        'return "improvement" if is_more == self.metric.is_rate else "regression"',
        'return "regression" if is_more else "improvement"',
        f"{PAIRED}::test_slower_transfers_are_a_regression_of_their_tp_sizes",
    ),
    Mutation(
        "pairs of TP sizes are mixed",
        "rayk/reports/paired.py",
        "placed.groupby(axes, sort=True)",
        'placed.groupby(["decode.tp", "decode.tp"], sort=True)',
        f"{PAIRED}::test_slower_transfers_are_a_regression_of_their_tp_sizes",
    ),
    Mutation(
        "a batch is a request",
        "rayk/reports/paired_loads.py",
        "count = min(NUM_BATCHES, len(pairs) // MIN_BATCH)",
        "count = len(pairs)",
        f"{LOADS}::test_the_same_requests_are_compared_in_batches",
    ),
    Mutation(
        "batches that depend on each other count as many",
        "rayk/reports/paired_loads.py",
        "while count > MIN_BATCH and _is_correlated(",
        "while count < 0 and _is_correlated(",
        f"{LOADS}::test_a_queue_that_drains_makes_batches_few",
    ),
    Mutation(
        "other prompts are paired",
        "rayk/reports/paired_loads.py",
        "if cell_id not in trusted or not _same_prompts(rows):",
        "if cell_id not in trusted:",
        f"{LOADS}::test_other_requests_make_no_pairs",
    ),
    Mutation(
        "a ratio of estimates is as sure as one of them",
        "rayk/reports/paired_loads.py",
        "low=other_low / high,",
        "low=other_low / base,",
        f"{LOADS}::test_estimates_are_compared_by_both_intervals",
    ),
    Mutation(
        "a slower machine is not told",
        "rayk/reports/trust.py",
        "if max(before, now) > (1 + TOLERANCE) * min(before, now):",
        "if now > (1 + TOLERANCE) * before:",
        f"{TRUST}::test_rates_that_differ_by_more_than_a_fifth_are_told",
    ),
    Mutation(
        "a busy machine is not told",
        "rayk/reports/trust.py",
        "average > cores:",
        "average > 8 * cores:",
        f"{TRUST}::test_a_busy_machine_is_told",
    ),
    Mutation(
        "a busy machine keeps a run from being resumed without a warning",
        "rayk/reports/folder.py",
        'FACTS = ("git_commit", "python",',
        'FACTS = ("load", "git_commit", "python",',
        f"{TRUST}::test_no_probe_keeps_a_run_from_being_resumed",
    ),
    Mutation(
        "a checkpoint's command forgets the seed",
        "rayk/oracle/remake.py",
        '        options += ["--seed", str(parameters["seed"])]\n',
        "        pass\n",
        f"{RERUN}::test_a_checkpoints_command_writes_that_checkpoint",
        needs_fixtures=True,
    ),
    Mutation(
        "the command names folders of one machine",
        "rayk/reports/rerun.py",
        "    return [_relative(model) if word == model else word for word in command]\n",
        "    return command\n",
        f"{RERUN}::test_folders_of_this_machine_become_folders_of_any",
    ),
    Mutation(
        "curves of one prefill TP look alike",
        "rayk/reports/spreads.py",
        "DASHES[(decodes.index(decode) if decode else alone.index(prefill)) % len(DASHES)],",
        "DASHES[0],",
        f"{COLOURS}::test_twelve_curves_have_twelve_looks",
    ),
    Mutation(
        "the fastest load need not be believed",
        "rayk/reports/load_answers.py",
        'rated = cells[cells["verdict"] != "INVALID"].dropna(',
        "rated = cells.dropna(",
        f"{LOADS}::test_a_load_that_is_not_to_be_believed_comes_first",
    ),
)
