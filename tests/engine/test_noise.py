"""The random numbers: known values, uniform in every direction, and functions of their place alone."""

from __future__ import annotations

import math

import pytest
import torch

from rayk.engine.noise import derived_seed, draw_key, gumbel, random_bits, to_unit, uniform
from tests.engine.statistics import KOLMOGOROV, P_VALUE, chi_square_p, kolmogorov

N = 100_000


def keys(*seed_and_index: tuple[int, int]) -> torch.Tensor:
    return torch.tensor([draw_key(seed, index) for seed, index in seed_and_index])


def numbers(direction: str) -> torch.Tensor:
    """N uniforms that differ in one coordinate only."""
    if direction == "token":
        return uniform(keys((7, 3)), torch.arange(N))[0]
    step = {"seed": lambda i: (i, 3), "negative seed": lambda i: (-i - 1, 3), "index": lambda i: (7, i)}
    return uniform(keys(*(step[direction](i) for i in range(N))), torch.tensor([11]))[:, 0]


def test_a_key_starts_the_published_generator() -> None:
    """First outputs of Vigna's splitmix64.c for the state 1234567."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    bits = random_bits(torch.tensor([1234567]), torch.arange(5))[0]
    assert [b % 2**64 for b in bits.tolist()] == published


@pytest.mark.parametrize("direction", ["token", "seed", "negative seed", "index"])
def test_numbers_are_uniform_and_unrelated_to_their_neighbours(direction: str) -> None:
    u = numbers(direction)
    assert kolmogorov(u) < KOLMOGOROV
    # Pairs fill the unit square: also neighbours, and those a power of two apart.
    for lag in (1, 2, 64):
        cells = (u[:-lag] * 16).long() * 16 + (u[lag:] * 16).long()
        assert chi_square_p(torch.bincount(cells, minlength=256), torch.ones(256)) > P_VALUE, lag
    # The lowest bit that is used is as random as the highest.
    low = (u * 2**51).long() % 2
    assert chi_square_p(torch.bincount(low, minlength=2), torch.ones(2)) > P_VALUE


def test_the_fit_tests_themselves_find_a_bad_generator() -> None:
    u = numbers("token")
    assert kolmogorov(u * 0.99) > KOLMOGOROV
    biased = torch.bincount((u**1.05 * 256).long(), minlength=256)
    assert chi_square_p(biased, torch.ones(256)) < P_VALUE


def test_the_ends_of_the_interval_are_open() -> None:
    ends = to_unit(torch.tensor([0, -1, -(2**63), 2**63 - 1]))
    assert bool((ends > 0).all())
    assert bool((ends < 1).all())
    assert bool((-(-ends.log()).log()).isfinite().all())
    assert ends[2] > 0.5 > ends[3] > 0.49, "the sign bit is the highest, not a sign"


def test_no_two_requests_or_indices_share_their_numbers() -> None:
    places = [(s, i) for s in (*range(-20, 20), 2**63 - 1, -(2**63)) for i in range(50)]
    bits = random_bits(keys(*places), torch.arange(40))
    assert len(bits.unique()) == bits.numel()
    assert len({derived_seed(p, r) for p in range(50) for r in range(50)}) == 2500
    assert all(0 <= derived_seed(p, 0) < 2**63 for p in range(50))


def test_noise_depends_on_the_token_id_and_not_on_its_column() -> None:
    two = keys((1, 0), (2, 5))
    whole = gumbel(two, torch.arange(50))
    some = torch.tensor([[3, 8, 49], [0, 8, 20]])
    assert torch.equal(gumbel(two, some), whole.gather(1, some))
    assert torch.equal(gumbel(two[1:], torch.arange(50))[0], whole[1])


@pytest.mark.parametrize("name", ["equal", "steep", "two"])
def test_the_best_of_scores_and_noise_has_their_distribution(name: str) -> None:
    logits = {
        "equal": torch.zeros(40),
        "steep": -torch.arange(40.0) / 3,
        "two": torch.tensor([0.0, math.log(3.0)]),
    }[name].double()
    states = keys(*((seed, 0) for seed in range(20_000)))
    drawn = (logits + gumbel(states, torch.arange(len(logits)))).argmax(-1)
    counts = torch.bincount(drawn, minlength=len(logits))
    assert chi_square_p(counts, logits.softmax(-1)) > P_VALUE
