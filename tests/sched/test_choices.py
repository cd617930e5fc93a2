"""Who is chosen among many engines, against a scan of all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rayk.sched import policy as policy_module
from rayk.sched.loads import LoadBook
from rayk.sched.policies import get_policy
from rayk.sched.policies.session_affinity import SessionAffinity, _lot, _seed
from rayk.sched.policy import EngineLoad, EngineSet, Placement, PlacementRequest, PolicySettings
from rayk.sched.request_describer import RequestDescriber
from rayk.sched.work import Spared

SETTINGS = PolicySettings(
    output_cost=0.1, move_cost=0.3, block_tokens=4, host_cost=0.4, host_blocks=4096, local_prompt_tokens=9
)
"""An output token costs what rounds: sums of such come out unlike, and alike once more is added."""


class Scan:
    """Compares all engines, in place of a Chooser."""

    def __init__(self, output_cost: float) -> None:
        self._output_cost = output_cost
        self._picks = 0
        self._picked: dict[str, int] = {}

    def least(self, engines: EngineSet, own: float, spared: Spared = ()) -> EngineLoad:
        tokens = {name: num for num, names in spared for name in names}
        costs = [
            (e.num_prompt_tokens + self._output_cost * e.num_output_tokens + own - tokens.get(e.name, 0.0))
            / e.num_ranks
            for e in engines
        ]
        least = min(costs)
        equal = [e for e, cost in zip(engines, costs, strict=True) if cost == least]
        best = min(equal, key=lambda e: (e.num_requests, self._picked.get(e.name, 0)))
        self._picks += 1
        self._picked[best.name] = self._picks
        return best

    def lost(self, engine: str) -> None:
        self._picked.pop(engine, None)


class Fleet:
    """Engines of two sides that come and go, and requests that do."""

    def __init__(self, num_engines: int, seed: int) -> None:
        self.draw = random.Random(seed)
        self.book = LoadBook()
        self.names = {side: [f"{side}{i}" for i in range(num_engines // 2)] for side in "pd"}
        for number, name in enumerate([*self.names["p"], *self.names["d"]]):
            self.book.add(name, (1, 1, 2, 4)[number % 4])
            if number % 3:
                self.book.attached(name, f"node {number // 8}")
        self.sides = self.open()
        self.running: list[str] = []
        self.describer = RequestDescriber("prefix_aware", SETTINGS, b"of these tests")

    def open(self) -> tuple[EngineSet, EngineSet]:
        """Nine engines in ten take requests, and now and then those that decode are all away."""
        p, d = ([n for n in self.names[side] if self.draw.random() < 0.9] for side in "pd")
        return self.book.of(p or self.names["p"]), self.book.of(d if self.draw.random() < 0.9 else [])

    def ask(self, number: int) -> PlacementRequest:
        draw = self.draw
        prompt = [draw.randrange(6)] * draw.choice([4, 8, 8, 16]) + draw.choices(
            range(9), k=draw.randint(1, 5)
        )
        session = f"session {draw.randrange(30)}" if draw.random() < 0.7 else None
        return self.describer.describe(
            str(number), prompt, max_tokens=draw.choice([1, 2, 3, 7, 7, 30]), session=session
        )

    def placed(self, asked: PlacementRequest, placement: Placement) -> None:
        self.book.placed(asked, placement)
        self.running.append(asked.request_id)

    def some_news(self) -> str | None:
        """Requests get on; the name of an engine or a tier that is lost, if one is."""
        while len(self.running) > 60:
            self.book.ended(self.running.pop(self.draw.randrange(len(self.running))))
        if self.running:
            self.book.prefilled(self.draw.choice(self.running))
        if self.draw.random() < 0.02:
            self.sides = self.open()
        if self.draw.random() < 0.02:
            return self.draw.choice([*self.names["p"], *self.names["d"], "node 1"])
        return None


def scanning(name: str) -> Any:
    """A policy that looks at every engine."""
    policy: Any = get_policy(name, SETTINGS)
    owners: list[Any] = [policy, getattr(policy, "_aware", None), getattr(policy, "_least_loaded", None)]
    for owner in owners:
        if hasattr(owner, "_chooser"):
            owner._chooser = Scan(SETTINGS.output_cost)
    return policy


@pytest.mark.parametrize("name", ["least_loaded", "prefix_aware", "conditional", "session_affinity"])
@pytest.mark.parametrize(("num_engines", "num_events"), [(8, 700), (200, 1500)])
def test_kept_orders_choose_as_a_scan_does(
    name: str, num_engines: int, num_events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "MAX_CHANGES", 300)
    fleet, policy, scan = Fleet(num_engines, seed=1), get_policy(name, SETTINGS), scanning(name)
    chosen: set[str | None] = set()
    for number in range(num_events):
        asked = fleet.ask(number)
        placement = policy.place(asked, *fleet.sides)
        assert placement == scan.place(asked, *fleet.sides), number
        fleet.placed(asked, placement)
        chosen |= {placement.prefill, placement.decode}
        lost = fleet.some_news()
        if lost is not None:
            policy.lost(lost)
            scan.lost(lost)
    assert len(chosen) > num_engines / 4, "they differ in what they have to do"


def test_lots_drawn_at_once_are_won_by_who_wins_them_one_by_one() -> None:
    policy = SessionAffinity(SETTINGS)
    engines = EngineSet(EngineLoad(name=f"engine {i}", num_ranks=(1, 2, 4)[i % 3]) for i in range(300))
    for number in range(500):
        session = _seed(f"session {number}")
        best = min(engines, key=lambda e: (_lot(session, _seed(e.name), e.num_ranks), e.name))
        assert policy._of(session, engines) == best.name
