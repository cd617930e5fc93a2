"""Placement policies."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from rayk.sched.policies import POLICIES, Asked, EngineLoad, Placed, get_policy
from rayk.types.errors import UserError

ASKED = Asked(request_id="r", prompt_token_ids=(1,))


def loads(side: str, count: int) -> list[EngineLoad]:
    return [EngineLoad(name=f"{side}{i}") for i in range(count)]


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (1, 3), (2, 2), (2, 3), (4, 2), (3, 3)])
def test_round_robin_shares_equally_and_lets_every_pair_meet(num_prefill: int, num_decode: int) -> None:
    policy = get_policy("round_robin")
    pairs = num_prefill * num_decode
    sides = loads("p", num_prefill), loads("d", num_decode)
    places = [policy.place(ASKED, *sides) for _ in range(2 * pairs)]
    assert [p.prefill for p in places] == [f"p{n % num_prefill}" for n in range(2 * pairs)]
    assert Counter(p.decode for p in places) == {f"d{n}": 2 * num_prefill for n in range(num_decode)}
    every_pair = product((e.name for e in sides[0]), (e.name for e in sides[1]))
    assert Counter((p.prefill, p.decode) for p in places[:pairs]) == dict.fromkeys(every_pair, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_every_listed_policy_places_on_what_there_is(name: str) -> None:
    policy = get_policy(name)
    assert policy.place(ASKED, loads("p", 1), []) == Placed(prefill="p0", decode=None)
    placed = policy.place(ASKED, loads("p", 1), loads("d", 1))
    assert placed.prefill in ("p0", None)
    assert placed.decode == "d0"
    policy.ended(ASKED, placed)
    policy.lost("d0")


def test_an_unknown_policy_names_the_choices() -> None:
    with pytest.raises(UserError, match="round_robin"):
        get_policy("round_robbin")
