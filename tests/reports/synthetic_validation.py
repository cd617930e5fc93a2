"""A validation, made up: cells of three configurations, one of which is predicted badly."""

from __future__ import annotations

import numpy as np
import pandas as pd

from rayk.reports.achieved import ACHIEVEMENTS
from rayk.reports.validation import BOUNDS, COLUMNS, STAGE_COLUMNS, Validation

RUN = "runs/validation/cells"
BAD = "p1-d1-arrival.rate=6.1-sampling.max_tokens=40"


def synthetic_validation(*, unmeasured: bool = False) -> Validation:
    """Nine cells, off by some percent; BAD has TTFT predicted 40 % too short, for want of queueing."""
    draw = np.random.default_rng(0)
    errors, stages = [], []
    for engines in ("agg-tp1", "agg-tp2", "p1-d1"):
        for rate in (2.5, 4.4, 6.1):
            cell_id = f"{engines}-arrival.rate={rate}-sampling.max_tokens=40"
            for kind in ACHIEVEMENTS:
                measured = rate * (1 + 0.1 * len(errors) % 7) * (40 if "ttft" in kind.name else 4)
                error = float(draw.uniform(-0.05, 0.05))
                if cell_id == BAD and kind.name == "ttft_ms_p50":
                    error = -0.4
                bound = BOUNDS.get(kind.name)
                row = {
                    "run": RUN,
                    "cell_id": cell_id,
                    "metric": kind.name,
                    "unit": kind.unit,
                    "num_repeats": 3,
                    "measured": measured,
                    "predicted": measured * (1 + error),
                    "error": error,
                    "spread": 0.02,
                    "measured_spread": 0.02 * measured,
                    "bound": bound,
                    "is_missed": bound is not None and abs(error) > bound,
                    "was_fitted": False,
                    "slo": "ttft=300ms,tpot=20ms",
                }
                errors.append(row)
            waiting = 10.0 if cell_id == BAD else 30.0
            for stage, real, made in (
                ("prefill_queue", 30.0, waiting),
                ("prefill", 20.0, 20.5),
                ("decode", 240.0, 238.0),
            ):
                told = {"stage": stage, "measured_ms": real, "predicted_ms": made}
                stages.append({"run": RUN, "cell_id": cell_id, **told})
    return Validation(
        errors=pd.DataFrame(errors, columns=list(COLUMNS)),
        stages=pd.DataFrame(stages, columns=list(STAGE_COLUMNS)),
        facts={
            "predicted": {
                "costs": "runs/validation/costs",
                "unmeasured": unmeasured,
                "outside_hull": 0,
                "noise": False,
            },
            "runs": {RUN: "predicted/cells"},
            "left_out": [["agg-tp1-mamba", "not simulated: pipelines (pp over 1)"]],
            "provenance": {"cpu": "two cores", "date": "2026-11-28", "fitted cells": 40},
            "environment": {"devices": {"num_cores": 2}, "load": {"average_1_min": 0.2}},
        },
    )
