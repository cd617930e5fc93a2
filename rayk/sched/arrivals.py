"""Draw when requests of an open load are due, as offsets from its start."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NS_PER_S = 1e9

# (random numbers, number of gaps, burstiness) -> gaps with a mean of 1
Gaps = Callable[[np.random.Generator, int, float], np.ndarray]


PROCESSES: dict[str, Gaps] = {
    "poisson": lambda draw, num_gaps, _: draw.exponential(1.0, num_gaps),
    "constant": lambda _draw, num_gaps, _: np.ones(num_gaps),
    "gamma": lambda draw, num_gaps, burstiness: draw.gamma(burstiness, 1.0 / burstiness, num_gaps),
}
"""Arrival process -> its gaps. Gamma has shape `burstiness`, as vLLM's `--burstiness` means it: 1 is Poisson,
less comes in bursts, more is steadier; the deviation is 1 / sqrt(burstiness) of the mean."""


def due_times(
    process: str, *, rate: float, num_requests: int, burstiness: float = 1.0, seed: int = 0, stream: int = 1
) -> list[int]:
    """Nanoseconds after the start at which each request is due, ascending; the first after one gap.

    rate: requests per second on average; another rate stretches the same gaps. process: a key of PROCESSES.
    stream: equal seeds give independent times in different ones.
    """
    assert rate > 0, rate
    assert burstiness > 0, burstiness
    draw = np.random.default_rng([seed, stream])
    gaps = PROCESSES[process](draw, num_requests, burstiness)
    return [round(at) for at in (np.cumsum(gaps) / rate * NS_PER_S).tolist()]
