"""When requests of an open load are due: offsets from the load's start, drawn before it begins."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NS_PER_S = 1e9

Gaps = Callable[[np.random.Generator, int, float], np.ndarray]
"""(random numbers, number of gaps, burstiness) -> gaps with a mean of 1."""


def _constant(draw: np.random.Generator, num_gaps: int, burstiness: float) -> np.ndarray:
    del draw, burstiness
    return np.ones(num_gaps)


def _poisson(draw: np.random.Generator, num_gaps: int, burstiness: float) -> np.ndarray:
    del burstiness
    return draw.exponential(1.0, num_gaps)


def _gamma(draw: np.random.Generator, num_gaps: int, burstiness: float) -> np.ndarray:
    return draw.gamma(burstiness, 1.0 / burstiness, num_gaps)


PROCESSES: dict[str, Gaps] = {"poisson": _poisson, "gamma": _gamma, "constant": _constant}
"""Arrival process -> its gaps. Those of gamma have a shape of `burstiness`, so that their deviation is
1 / sqrt(burstiness) of their mean: 1 is Poisson's, less comes in bursts, more is steadier (the meaning that
vLLM's `--burstiness` gave the word)."""


def due_times(process: str, *, rate: float, num_requests: int, burstiness: float, seed: int) -> list[int]:
    """Nanoseconds after the start at which each request is due, ascending; the first after one gap.

    rate: requests per second on average. process: a key of PROCESSES.
    """
    assert rate > 0, "checked where it is read"
    draw = np.random.default_rng([seed, 1])
    gaps = PROCESSES[process](draw, num_requests, burstiness)
    return [round(at) for at in (np.cumsum(gaps) / rate * NS_PER_S).tolist()]
