"""Fit how much longer steps take while other engines of the host compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayk.costs.table import EngineCosts, EngineKey, HostTable, engine_key
from rayk.planner.recorded import EngineStep, RecordedCell, settled

Floats = NDArray[np.float64]
FORMING = ("engines are formed", "engines are connected")  # stages of a run's start
MAX_RATIO = 4.0  # a step that took longer than so many times the fit was held up by something else


def fit_slow(
    cells: Sequence[RecordedCell], engines: Mapping[EngineKey, EngineCosts], *, num_cores: int
) -> HostTable:
    """Fit `slow` to cells with several engines: measured over fitted time is 1 + slow * busy, where busy is
    the share of the other cores that other engines' steps kept busy during the step. A step's fit is of its
    engine alone, so the mean of its ratio where nothing else was busy need not be looked for."""
    busy, ratios = [], []
    for cell in cells:
        keys = {engine_key(cell.config, engine) for engine in cell.cell.engines}
        if cell.is_alone or num_cores < 2 or not keys <= engines.keys():
            continue
        for repeat in {step.repeat for step in cell.steps}:
            found = _of_repeat([s for s in settled(cell) if s.repeat == repeat], cell, engines, num_cores)
            busy += [b for b, _ in found]
            ratios += [r for _, r in found]
    kept = [(b, r) for b, r in zip(busy, ratios, strict=True) if r < MAX_RATIO]
    weight = sum(b * b for b, _ in kept)
    slow = max(0.0, sum(b * (r - 1) for b, r in kept) / weight) if weight else 0.0
    return HostTable(num_cores=num_cores, slow=slow)


def _of_repeat(
    steps: Sequence[EngineStep],
    cell: RecordedCell,
    engines: Mapping[EngineKey, EngineCosts],
    num_cores: int,
) -> list[tuple[float, float]]:
    """Return (busy, measured over fitted) of each step."""
    by_engine: dict[str, list[EngineStep]] = {}
    for step in steps:
        by_engine.setdefault(step.engine, []).append(step)
    spans = {name: _spans(of) for name, of in by_engine.items()}
    found = []
    for name, of in by_engine.items():
        costs = engines[engine_key(cell.config, cell.engine_config(name))]
        begins, ends = spans[name]
        busy = np.zeros(len(of))
        for other in by_engine.keys() - {name}:
            covered = _covered(spans[other], ends) - _covered(spans[other], begins)
            busy += cell.engine_config(other).num_ranks * covered / np.maximum(ends - begins, 1.0)
        shares = np.minimum(1.0, busy / (num_cores - 1))
        fitted = [costs.step_ns(step.recorded.features, strict=False) for step in of]
        ratios = [s.recorded.model_ns / max(1.0, f) for s, f in zip(of, fitted, strict=True)]
        found += list(zip(shares.tolist(), ratios, strict=True))
    return found


def _spans(steps: Sequence[EngineStep]) -> tuple[Floats, Floats]:
    """Return when an engine's steps began and ended, in their order."""
    ordered = sorted(steps, key=lambda step: step.begin_ns)
    begins = np.array([step.begin_ns for step in ordered], dtype=float)
    return begins, begins + np.array([step.recorded.turn_ns for step in ordered], dtype=float)


def _covered(spans: tuple[Floats, Floats], times: Floats) -> Floats:
    """Return for how long an engine had computed by each of the times."""
    begins, ends = spans
    knots = np.stack([begins, np.maximum(ends, begins)], axis=1).ravel()
    done = np.cumsum(ends - begins)
    amounts = np.stack([done - (ends - begins), done], axis=1).ravel()
    return np.interp(times, np.maximum.accumulate(knots), amounts)


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
