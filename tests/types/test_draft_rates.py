"""What is expected of drafts, against arithmetic by hand and against draws."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest

from rayk.types.draft_rates import DraftRates


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("num_tokens", [1, 3, 5])
def test_a_chance_for_each_token_is_a_sum_of_products(chance: float, num_tokens: int) -> None:
    """Over every outcome of a draft's tokens: those before the first wrong one count, and one more."""
    rates = DraftRates.even(chance, num_tokens)
    expected = 0.0
    for outcome in product((True, False), repeat=num_tokens):
        weight = prod(chance if is_right else 1 - chance for is_right in outcome)
        expected += weight * (1 + (*outcome, False).index(False))
    assert rates.tokens_per_step(num_tokens) == pytest.approx(expected)
    assert rates.tokens_per_step(num_tokens) == pytest.approx(sum(chance**n for n in range(num_tokens + 1)))


def test_tokens_of_steps_with_and_without_drafts() -> None:
    """Half of the steps propose a token, a quarter a second; 0.8 of the first, 0.4 of these are right."""
    rates = DraftRates((0.8, 0.4), (0.5, 0.25))
    assert rates.tokens_per_step(2) == pytest.approx(1 + 0.5 * 0.8 + 0.25 * 0.4)
    assert rates.tokens_per_step(1) == pytest.approx(1 + 0.5 * 0.8)
    assert rates.tokens_per_step(0) == 1
    assert (rates.drafts_per_step(2), rates.drafts_per_step(1)) == (0.75, 0.5)
    assert DraftRates((0.8, 0.4)).drafts_per_step(2) == 2
    assert DraftRates.even(0.5, 3, proposed=0.2).tokens_per_step(3) == pytest.approx(1 + 0.2 * 0.875)


def test_numbers_drawn_have_the_shares() -> None:
    rates, draw = DraftRates((0.9, 0.5, 0.1), (0.7, 0.7, 0.2)), random.Random(0)
    numbers = [draw.random() for _ in range(20_000)]
    accepted, proposed = ([count(u) for u in numbers] for count in (rates.num_accepted, rates.num_proposed))
    for position, (share, of) in enumerate(zip(rates.accepted, rates.proposed, strict=True), start=1):
        assert sum(n >= position for n in accepted) / len(numbers) == pytest.approx(share, abs=0.01)
        assert sum(n >= position for n in proposed) / len(numbers) == pytest.approx(of, abs=0.01)
    sure = DraftRates((1.0, 0.0))
    assert {sure.num_accepted(u) for u in (0.0, 0.5, 1 - 2**-53)} == {1}
    assert {sure.num_proposed(u) for u in (0.0, 0.5, 1 - 2**-53)} == {2}


def test_rates_of_what_was_counted() -> None:
    rates = DraftRates.counted(100, [80, 60, 0], [60, 30, 0])
    assert rates == DraftRates((0.75, 0.5), (0.8, 0.6))
    assert rates.tokens_per_step(3) == pytest.approx(1 + (60 + 30) / 100), "as many as were counted"
    assert DraftRates.counted(9, [], []) == DraftRates(())
    # The second position had one draft of five, which was right.
    assert DraftRates.counted(10, [5, 1], [2, 1]).accepted == (0.4, 0.4)
