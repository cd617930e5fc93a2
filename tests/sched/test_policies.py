"""Placement policies."""

from __future__ import annotations

import pytest

from rayk.sched.policies import POLICIES, get_policy
from rayk.types.errors import UserError
from rayk.types.request import Request

REQUEST = Request(request_id="r", prompt_token_ids=(1,))


def test_round_robin_takes_each_side_in_turn() -> None:
    policy = get_policy("round_robin")
    assert [policy.place(REQUEST, 2, 3) for _ in range(7)] == [
        (0, 0),
        (1, 1),
        (0, 2),
        (1, 0),
        (0, 1),
        (1, 2),
        (0, 0),
    ]


def test_every_listed_policy_exists() -> None:
    for name in POLICIES:
        assert get_policy(name).place(REQUEST, 1, 1) == (0, 0)


def test_an_unknown_policy_names_the_choices() -> None:
    with pytest.raises(UserError, match="round_robin"):
        get_policy("round_robbin")
