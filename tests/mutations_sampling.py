"""Bugs to plant where tokens are chosen, told of and ended; see mutations.py."""

from __future__ import annotations

from tests.mutation import Mutation

FILTERS = "tests/engine/test_filters.py"
NOISE = "tests/engine/test_noise.py"
STOPS = "tests/engine/test_stop_strings.py"
TOLD = "tests/sched/test_prompt_logits.py::test_every_prompt_token_is_told_of_once"
LEFT = f"{FILTERS}::test_filters_leave_what_transformers_leave"
FOUND = f"{STOPS}::test_a_stop_string_is_found_with_the_token_that_completes_it"

SAMPLING = (
    Mutation(
        "one best token too many",
        "rayk/engine/filters.py",
        "torch.tensor(counts, device=scores.device)[:, None] - 1)",
        "torch.tensor(counts, device=scores.device)[:, None].clamp(max=best.shape[1] - 1))",
        LEFT,
    ),
    Mutation(
        "ties with the last of the best are dropped",
        "rayk/engine/filters.py",
        "scores < last, NEVER",
        "scores <= last, NEVER",
        LEFT,
    ),
    Mutation(
        "top-p keeps what just exceeds it",
        "rayk/engine/filters.py",
        "removed = cumulative <= 1 -",
        "removed = cumulative < 0.999 -",
        LEFT,
    ),
    Mutation(
        "temperature forgotten",
        "rayk/engine/filters.py",
        "/ _column(scores, [p.temperature for p in params])",
        "/ 1.0",
        LEFT,
    ),
    Mutation(
        "the first row's top-p holds for all",
        "rayk/engine/filters.py",
        "[p.top_p for p in params]",
        "[params[0].top_p for p in params]",
        LEFT,
    ),
    Mutation(
        "negative logits are rewarded",
        "rayk/engine/filters.py",
        "torch.where(found < 0, found * penalty, found / penalty)",
        "found / penalty",
        f"{FILTERS}::test_repetition_is_penalised_as_transformers_does",
    ),
    Mutation(
        "the prompt may be repeated",
        "rayk/engine/filters.py",
        "{*row.prompt_token_ids, *row.output_token_ids}",
        "{*row.output_token_ids}",
        f"{FILTERS}::test_repetition_is_penalised_as_transformers_does",
    ),
    Mutation(
        "presence counts as often as frequency",
        "rayk/engine/filters.py",
        "p.presence_penalty + p.frequency_penalty * times",
        "(p.presence_penalty + p.frequency_penalty) * times",
        f"{FILTERS}::test_presence_and_frequency_follow_openais_formula",
    ),
    Mutation(
        "noise by column, not by token",
        "rayk/engine/sampling.py",
        "gumbel(keys, ids)",
        "gumbel(keys, torch.arange(ids.shape[-1]))",
        f"{FILTERS}::test_a_batch_mixes_greedy_and_drawn_rows_of_every_kind",
    ),
    Mutation(
        "noise by row of the batch",
        "rayk/engine/sampling.py",
        "draw_key(row.params.seed, len(row.output_token_ids))",
        "draw_key(row.params.seed + len(keys), len(row.output_token_ids))",
        f"{FILTERS}::test_a_batch_mixes_greedy_and_drawn_rows_of_every_kind",
    ),
    Mutation(
        "shifts copy the sign in",
        "rayk/engine/noise.py",
        " & ((1 << _BITS) - 1)",
        "",
        f"{NOISE}::test_the_ends_of_the_interval_are_open",
    ),
    Mutation(
        "one bit too many for a float64 below 1",
        "rayk/engine/noise.py",
        "_BITS = 52",
        "_BITS = 53",
        f"{NOISE}::test_the_ends_of_the_interval_are_open",
    ),
    Mutation(
        "neighbouring indices share their numbers",
        "rayk/engine/noise.py",
        "signed(_mixed(seed, index))",
        "signed(_mixed(seed) + index * _GOLDEN & MASK64)",
        f"{NOISE}::test_no_two_requests_or_indices_share_their_numbers",
    ),
    Mutation(
        "ranks count from zero",
        "rayk/engine/sampling.py",
        "(logprobs > chosen).sum(-1) + 1",
        "(logprobs > chosen).sum(-1)",
        f"{FILTERS}::test_log_probabilities_ranks_and_best_tokens",
    ),
    Mutation(
        "prompt tokens told of again after a preemption",
        "rayk/sched/batching.py",
        "start = max(0, len(self.prompt_logprobs) - 1 - self.num_computed)",
        "start = 0",
        TOLD,
    ),
    Mutation(
        "the first output token told of as the prompt's",
        "rayk/sched/batching.py",
        "len(self.request.prompt_token_ids) - 1 - self.num_computed",
        "len(self.request.prompt_token_ids) - self.num_computed",
        TOLD,
    ),
    Mutation(
        "half a character is text",
        "rayk/engine/stopping.py",
        "if new and not new.endswith(REPLACEMENT):",
        "if new:",
        FOUND,
    ),
    Mutation(
        "what comes before half a character is not text",
        "rayk/engine/stopping.py",
        "new.rstrip(REPLACEMENT)",
        '("" if new.endswith(REPLACEMENT) else new)',
        FOUND,
    ),
    Mutation(
        "every token decoded as if it began the text",
        "rayk/engine/stopping.py",
        "self._num_context = len(self._token_ids)",
        "self._token_ids = []",
        FOUND,
    ),
    Mutation(
        "a stop string's beginning is forgotten too soon",
        "rayk/engine/stopping.py",
        "len(text) - longest + 1",
        "len(text) - longest + 2",
        FOUND,
    ),
)
