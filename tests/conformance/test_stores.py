"""Stores of KV under the kit: a right one passes, wrong ones fail where they are wrong and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.conformance.catalog import choose, store_checks
from rayk.conformance.runner import FAIL, PASS, UNSUPPORTED, Kit
from rayk.conformance.store import FIELDS
from rayk.conformance.store_scenarios import STORE_SCENARIOS
from tests.conformance.settings import PATIENT
from tests.markers import one_per, sweep, thorough
from tests.pages import blocks

ROOT = str(Path(__file__).resolve().parents[2])
STORES = "tests.conformance.stores"
LIVES_BY_TOKENS = ("lives.eviction", "lives.threads", "lives.restart.tokens")


@pytest.fixture(scope="module")
def kit():
    with Kit(f"{STORES}:Right", path=[ROOT], settings=PATIENT) as kit:
        yield kit


@pytest.mark.parametrize("name", ["PrefixCache", "Disk"])
def test_our_own_caches_never_answer_for_another_key(kit, name):
    kit.use(f"tests.conformance.rayk_stores:{name}")
    results = list(kit.run_all(store_checks()))
    assert [(r.id, r.reason) for r in results if r.verdict == FAIL] == []
    passed = {r.id for r in results if r.verdict == PASS}
    assert {*of_a_field("salt")[:2], "hits.salt", "identity.joined.salt-tokens"} <= passed
    if name == "Disk":
        assert {*of_a_field("revision"), "lives.restart.salt", "identity.joined.salt-revision"} <= passed
    else:
        assert "lives.eviction" in passed


def of_a_field(field: str) -> tuple[str, str, str]:
    return f"identity.{field}", f"identity.prefixes.{field}", f"lives.restart.{field}"


def test_a_right_store_passes_every_check(kit):
    kit.use(f"{STORES}:Right")
    results = list(kit.run_all(store_checks()))
    assert [(r.id, r.reason) for r in results if r.verdict != PASS] == []


@sweep(3)
@one_per()
@pytest.mark.parametrize(
    ("name", "fails", "reason"),
    [
        ("NoSalt", of_a_field("salt"), "salt 'a', block 0 of the answer is what was saved for 16 tokens"),
        (
            "NoAdapter",
            (*of_a_field("adapter"), *of_a_field("adapter_path"), *of_a_field("adapter_revision")),
            "adapter 'a' of 'adapters/a' revision '1', block 0 of the answer is what was saved",
        ),
        (
            "AdapterByName",
            (*of_a_field("adapter_path"), *of_a_field("adapter_revision")),
            "'same-name' of 'adapters/two' revision '1', block 0 of the answer is what was saved",
        ),
        ("AdapterByPath", of_a_field("adapter_revision"), "revision '2', block 0 of the answer is what"),
        ("NoRevision", of_a_field("revision"), "revision 'a', block 0 of the answer is what was saved"),
        (
            "NoImages",
            (
                *of_a_field("multimodal"),
                *("identity.hashes_alike", "identity.places", "identity.later_items"),
            ),
            "at token 2, block 0 of the answer is what was saved for 16 tokens [100, 101, 9]..",
        ),
        ("ShortHashes", ("identity.hashes_alike",), "block 0 of the answer is what was saved for 16 tokens"),
        ("NoPlaces", ("identity.places",), "at token 3, block 0 of the answer is what was saved for"),
        ("FirstBlockImages", ("identity.later_items",), "at token 17, block 1 of the answer is what was"),
        ("FirstBlockSalt", ("identity.salt", "identity.prefixes.salt"), "salt 'a', block 1 of the answer"),
        (
            "NoTokens",
            ("identity.tokens", *LIVES_BY_TOKENS),
            "asked for 48 tokens [5100, 101, 102].., block 0",
        ),
        ("OneNamespace", ("identity.mixed.salt-revision",), "revision 'shared-name', block 0"),
        ("Joined", ("identity.joined.salt-revision",), "salt 'a', revision 'b-c', block 0"),
        (
            "SaltBeforeTokens",
            ("identity.joined.salt-tokens",),
            "block 0 of the answer is what was saved for 32",
        ),
        (
            "StaleAfterEviction",
            ("lives.eviction",),
            "[1000, 1001, 1002].., block 0 of the answer is what was",
        ),
        ("NotThreadSafe", ("lives.threads",), "0 blocks were found of 2 that were saved"),
        ("RestartsEmpty", ("lives.restart",), "0 blocks were found of 2 that were saved"),
        ("FoundWithoutSalt", ("lives.restart.salt",), "block 0 of the answer is what was saved for"),
        (
            "NeverHits",
            ("hits", "identity.tokens", "identity.prefixes", "lives"),
            "0 blocks were found of 2 that were saved",
        ),
    ],
)
def test_a_wrong_store_fails_where_it_is_wrong(kit, name, fails, reason):
    kit.use(f"{STORES}:{name}")
    results = {r.id: r for r in kit.run_all(store_checks())}
    expected = {check.id for check in choose(store_checks(), fails)}
    found = {r.id for r in results.values() if r.verdict == FAIL}
    unmet = {r.id for r in results.values() if r.verdict == UNSUPPORTED}
    assert found == expected - unmet, {name: results[name].reason for name in found ^ (expected - unmet)}
    first = min(found, key=list(results).index)
    assert reason in results[first].reason, results[first].reason


@thorough
def test_the_pages_store_passes_what_it_supports(tmp_path):
    _, code = blocks((Path(ROOT) / "docs/connector-kit.md").read_text(encoding="utf-8"), "python")
    (tmp_path / "by_salt.py").write_text(code, encoding="utf-8")
    with Kit("by_salt:BySaltAndTokens", path=[str(tmp_path)], settings=PATIENT) as kit:
        verdicts = {r.id: r.verdict for r in kit.run_all(store_checks())}
    assert {name for name, verdict in verdicts.items() if verdict != UNSUPPORTED} == {
        *("hits.tokens", "hits.salt", "identity.tokens", "identity.salt", "identity.prefixes.salt"),
        "identity.joined.salt-tokens",
    }
    assert FAIL not in verdicts.values()


@thorough
def test_the_command_tries_a_store(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)

    def run(*arguments: str):
        return CliRunner().invoke(app, ["conformance", f"{STORES}:NoSalt", *arguments])

    done = run("--only", "identity.salt", "--only", "hits.salt", "--out", str(tmp_path / "out"))
    assert done.exit_code == 1, done.output
    assert "is what was saved for 16 tokens" in " ".join(done.output.split())
    checks = pd.read_parquet(tmp_path / "out" / "checks.parquet").set_index("id")
    assert dict(checks["verdict"]) == {"hits.salt": "PASS", "identity.salt": "FAIL"}
    assert "NoSalt: 1 of 2 PASS, 1 FAIL" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    done = run("--only", "tp", "--out", str(tmp_path / "second"))
    assert done.exit_code == 2, done.output
    assert "is a store, for which none of these checks is" in done.stderr


def test_checks_of_stores_cover_what_they_claim():
    checks = store_checks()
    assert len({c.id for c in checks}) == len(checks)
    assert {c.scenario for c in checks} == set(STORE_SCENARIOS)
    for field in FIELDS:
        assert {"hits", "apart", "prefixes", "restart"} <= {
            c.scenario for c in checks if field in c.case.fields
        }


@thorough
def test_a_store_that_dies_is_a_failure_and_the_next_check_runs(kit):
    kit.use(f"{STORES}:DiesInTheEnd")
    checks = choose(store_checks(), ["hits.tokens", "hits.salt"])
    assert [(r.verdict, r.reason.partition(" (")[0]) for r in kit.run_all(checks)] == [
        (FAIL, "RuntimeError: no")
    ] * 2
    kit.use(f"{STORES}:Right")
    assert {r.verdict for r in kit.run_all(checks)} == {PASS}
