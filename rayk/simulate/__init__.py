"""Runs cells under a virtual clock: what serves is the code of real engines, over ranks that compute nothing.

`run` simulates a cell, `arrivals` says which requests come when, `outcome` what they came to, `deaths`
which engines die.
"""

from rayk.simulate.arrivals import Arrival, ArrivalSource, cell_arrivals
from rayk.simulate.deaths import EngineDeath
from rayk.simulate.outcome import SimOutcome, cell_row, prediction_facts
from rayk.simulate.run import simulate_cell

__all__ = [
    "Arrival",
    "ArrivalSource",
    "EngineDeath",
    "SimOutcome",
    "cell_arrivals",
    "cell_row",
    "prediction_facts",
    "simulate_cell",
]
