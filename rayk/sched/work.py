"""Measure what engines have to do, in prompt tokens computed on one rank, and choose who has least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayk.sched.policy import EngineLoad

NOTHING: Mapping[str, float] = {}


def work(
    engines: Sequence[EngineLoad], output_cost: float, own: float, spared: Mapping[str, float] = NOTHING
) -> list[float]:
    """Compute (prompt tokens to compute + output_cost * output tokens to generate + own - spared) / ranks
    of each engine. `own` is what the request adds; `spared` is by engine name."""
    return [
        (e.num_prompt_tokens + output_cost * e.num_output_tokens + own - spared.get(e.name, 0.0))
        / e.num_ranks
        for e in engines
    ]


class Chooser:
    """Picks the engine with the least work, then fewest requests, then the one picked longest ago."""

    def __init__(self) -> None:
        self._picks = 0
        self._picked: dict[str, int] = {}  # engine -> its last pick

    def least(self, engines: Sequence[EngineLoad], costs: Sequence[float]) -> EngineLoad:
        least, picked = min(costs), self._picked
        equal = [e for e, cost in zip(engines, costs, strict=True) if cost == least]
        best = min(equal, key=lambda e: (e.num_requests, picked.get(e.name, 0)))
        self._picks += 1
        picked[best.name] = self._picks
        return best

    def lost(self, engine: str) -> None:
        self._picked.pop(engine, None)
