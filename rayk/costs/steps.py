"""Fit what an engine's steps take to those that it recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayk.costs.features import StepFeatures, StepKind
from rayk.costs.fit import Fitted, Floats, fit
from rayk.costs.hull import AXES, Hull, place_of, shape_of
from rayk.costs.table import StepTable, term_value

BENDS = (4, 16, 64, 256, 1024)
"""Numbers of tokens at which the cost of one more may change, down or up."""
HOST_TERMS = ("one", "requests", "prefills")
DRAFTING_TERMS = (*HOST_TERMS, "drafts")
_ATTENDED = ("pairs", "seen")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    features: StepFeatures
    turn_ns: int
    model_ns: int


def step_terms(steps: Sequence[StepFeatures], kind: StepKind) -> tuple[str, ...]:
    """Choose the terms that a class of steps can have: a bend only where there are steps on both sides."""
    sizes = [f.num_tokens for f in steps]
    bends = [n for n in BENDS if min(sizes) < n < max(sizes)]
    windows = range(len(steps[0].windowed))
    attended = [*_ATTENDED, *(f"{name}@{i}" for i in windows for name in _ATTENDED)]
    bent = [f"tokens{sign}{n}" for n in bends for sign in "<>"]
    match kind:
        case "decode":
            # A token each: pairs are what is seen.
            attended = [term for term in attended if not term.startswith("pairs")]
            return ("one", "requests", *bent, *attended)
        case "verify":
            # All tokens have logits.
            return ("one", "requests", "tokens", *bent, *attended)
        case "prefill":
            return ("one", "requests", "prefills", "logits", "tokens", *bent, *attended)


def fit_steps(steps: Sequence[RecordedStep], kind: StepKind) -> tuple[StepTable, Fitted]:
    """Fit a table to a class of steps; needs one. Terms that nothing was put down to are left out of the
    table."""
    features = [step.features for step in steps]
    assert all(f.kind == kind for f in features)
    terms = step_terms(features, kind)
    found = fit(_matrix(terms, features), _times(s.model_ns for s in steps), _sizes(features))
    table = StepTable(
        **_used(terms, found), hull=hull_around(features), residuals=found.residuals(), ratios=found.ratios
    )
    return table, found


def _used(terms: Sequence[str], found: Fitted) -> dict[str, Any]:
    """Return `terms` and `constants` of a table, those aside that are 0."""
    used = [(t, c) for t, c in zip(terms, found.constants, strict=True) if c > 0]
    return {"terms": tuple(term for term, _ in used), "constants": tuple(constant for _, constant in used)}


def fit_host(steps: Sequence[RecordedStep]) -> Fitted:
    """Fit what turns take beside the forward pass: a constant, so much per request, and for each whose prompt
    is computed."""
    return _fit_rest(steps, HOST_TERMS)


def fit_drafting(steps: Sequence[RecordedStep], *, on_ranks: bool) -> StepTable:
    """Fit what turns of an engine that drafts take beside the forward pass, the drafter included: one on
    ranks computes a row for each token."""
    terms = (*DRAFTING_TERMS, "tokens") if on_ranks else DRAFTING_TERMS
    found = _fit_rest(steps, terms)
    return StepTable(**_used(terms, found), residuals=found.residuals())


def _fit_rest(steps: Sequence[RecordedStep], terms: Sequence[str]) -> Fitted:
    features = [step.features for step in steps]
    rest = _times(max(1, s.turn_ns - s.model_ns) for s in steps)
    return fit(_matrix(terms, features), rest, _sizes(features))


def hull_around(features: Sequence[StepFeatures]) -> Hull:
    """Return the hull of measured steps. Below the smallest the reach of a place is what counts: without
    negative constants a fit cannot be wrong by more than its constant there."""
    distinct = set(features)
    return Hull(
        bounds={axis: (0, max(getattr(f, axis) for f in distinct)) for axis in AXES},
        places=tuple(sorted({place_of(shape_of(f)) for f in distinct})),
    )


def _matrix(terms: Sequence[str], features: Sequence[StepFeatures]) -> Floats:
    """Evaluate terms of steps: [N, K]."""
    return np.array([[term_value(term, f) for term in terms] for f in features], dtype=float)


def _sizes(features: Sequence[StepFeatures]) -> dict[str, Floats]:
    return {axis: np.array([getattr(f, axis) for f in features], dtype=float) for axis in AXES}


def _times(values: Iterator[int]) -> Floats:
    return np.array(list(values), dtype=float)
