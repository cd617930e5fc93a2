"""What an engine's work takes: tables that a simulation and paced engines go by. Free of torch.

`features` says what a step is made of, `table` what it takes (an engine's `EngineCosts`), `book` keeps the
tables of a machine, `hull` says where a table holds, `losses` what steps lose beside others, `stored` writes
tables down as JSON. `fit` and `steps` make tables of recorded steps, `sheets` has what data sheets say of
devices.
"""

from rayk.costs.book import CostBook
from rayk.costs.features import DecodeRun, StepFeatures, decode_run, step_features, step_of, windows_of
from rayk.costs.table import EngineCosts, EngineKey, engine_key

__all__ = [
    "CostBook",
    "DecodeRun",
    "EngineCosts",
    "EngineKey",
    "StepFeatures",
    "decode_run",
    "engine_key",
    "step_features",
    "step_of",
    "windows_of",
]
