"""What engines have to do in one unit, prompt tokens computed on one rank, and who has least."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayk.sched.policies import EngineLoad


def work(engine: EngineLoad, output_cost: float, more: float = 0.0) -> float:
    """(prompt tokens to compute + output_cost * output tokens to generate + more) / TP size."""
    return (engine.num_prompt_tokens + output_cost * engine.num_output_tokens + more) / engine.tp


class Chooser:
    """Picks the engine with the least work; of several, the one with fewest requests, then the one that was
    picked longest ago."""

    def __init__(self) -> None:
        self._picks = 0
        self._picked: dict[str, int] = {}
        """Engine -> its last pick."""

    def least(self, engines: Sequence[EngineLoad], cost: Callable[[EngineLoad], float]) -> EngineLoad:
        """One of `engines`, of which there is one at least."""
        picked = self._picked
        best = min(engines, key=lambda e: (cost(e), e.num_requests, picked.get(e.name, 0)))
        self._picks += 1
        picked[best.name] = self._picks
        return best

    def lost(self, engine: str) -> None:
        """An engine may be gone for good."""
        self._picked.pop(engine, None)
