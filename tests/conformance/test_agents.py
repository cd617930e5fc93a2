"""Our own connectors, those that pull and those that push, pass every check; on NIXL, ranks are processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayk.conformance.catalog import all_checks, choose
from rayk.conformance.runner import PASS, Kit
from tests.conformance.settings import IMPATIENT, PATIENT
from tests.markers import thorough

COVERING = (
    "requests.one_request",
    "requests.many_at_once",
    "requests.blocks_reused",
    "layouts.BHLNC-BLHNC",
    "layouts.LBNHC-LHBNC",
    "tp.1-2",
    "tp.3-2-6-heads",
    "tp.4-1-2-heads",
    "dcp.3-2",
    "pp.3-2",
    "blocks.16-24",
    "groups.full+sliding-tp-1-2",
    "blocks.many",
    "groups.nvfp4-tp-2-1",
    "groups.mla",
    "groups.full+mamba2-tp-2-1",
    "faults.producer_dies",
    "faults.cancel_by_producer_in_the_middle",
    "faults.stale_answer",
)
ROOT = str(Path(__file__).resolve().parents[2])


def failures(target: str, checks, settings=PATIENT) -> list[str]:
    with Kit(target, path=[ROOT], settings=settings) as kit:
        results = list(kit.run_all(checks))
    assert results, "nothing was checked"
    return [f"{r.id}: {r.verdict} {r.reason}" for r in results if r.verdict != PASS]


@pytest.mark.parametrize(
    "name", ["LocalConnector", pytest.param("LocalPushConnector", marks=pytest.mark.thorough)]
)
def test_a_local_connector_moves_dealt_tokens_and_stages(name):
    assert failures(f"rayk.transfer:{name}", choose(all_checks(), ["dcp", "pp"])) == []


@thorough
@pytest.mark.parametrize("name", ["LocalConnector", "LocalPushConnector"])
def test_a_local_connector_passes_every_check(name):
    assert failures(f"rayk.transfer:{name}", all_checks(every_layout=True)) == []


@thorough
@pytest.mark.nixl
@pytest.mark.parametrize("name", ["NixlConnector", "NixlPushConnector"])
def test_a_nixl_connector_passes_a_covering_selection(name):
    assert failures(f"rayk.transfer:{name}", choose(all_checks(), COVERING)) == []


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.parametrize("name", ["NixlConnector", "NixlPushConnector"])
def test_a_nixl_connector_passes_every_check(name):
    assert failures(f"rayk.transfer:{name}", all_checks(every_layout=True)) == []


@thorough
def test_a_connector_that_pushes_passes_every_check():
    checks = [c for c in all_checks() if not c.id.startswith("layouts.")]
    assert failures("tests.conformance.copying:Copying", checks) == []


@thorough
def test_what_a_right_connector_takes_is_no_failure():
    """Only what cannot succeed is given little time: machines may be slow, and connectors."""
    checks = choose(all_checks(), ["faults"])
    assert failures("tests.conformance.copying:Slow", checks, IMPATIENT) == []
