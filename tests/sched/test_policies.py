"""Placement policies."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from rayk.sched.policies import POLICIES, get_policy
from rayk.types.errors import UserError
from rayk.types.request import Request

REQUEST = Request(request_id="r", prompt_token_ids=(1,))


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (1, 3), (2, 2), (2, 3), (4, 2), (3, 3)])
def test_round_robin_shares_equally_and_lets_every_pair_meet(num_prefill: int, num_decode: int) -> None:
    policy = get_policy("round_robin")
    pairs = num_prefill * num_decode
    places = [policy.place(REQUEST, num_prefill, num_decode) for _ in range(2 * pairs)]
    assert [p for p, _ in places] == [n % num_prefill for n in range(2 * pairs)]
    assert Counter(d for _, d in places) == dict.fromkeys(range(num_decode), 2 * num_prefill)
    assert Counter(places[:pairs]) == dict.fromkeys(product(range(num_prefill), range(num_decode)), 1)


def test_every_listed_policy_exists() -> None:
    for name in POLICIES:
        assert get_policy(name).place(REQUEST, 1, 1) == (0, 0)


def test_an_unknown_policy_names_the_choices() -> None:
    with pytest.raises(UserError, match="round_robin"):
        get_policy("round_robbin")
