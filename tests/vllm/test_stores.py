"""vLLM's own caches under the kit's checks of identity: what fails is known, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayk.conformance.catalog import choose, store_checks
from rayk.conformance.runner import FAIL, UNSUPPORTED, Kit
from tests.conformance.settings import PATIENT
from tests.markers import needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

IN_PLACE = ("identity.adapter_revision", "identity.prefixes.adapter_revision")
"""Weights that are loaded again in place keep an adapter's name and path, which are the key (#42125)."""


@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("PrefixCache", IN_PLACE),
        ("HostOffload", IN_PLACE),
        # Folders are named by the model's name, whatever its revision (#49261).
        ("FileOffload", (*IN_PLACE, "identity.revision", "identity.prefixes.revision")),
    ],
)
def test_what_vllm_keys_its_caches_by(vllm_python: Path, name: str, fails: tuple[str, ...]) -> None:
    checks = choose(store_checks(), ["hits", "identity", "lives.eviction"])
    with Kit(f"rayk.vllm.stores:{name}", settings=PATIENT, python=str(vllm_python)) as kit:
        results = [kit.run(check) for check in checks]
    assert {r.id for r in results if r.verdict == FAIL} == {*fails}, results
    unmet = {r.reason for r in results if r.verdict == UNSUPPORTED}
    assert unmet <= {
        "an engine has one revision of its model, and its cache ends with it",
        "it gives nothing up",
    }


def test_a_connector_of_vllms_that_knows_tokens_alone_is_found_out(vllm_python: Path) -> None:
    """#53495."""
    names = (
        "hits",
        "identity.tokens",
        "identity.salt",
        "identity.adapter",
        "identity.multimodal",
        "identity.places",
    )
    with Kit("rayk.vllm.stores:ExampleConnector", settings=PATIENT, python=str(vllm_python)) as kit:
        results = {r.id: r for r in kit.run_all(choose(store_checks(), names))}
    failed = {name for name, result in results.items() if result.verdict == FAIL}
    assert failed == {"identity.salt", "identity.adapter", "identity.places"}, results
    assert (
        "salt 'a', block 0 of the answer is what was saved for 32 tokens" in results["identity.salt"].reason
    )
