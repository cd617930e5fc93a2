"""Fit how much longer steps take while other engines of the host compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayk.costs.fit import nnls
from rayk.costs.losses import Crowding, StepLosses, crowding
from rayk.costs.table import EngineCosts, EngineKey, engine_key
from rayk.planner.recorded import EngineStep, RecordedCell, settled

Floats = NDArray[np.float64]
FORMING = ("engines are formed", "engines are connected")  # stages of a run's start
CLASSES = ("prefill", "decode")
MAX_RATIO = 8.0  # a step that took longer than so many times the fit was held up by something else
MIN_STEPS = 20
"""Fewer steps of a class, each beside another class for all of its time, do not tell what that costs."""
_ROUNDS = 30  # of a fit: each is better than the one before, and few suffice
_NO_CHANGE = 1e-6


@dataclass(frozen=True, slots=True)
class FittedLosses:
    """What engines' steps lose to neighbours."""

    losses: Mapping[EngineKey, StepLosses] = field(default_factory=dict)
    unknown: Mapping[EngineKey, Sequence[str]] = field(default_factory=dict)
    """Names of those (fields of StepLosses) that too few steps tell of: they are 0."""


@dataclass(frozen=True, slots=True)
class _StepBeside:
    """A step of a cell with several engines."""

    fitted_ns: float  # alone
    measured_ns: float
    met: tuple[tuple[Crowding, float], ...]
    """What its turn met while others computed, and for which share of it."""


def fit_losses(
    cells: Sequence[RecordedCell], engines: Mapping[EngineKey, EngineCosts], *, num_cores: int
) -> FittedLosses:
    """Fit what each class of an engine's steps loses beside each class of other engines' steps, to cells with
    several engines; `engines` have what steps take alone. Steps of devices take no core, and lose nothing.
    Errors weigh by the step's length: it is the time that counts."""
    found: dict[tuple[EngineKey, str], list[_StepBeside]] = {}
    for cell in cells:
        keys = {engine_key(cell.config, engine) for engine in cell.cell.engines}
        if cell.is_alone or not num_cores or not keys <= engines.keys():
            continue
        for key, kind, step in _steps_beside(cell, engines, num_cores):
            if key.device == "cpu" and step.measured_ns < MAX_RATIO * step.fitted_ns:
                found.setdefault((key, kind), []).append(step)
    losses, unknown = {}, {}
    for key in engines:
        known: dict[str, float] = {}
        for kind in CLASSES:
            known |= _fit(found.get((key, kind), ()), kind)
        losses[key] = StepLosses(**known)
        unknown[key] = [name for name in StepLosses.__slots__ if name not in known]
    return FittedLosses(losses, unknown)


def _fit(steps: Sequence[_StepBeside], kind: str) -> dict[str, float]:
    """Fit what steps of one class lose beside each class, those that enough steps tell of, by their names.

    A step is done when its pace, over the time that it took, adds up to what it takes alone. That is not
    linear where it ran beside others for a part of it: rounds of linear fits, each from the one before.
    """
    states = sorted({state for step in steps for state, _ in step.met})
    if not states:
        return {}
    index = {state: number for number, state in enumerate(states)}
    shares = np.zeros((len(steps), len(states)))  # [N, M]: of each step's time, in each state
    for row, step in enumerate(steps):
        for state, share in step.met:
            shares[row, index[state]] = share
    fitted, measured = (np.array([getattr(s, name) for s in steps]) for name in ("fitted_ns", "measured_ns"))
    names, busy = [], []
    for other in CLASSES:
        of_other = np.array([getattr(state, other) for state in states])
        if shares[:, of_other > 0].sum() >= MIN_STEPS:
            names.append(f"{kind}_beside_{other}")
            busy.append(of_other)
    if not names:
        return {}
    beside, weights = np.stack(busy, axis=1), 1 / np.sqrt(fitted)
    found = np.zeros(len(names))
    for _ in range(_ROUNDS):
        losses = StepLosses(**dict(zip(names, found.tolist(), strict=True)))
        stretch = np.array([losses.stretch(state, is_decode=kind == "decode") for state in states])
        pace = 1 - shares @ (1 - 1 / stretch)
        slopes = (fitted / pace**2)[:, None] * (shares @ (beside / (stretch**2)[:, None]))
        wanted = measured - fitted / pace + slopes @ found
        before, found = found, np.minimum(nnls(slopes * weights[:, None], wanted * weights), MAX_RATIO)
        if np.abs(found - before).max() < _NO_CHANGE:
            break
    return dict(zip(names, found.tolist(), strict=True))


def _steps_beside(
    cell: RecordedCell, engines: Mapping[EngineKey, EngineCosts], num_cores: int
) -> Iterator[tuple[EngineKey, str, _StepBeside]]:
    """Yield a cell's settled steps: (engine, class, step)."""
    whole, own = _by_engine(cell.steps), _by_engine(settled(cell))
    for (repeat, name), steps in own.items():
        config = cell.engine_config(name)
        key = engine_key(cell.config, config)
        others = [
            _EngineTurns.of(of, cell.engine_config(other).num_ranks)
            for (of_repeat, other), of in whole.items()
            if of_repeat == repeat and other != name
        ]
        met = _met(_EngineTurns.of(steps, config.num_ranks), others, num_cores)
        for step, meets in zip(steps, met, strict=True):
            features = step.recorded.features
            if features.kind == "verify" and engines[key].verify is None:
                continue  # too few were measured
            fitted_ns = max(1.0, engines[key].step_ns(features, strict=False))
            yield key, CLASSES[features.is_decode], _StepBeside(fitted_ns, step.recorded.model_ns, meets)


def _by_engine(steps: Iterable[EngineStep]) -> dict[tuple[int, str], list[EngineStep]]:
    found: dict[tuple[int, str], list[EngineStep]] = {}
    for step in steps:
        found.setdefault((step.repeat, step.engine), []).append(step)
    return found


@dataclass(frozen=True, slots=True)
class _EngineTurns:
    """Turns of an engine [S]."""

    begins_ns: Floats
    ends_ns: Floats
    is_decode: NDArray[np.bool_]
    num_ranks: int

    @classmethod
    def of(cls, steps: Sequence[EngineStep], num_ranks: int) -> _EngineTurns:
        begins = np.array([step.begin_ns for step in steps], dtype=float)
        lengths = np.array([max(1, step.recorded.turn_ns) for step in steps], dtype=float)
        is_decode = np.array([step.recorded.features.is_decode for step in steps])
        return cls(begins, begins + lengths, is_decode, num_ranks)

    def busy(self, edges_ns: Floats, *, is_decode: bool) -> NDArray[np.int64]:
        """Count the ranks that a class of the turns keeps busy between each two edges, among which are the
        turns' begins and ends: [E] -> [E - 1]."""
        changes = np.zeros(len(edges_ns), dtype=np.int64)
        chosen = self.is_decode == is_decode
        np.add.at(changes, np.searchsorted(edges_ns, self.begins_ns[chosen]), self.num_ranks)
        np.subtract.at(changes, np.searchsorted(edges_ns, self.ends_ns[chosen]), self.num_ranks)
        return np.cumsum(changes)[:-1]


def _met(
    own: _EngineTurns, others: Sequence[_EngineTurns], num_cores: int
) -> list[tuple[tuple[Crowding, float], ...]]:
    """Tell what each turn meets while others compute, and for which share of its time each."""
    if not others:
        return [()] * len(own.begins_ns)
    edges = np.unique(np.concatenate([at for of in others for at in (of.begins_ns, of.ends_ns)]))
    prefill, decode = (
        np.sum([of.busy(edges, is_decode=kind) for of in others], axis=0) for kind in (False, True)
    )
    ranks, of_interval = np.unique(np.stack([prefill, decode]), axis=1, return_inverse=True)
    of_interval = of_interval.reshape(-1)
    met: list[list[tuple[Crowding, float]]] = [[] for _ in own.begins_ns]
    for number, (num_prefill, num_decode) in enumerate(ranks.T.tolist()):
        if not num_prefill + num_decode:
            continue
        state = crowding(num_cores, own.num_ranks, prefill=num_prefill, decode=num_decode)
        passed = np.concatenate([[0.0], np.cumsum(np.diff(edges) * (of_interval == number))])
        during = np.interp(own.ends_ns, edges, passed) - np.interp(own.begins_ns, edges, passed)
        shares = during / (own.ends_ns - own.begins_ns)
        for index in np.flatnonzero(shares > 0):
            met[index].append((state, float(shares[index])))
    return [tuple(of) for of in met]


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
