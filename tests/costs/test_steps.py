"""Tables fitted to recorded steps give what was planted in these, for steps that were not among them too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayk.costs import StepFeatures, step_features
from rayk.costs.steps import RecordedStep, fit_drafting, fit_host, fit_steps, step_terms
from tests.costs.test_tables import batch

WINDOWS = (64,)


def decode_ns(f: StepFeatures) -> float:
    """Flat to 4 requests, then by the request; every token seen costs, twice within the window."""
    return 2e6 + 90_000 * max(0, f.num_requests - 4) + 30 * f.num_seen + 60 * f.windowed[0][1]


def prefill_ns(f: StepFeatures) -> float:
    """The first 16 tokens cost more than the rest."""
    return 5e5 + 50_000 * min(f.num_tokens, 16) + 20_000 * max(0, f.num_tokens - 16) + 4 * f.num_pairs


def decode(requests: int, context: int) -> StepFeatures:
    return step_features(batch(*[(1, context)] * requests), WINDOWS)


def recorded(features: StepFeatures, ns: float, noise: float) -> RecordedStep:
    host = 100_000 + 7_000 * features.num_requests + 300_000 * features.num_prefills
    return RecordedStep(features=features, turn_ns=int(ns * noise) + host, model_ns=int(ns * noise))


def decodes() -> list[RecordedStep]:
    rng = np.random.default_rng(0)
    grid = [(r, c + i) for r in (1, 4, 16) for c in (16, 64, 256, 1024) for i in range(24)]
    return [recorded(f, decode_ns(f), rng.normal(1, 0.02)) for f in (decode(r, c) for r, c in grid)]


def prefills() -> list[RecordedStep]:
    rng = np.random.default_rng(1)
    chunks = [(n, b) for n in (2, 4, 16, 64, 256) for b in (0, 16, 64, 256) for _ in range(12)]
    found = [step_features(batch((n, b), *[(1, 64)] * (n % 3)), WINDOWS) for n, b in chunks]
    return [recorded(f, prefill_ns(f), rng.normal(1, 0.02)) for f in found]


def test_a_decode_table_tells_steps_between_the_measured_ones():
    table, found = fit_steps(decodes(), "decode")
    assert table.residuals.p90 < 0.02
    assert (
        table.residuals.num_steps
        == 3 * 4 * 24
        == sum(p.num_samples for p in found.places) + found.num_trimmed
    )
    for requests, context in ((1, 30), (2, 500), (10, 100), (13, 900)):
        features = decode(requests, context)
        assert table.hull.why_outside(features) is None
        assert table.ns(features) == pytest.approx(decode_ns(features), rel=0.03)
    assert table.hull.why_outside(decode(17, 64)) is not None
    assert not any(term.startswith("pairs") for term in table.terms)


def test_a_prefill_table_bends_where_the_cost_of_a_token_changes():
    table, _ = fit_steps(prefills(), "prefill")
    assert "tokens<16" in table.terms
    for n, b in ((8, 0), (100, 128), (200, 16)):
        features = step_features(batch((n, b)), WINDOWS)
        assert table.ns(features) == pytest.approx(prefill_ns(features), rel=0.05)


def verify_ns(f: StepFeatures) -> float:
    """Rows of drafts cost as tokens of prompts do, and more where many are computed."""
    return 1e6 + 40_000 * f.num_tokens + 10_000 * max(0, f.num_tokens - 16) + 25 * f.num_pairs


def verifies() -> list[RecordedStep]:
    """Steps of an engine whose turns take 50 us, 11 us a request and 3 us a drafted token."""
    rng = np.random.default_rng(2)
    grid = [(r, c + 3 * i, d) for r in (1, 4, 12) for c in (16, 64, 256) for d in (1, 3) for i in range(12)]
    found = []
    for requests, context, drafts in grid:
        f = step_features(batch(*[(1 + drafts, context)] * requests, (1, 50), drafts=drafts), WINDOWS)
        model = int(verify_ns(f) * rng.normal(1, 0.02))
        host = 50_000 + 11_000 * f.num_requests + 3_000 * f.num_drafts
        found.append(RecordedStep(features=f, turn_ns=model + host, model_ns=model))
    return found


def test_a_table_of_steps_with_drafts():
    table, found = fit_steps(verifies(), "verify")
    assert table.residuals.p90 < 0.02
    assert found.num_samples == 216
    for requests, context, drafts in ((2, 30, 1), (3, 100, 3), (8, 200, 2)):
        features = step_features(batch(*[(1 + drafts, context)] * requests, drafts=drafts), WINDOWS)
        assert table.hull.why_outside(features) is None
        assert table.ns(features) == pytest.approx(verify_ns(features), rel=0.03)
    many = step_features(batch((60, 64), drafts=59), WINDOWS)
    assert table.hull.why_outside(many) == "num_tokens 60 is outside of 0 to 49"
    turns = fit_drafting(verifies(), on_ranks=False)
    assert dict(zip(turns.terms, turns.constants, strict=True)) == pytest.approx(
        {"one": 50_000, "requests": 11_000, "drafts": 3_000}, rel=1e-3
    )


def test_a_drafter_on_ranks_takes_time_for_each_token():
    """A turn takes 5 ms, 0.2 a request, and 30 us a token of the step; steps of prompts are among them."""
    found = []
    for step in (*verifies(), *prefills(), *decodes()):
        f = step.features
        rest = 5_000_000 + 200_000 * f.num_requests + 30_000 * f.num_tokens
        found.append(replace(step, turn_ns=step.model_ns + rest))
    turns = fit_drafting(found, on_ranks=True)
    assert dict(zip(turns.terms, turns.constants, strict=True)) == pytest.approx(
        {"one": 5_000_000, "requests": 200_000, "tokens": 30_000}, rel=1e-3
    )


def test_what_the_host_takes_is_fitted_apart():
    found = fit_host([*decodes(), *prefills()])
    assert found.constants == pytest.approx((100_000, 7_000, 300_000), rel=1e-3)


def test_there_is_no_bend_where_there_are_no_steps():
    steps = [s.features for s in decodes()]
    assert [t for t in step_terms(steps, "decode") if "tokens" in t] == ["tokens<4", "tokens>4"]
    assert "pairs@0" in step_terms(steps, "prefill")
