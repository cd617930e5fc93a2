"""vLLM's interface of connectors, driven without vLLM."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from rayk.conformance.catalog import all_checks, choose, store_checks
from rayk.conformance.runner import FAIL, PASS, UNSUPPORTED, Kit
from tests.conformance.settings import PATIENT
from tests.conformance.vllm_shaped import FOLDER
from tests.markers import thorough

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture(autouse=True)
def files():
    yield
    shutil.rmtree(FOLDER, ignore_errors=True)


@thorough
def test_a_connector_of_vllms_shape_passes_what_the_interface_can_say():
    checks = [c for c in all_checks() if not c.id.startswith(("layouts.L", "groups.m", "tp.4"))]
    with Kit("tests.conformance.vllm_shaped:OnFiles", path=[ROOT], settings=PATIENT) as kit:
        results = {c.id: kit.run(c) for c in checks}
        kit.use("tests.conformance.vllm_shaped:HeadsReversed")
        (check,) = choose(checks, ["requests.whole_blocks"])
        broken = kit.run(check)
    assert broken.verdict == FAIL
    assert re.search(r"k, head 0, token 0: head 0 holds head 3 of the producer", broken.reason), broken.reason
    assert {r.verdict for r in results.values()} <= {PASS, UNSUPPORTED}, results
    for passed in ("requests.whole_blocks", "requests.many_at_once", "requests.blocks_reused"):
        assert results[passed].verdict == PASS, results[passed]
    assert results["requests.one_token"].reason == "it moves whole blocks only"
    assert "TP group" in results["tp.1-2"].reason
    assert "DCP group" in results["dcp.1-2"].reason
    assert "PP group" in results["pp.1-2"].reason
    assert not any(name.partition(".")[0] == "vllm" for name in sys.modules)


def test_a_connector_is_tried_as_a_store():
    """It knows prompts by their tokens: what they say beside these is lost, and nothing else."""
    with Kit("tests.conformance.vllm_shaped:StoreOnFiles", path=[ROOT], settings=PATIENT) as kit:
        results = {r.id: r for r in kit.run_all(store_checks()) if not r.id.startswith("lives")}
    failed = {name for name, result in results.items() if result.verdict == FAIL}
    assert {name for name in results if name.startswith("hits")} & failed == set()
    rest = {"identity.tokens", "identity.joined.adapter-tokens", "identity.joined.salt-tokens"}
    assert failed == {name for name in results if name.startswith("identity")} - rest
    assert "is what was saved for 16 tokens [100, 101, 102]" in results["identity.salt"].reason


def test_a_connector_that_finds_beginnings_is_asked_for_them():
    with Kit("tests.conformance.vllm_shaped:BlocksOnFiles", path=[ROOT], settings=PATIENT) as kit:
        checks = choose(store_checks(), ["hits.tokens", "identity.tokens", "identity.prefixes.salt"])
        results = {r.id: r for r in kit.run_all(checks)}
    assert results["hits.tokens"].verdict == results["identity.tokens"].verdict == PASS, results
    assert "salt 'ab', block 0 of the answer is what was" in results["identity.prefixes.salt"].reason
