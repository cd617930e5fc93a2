"""Loads of engines, against a sum over all requests that are under way."""

from __future__ import annotations

import random

import pytest

from rayk.sched.loads import LoadBook
from rayk.sched.policy import EngineLoad, Placement, PlacementRequest

NAMES = ("p0", "p1", "d0", "d1")


def brute(placed: dict[str, tuple[PlacementRequest, Placement]], ahead: set[str]) -> list[EngineLoad]:
    """What each engine has to do, from scratch."""
    found = {name: EngineLoad(name=name) for name in NAMES}
    for request_id, (asked, place) in placed.items():
        for name in {place.prefill, place.decode} - {None}:
            found[name].num_requests += 1
        found[place.decode or place.prefill or ""].num_output_tokens += asked.max_tokens
        if request_id in ahead:
            computer = found[place.prefill or place.decode or ""]
            computer.num_prompt_tokens += asked.num_prompt_tokens - place.num_cached_tokens
    return list(found.values())


@pytest.mark.parametrize("seed", range(5))
def test_loads_are_the_sums_over_requests(seed: int) -> None:
    draw, book = random.Random(seed), LoadBook()
    for name in NAMES:
        book.add(name)
    placed: dict[str, tuple[PlacementRequest, Placement]] = {}
    ahead: set[str] = set()
    for i in range(300):
        event = draw.choice(["place", "place", "prefilled", "ended"])
        known = draw.choice(list(placed)) if placed else "nobody"
        if event == "place":
            asked = PlacementRequest(
                request_id=str(i),
                num_prompt_tokens=draw.randint(1, 99),
                max_tokens=draw.randint(1, 9),
            )
            p, d = draw.choice(["p0", "p1", None]), draw.choice(["d0", "d1", None])
            cached = draw.randint(0, asked.num_prompt_tokens - 1)
            place = Placement(prefill=p, decode=d if p else "d0", num_cached_tokens=cached)
            placed[str(i)] = (asked, place)
            ahead.add(str(i))
            book.placed(asked, place)
        elif event == "prefilled":
            ahead.discard(known)
            book.prefilled(known)
        else:
            ahead.discard(known)
            assert book.ended(known) == placed.pop(known, None)
        assert list(book.of(NAMES)) == brute(placed, ahead)


def test_what_is_told_of_an_engine_that_is_gone_is_passed_over() -> None:
    book = LoadBook()
    book.add("p0")
    asked, place = PlacementRequest(request_id="r", num_prompt_tokens=2), Placement(prefill="p0", decode=None)
    book.placed(asked, place)
    book.remove("p0")
    book.prefilled("r")
    assert book.ended("r") == (asked, place)
    assert book.ended("r") is None
