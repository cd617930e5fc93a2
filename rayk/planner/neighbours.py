"""Fit how much longer steps take while other engines of the host compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayk.costs.fit import nnls
from rayk.costs.table import EngineCosts, EngineKey, HostTable, engine_key
from rayk.planner.recorded import EngineStep, RecordedCell, settled

Floats = NDArray[np.float64]
FORMING = ("engines are formed", "engines are connected")  # stages of a run's start
MAX_RATIO = 8.0  # a step that took longer than so many times the fit was held up by something else


def fit_slow(
    cells: Sequence[RecordedCell], engines: Mapping[EngineKey, EngineCosts], *, num_cores: int
) -> HostTable:
    """Fit what steps lose in cells with several engines (a step's fit is of its engine alone): `slow` by the
    share of the other cores that other engines' steps keep busy, and, where all cores are taken, what passing
    the tokens of that time on takes of them. Errors weigh by the step's length: it is the time that counts.
    """
    found: list[_Lost] = []
    for cell in cells:
        keys = {engine_key(cell.config, engine) for engine in cell.cell.engines}
        if cell.is_alone or num_cores < 2 or not keys <= engines.keys():
            continue
        for repeat in {step.repeat for step in cell.steps}:
            found += _of_repeat([s for s in settled(cell) if s.repeat == repeat], cell, engines, num_cores)
    kept = [lost for lost in found if lost.measured_ns < MAX_RATIO * lost.fitted_ns]
    if not kept:
        return HostTable(num_cores=num_cores)
    fitted, measured, over, share, tokens = np.array([astuple(lost) for lost in kept]).T
    terms = np.stack([share * fitted, tokens / num_cores], axis=1)
    weights = 1 / np.sqrt(fitted)
    slow, token_ns = nnls(terms * weights[:, None], (measured - (1 + over) * fitted) * weights).tolist()
    return HostTable(num_cores=num_cores, slow=slow, token_ns=token_ns)


@dataclass(frozen=True, slots=True)
class _Lost:
    """A step beside those of other engines."""

    fitted_ns: float
    measured_ns: float
    over: float  # ranks that no core was left for, by cores
    share: float  # of the other cores, that was busy
    tokens: float  # of all engines, that came of it while all cores were taken


class _EngineTurns:
    """An engine's turns, in their order."""

    def __init__(self, steps: Sequence[EngineStep], num_ranks: int) -> None:
        self.steps = sorted(steps, key=lambda step: step.begin_ns)
        self.num_ranks = num_ranks
        self.begins = np.array([step.begin_ns for step in self.steps], dtype=float)
        self.ends = self.begins + [step.recorded.turn_ns for step in self.steps]
        self.tokens = np.array([step.recorded.features.num_logits for step in self.steps], dtype=float)

    def during(self, other: _EngineTurns, amounts: Floats) -> Floats:
        """Tell what of another engine's turns, each of which has so much, passed in each of these."""
        knots = np.stack([other.begins, np.maximum(other.ends, other.begins)], axis=1).ravel()
        done = np.cumsum(amounts)
        passed = np.stack([done - amounts, done], axis=1).ravel()
        knots = np.maximum.accumulate(knots)
        return np.asarray(np.interp(self.ends, knots, passed) - np.interp(self.begins, knots, passed))


def _of_repeat(
    steps: Sequence[EngineStep],
    cell: RecordedCell,
    engines: Mapping[EngineKey, EngineCosts],
    num_cores: int,
) -> list[_Lost]:
    by_engine: dict[str, list[EngineStep]] = {}
    for step in steps:
        by_engine.setdefault(step.engine, []).append(step)
    turns = {n: _EngineTurns(of, cell.engine_config(n).num_ranks) for n, of in by_engine.items()}
    num_ranks = sum(of.num_ranks for of in turns.values())
    found = []
    for name, own in turns.items():
        costs = engines[engine_key(cell.config, cell.engine_config(name))]
        others = [of for other, of in turns.items() if other != name]
        lengths = np.maximum(own.ends - own.begins, 1.0)
        busy, tokens = np.zeros(len(lengths)), np.zeros(len(lengths))
        for other in others:
            busy += other.num_ranks * own.during(other, other.ends - other.begins) / lengths
            tokens += own.during(other, other.tokens)
        beside = busy / max(1, num_ranks - own.num_ranks)
        taken = float(num_ranks >= num_cores)
        for i, step in enumerate(own.steps):
            recorded = step.recorded
            found.append(
                _Lost(
                    fitted_ns=max(1.0, costs.step_ns(recorded.features, strict=False)),
                    measured_ns=recorded.model_ns,
                    over=beside[i] * max(0.0, num_ranks / num_cores - 1),
                    share=min(1.0, busy[i] / (num_cores - 1)),
                    tokens=taken
                    * (tokens[i] + own.tokens[i] * beside[i])
                    * recorded.model_ns
                    / max(1, recorded.turn_ns),
                )
            )
    return found


def form_s(environment: Mapping[str, Any]) -> float:
    """Sum up what a new life of an engine takes, by the parts of a run's start: a process with its imports
    (its CPU time: what it takes where a core is free), loading, connecting. 0: the run did not say."""
    startup = environment.get("startup")
    if not isinstance(startup, Mapping):
        return 0.0
    ranks = [rank for of in _values(startup, "rank_cpu_s") for rank in of]
    stages = {stage["stage"]: float(stage["wall_s"]) for stage in startup.get("stages", ())}
    begun = max((float(rank.get("start", 0.0)) for rank in ranks), default=0.0)
    return begun + sum(stages.get(name, 0.0) for name in FORMING)


def _values(of: Mapping[str, Any], name: str) -> list[Any]:
    found = of.get(name)
    return list(found.values()) if isinstance(found, Mapping) else []
