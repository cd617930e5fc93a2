"""What followed the same tokens earlier: against transformers' prompt lookup, and in no time that grows."""

from __future__ import annotations

import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from rayk.sched.ngram import NgramIndex

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def looked_up(tokens: list[int], num_tokens: int, longest: int) -> list[int]:
    """What transformers proposes: it looks for runs down to a single token."""
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=num_tokens, max_matching_ngram_size=longest, max_length=1 << 20
    )
    found, _ = generator.get_candidates(torch.tensor([tokens]))
    return list(found[0, len(tokens) :].tolist())


def longest_run(tokens: list[int], longest: int) -> int:
    """How many of the last tokens stand earlier, too."""
    lengths = [
        n
        for n in range(1, min(longest, len(tokens) - 1) + 1)
        if any(tokens[i : i + n] == tokens[-n:] for i in range(len(tokens) - n))
    ]
    return max(lengths, default=0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TOKENS, st.integers(1, 5), st.integers(0, 3), st.integers(1, 6), st.integers(0, 40))
def test_it_proposes_what_transformers_would(
    tokens: list[int], shortest: int, more: int, num_tokens: int, num_first: int
) -> None:
    """The index is made of the first tokens; the others come one to three at a time."""
    longest = shortest + more
    num_known = min(len(tokens), max(1, num_first))
    index = NgramIndex(tokens[:num_known], shortest, longest)
    while True:
        known = tokens[:num_known]
        expected = looked_up(known, num_tokens, longest) if longest_run(known, longest) >= shortest else []
        assert index.propose(known, num_tokens) == expected
        if num_known == len(tokens):
            break
        num_known = min(len(tokens), num_known + 1 + num_known % 3)


def test_large_ids_and_runs_of_zeros_are_told_apart() -> None:
    top = 2**31 - 1
    assert NgramIndex([0, 0, top, 7, 0, top], 2, 2).propose([0, 0, top, 7, 0, top], 2) == [7, 0]
    assert NgramIndex([0, 0, 5, 0, 0], 2, 2).propose([0, 0, 5, 0, 0], 9) == [5, 0, 0]
    assert NgramIndex([3], 1, 4).propose([3], 4) == []


def test_a_look_up_takes_as_long_in_a_long_context() -> None:
    """100,000 tokens in which the last two stand often, and the last three never."""
    tokens = [t for i in range(25_000) for t in (1, 2, 10 + i, 3)] + [9, 1, 2]
    index = NgramIndex(tokens, 2, 4)
    assert index.propose(tokens, 2) == [10, 3]
    began = time.perf_counter()
    for i in range(200):
        tokens.append(1 + i % 2)
        index.propose(tokens, 4)
    assert (time.perf_counter() - began) / 200 < 1e-3, "a step reads the whole context again"
