"""Broken connectors fail, where they must and for the reason that there is; elsewhere they pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayk.conformance.catalog import all_checks, choose
from rayk.conformance.rig import Settings
from rayk.conformance.runner import FAIL, PASS, Kit
from tests.conformance.settings import BRIEF, HANGING, PATIENT
from tests.markers import one_per, thorough

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture(scope="module")
def kit():
    with Kit("tests.conformance.copying:Copying", path=[ROOT], settings=PATIENT) as kit:
        yield kit


def run(kit: Kit, name: str, check_id: str, settings: Settings = PATIENT):
    kit.use(f"tests.conformance.broken:{name}")
    kit.settings = settings
    (check,) = choose(all_checks(), [check_id])
    return kit.run(check)


@one_per()
@pytest.mark.parametrize(
    ("name", "passes", "fails", "reason"),
    [
        ("NextHead", "tp.2-1", "tp.1-2", r"layer 0, group 0, k, head 0, token 0: head 0 holds head 1 of the"),
        (
            "WholeBlocksOnly",
            "requests.whole_blocks",
            "requests.one_request",
            r"token 32: .*tokens 32 to 36 hold only 0x5a .*never written, or reported before the bytes",
        ),
        (
            "DoneEarly",
            None,
            "requests.one_request",
            r"consumer rank 0 reported request-0 as done: .*only 0x5a.*reported before the bytes were there",
        ),
        (
            "FreedEarly",
            None,
            "requests.one_request",
            r"hold only 0xe7 .*the engine wrote into the producer's blocks .*too early",
        ),
        ("SwappedKV", None, "requests.one_request", r"k, head 0, token 0: K and V swapped"),
        ("NullBlock", None, "requests.one_request", r"consumer rank 0: 4 bytes .*: the null block \(layer 0"),
        (
            "WritesLate",
            None,
            "requests.one_request",
            r"became 0x07: block \d+, after its request was reported",
        ),
        (
            "ChangesSource",
            None,
            "requests.one_request",
            r"wrote into blocks that it sends; .*layer 0, k, unit 0",
        ),
        (
            "Twice",
            None,
            "requests.one_request",
            r"producer rank 0 reported request-0 .*not in flight .*\(twice",
        ),
        ("Finishes", None, "requests.one_request", r"reported something else, which is not in flight"),
        (
            "Raises",
            None,
            "requests.one_request",
            r"poll\(\) raised KeyError: 'request-0' \(broken.py:\d+ in push",
        ),
        ("Keeps", None, "requests.one_request", r"rank 0 holds 1 requests although every request is over"),
        (
            "Threads",
            "requests.one_request",
            "leaks.opened_again",
            r"threads add up: (\d+), (\d+), (\d+), (\d+) ",
        ),
        ("SecondCache", "requests.one_request", "faults.second_registration", r"register\(\) did not raise"),
        ("NoTwins", "requests.one_request", "faults.same_request_twice", r"in flight did not raise"),
        ("LosesBehind64", "blocks.1-16", "blocks.many", r"token 64: tail not written: tokens 64 to 299 hold"),
        (
            "ByteIds",
            "blocks.1-16",
            "blocks.many",
            r"as done: .*k, head 0, token 0: .*they hold what was there",
        ),
        ("ScalesForgotten", "groups.full+sliding", "groups.fp8-token-head", r"k_scale, head 0, token 0: "),
        ("ScalesForgotten", "groups.full+sliding", "groups.nvfp4-tp-2-1", r"k_scale, head 0, token 0: "),
        *(
            (
                "CheckThenRead",
                "faults.cancel_by_producer",
                f"faults.cancel_by_producer_in_the_middle{tp}",
                r"as done: .*hold only 0xe7 .*the engine wrote into the producer's blocks .*too early",
            )
            for tp in ("", "-tp-2-1", "-tp-1-2")
        ),
        (
            "PushTellsFirst",
            None,
            "requests.one_request",
            r"consumer rank 0 reported request-0 as done: .*only 0x5a.*reported before the bytes were there",
        ),
        (
            "PushForgetsLayers",
            "requests.one_request",
            "groups.full+sliding",
            r"as done: .*layer 1, group 1, .*only 0x5a .*never written",
        ),
        (
            "NextTurn",
            "tp.1-2",
            "dcp.1-2",
            r"consumer rank \d reported .* as done: .*layer 0, group 0, k, head 0, ",
        ),
        ("LastStageAlone", "pp.1-2", "pp.2-1", r"as done: .*layer 0, group 0, .*only 0x5a .*never written"),
        ("DoneAnyhow", "requests.one_request", "faults.never_followed", r"as done: .*only 0x5a"),
    ],
)
def test_a_broken_connector_fails_for_its_own_reason(kit, name, passes, fails, reason):
    if passes is not None:
        assert (found := run(kit, name, passes)).verdict == PASS, found.reason
    found = run(kit, name, fails)
    assert found.verdict == FAIL
    assert re.search(reason, found.reason), found.reason


@thorough
@pytest.mark.parametrize(
    ("name", "passes", "fails", "reason"),
    [
        (
            "UnreadRanksForgotten",
            "tp.2-1",
            "tp.4-1-2-heads",
            r"producer rank 1 never reported request-0 \(and 1 mo",
        ),
        (
            "NoDeadline",
            "requests.one_request",
            "faults.never_followed",
            r"consumer rank 0 never reported request-0",
        ),
    ],
)
def test_what_never_comes_is_missed(kit, name, passes, fails, reason):
    assert (found := run(kit, name, passes)).verdict == PASS, found.reason
    found = run(kit, name, fails, BRIEF)
    assert found.verdict == FAIL
    assert re.search(reason, found.reason), found.reason


@thorough
def test_a_connector_that_hangs_is_killed_and_the_next_check_runs(kit):
    found = run(kit, "Hangs", "requests.one_request", HANGING)
    assert found.verdict == FAIL
    assert found.reason == "poll() did not return in time; its process was killed"
    found = run(kit, "Dies", "requests.one_request")
    assert found.reason == "the process died in poll() (exit code 3); it printed: a last word"
    assert run(kit, "NextHead", "requests.one_request").verdict == PASS
