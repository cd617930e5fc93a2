"""The proving connector's halves on stand-ins of vLLM's workers: a request from P's end to D's verdict, and
what each setting changes. Stores and layers are those of tests.vllm.standins."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.types.errors import TransferError, UserError
from rayk.vllm import halves, proof_verifier
from rayk.vllm.halves import Expected, Notes, Produced
from rayk.vllm.metrics_port import serve_metrics
from rayk.vllm.proof import ProofRecords
from rayk.vllm.settings import KEYS, ProvingSettings, read_settings, without_ours
from rayk.vllm.transfer_log import TransferLog
from tests.each import each
from tests.pd import HANG_S
from tests.vllm.pairs import (
    MODEL,
    SECRET,
    TOKENS,
    Pair,
    pair,
)


@each("p_tp, d_tp", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_request_that_arrived_whole_is_equal_and_counted(p_tp: int, d_tp: int) -> None:
    with pair(p_tp, d_tp) as made:
        for result in made.run():
            assert (result["status"], result["why"], result["mismatch"]) == ("equal", "", None)
            assert result["words"]["equal"] > 0
            assert result["bytes_checked"] > 0
        for half in made.consumer.halves:
            taken = half.counts.take()
            assert taken is not None
            assert dict(taken["proofs"]) == {"equal": 1}
            assert (len(taken["digest_s"]), len(taken["fetch_s"])) == (1, 1)
        for half in made.producer.halves:
            taken = half.counts.take()
            assert taken is not None
            assert dict(taken["proofs"]) == {"made": 1}
        rows = made.producer.halves[0].kept_rows("p-r")
        assert {layer for layer, _, _ in rows} == {0, 1, 2, 3}
        assert made.producer.halves[0].kept_rows("p-r") == {}


def test_a_mismatch_fails_the_request_where_that_is_asked_for() -> None:
    with pair(on_mismatch="fail") as made:
        half = made.consumer.halves[0]
        for name, seed, moved in (("right", 0, 0), ("wrong", 1, 2)):
            ids = made.expect(made.prefill(name, seed), name, seed)
            made.move(ids, moved)
            told = half.received({f"d-{name}"}, set())
            until = time.monotonic() + HANG_S
            while not told.arrived:  # Held until it is verified.
                assert time.monotonic() < until
                time.sleep(0.001)
                told = half.received(set(), set())
            assert told.arrived == {f"d-{name}"}
            assert told.failed == ({"d-wrong"} if name == "wrong" else set())
        assert half.received(set(), set()).arrived == set()


@each("on_mismatch", ["report", "fail"])
def test_what_is_loaded_at_once_is_verified_before_the_model_runs(on_mismatch: str) -> None:
    with pair(on_mismatch=on_mismatch) as made:
        half = made.consumer.halves[0]
        ids = made.expect(made.prefill("a", 0), "a", 0, is_async=False)
        made.move(ids, 0)
        assert half.loaded() == set()
        assert made.results("a")[0]["status"] == "equal"
        ids = made.expect(made.prefill("b", 1), "b", 1, is_async=False)
        made.move(ids, 0)
        assert half.loaded() == set(), "vLLM cannot fail it: there are several groups"
        assert made.results("b")[0]["status"] == "mismatch"
        assert half.loaded() == set()


def test_a_silent_producer_delays_a_step_by_one_timeout_whatever_the_number_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair(1, on_mismatch="fail", timeout_s=HANG_S) as made:
        half = made.consumer.halves[0]
        now, events = [time.monotonic()], []
        until = now[0] + HANG_S
        monkeypatch.setattr(half, "_clock", lambda: now[0])
        digests, fetch = half._caches.digests, proof_verifier.fetch_digests

        def digest(*what: Any) -> Any:
            events.append("digest")
            return digests(*what)

        def ask(peer: Any, nonce: str, secret: bytes, deadline: float, *description: Any) -> Any:
            events.append(deadline)
            if len(events) == 6:  # After three digests, an ask, and rows: P has fallen silent.
                now[0] = deadline
                raise TransferError("", "proof: no answer in time")
            return fetch(peer, nonce, secret, time.monotonic() + HANG_S, *description)

        def ask_rows(*what: Any) -> Any:
            events.append(what[-1])
            raise TransferError("", "proof: no answer in time")

        monkeypatch.setattr(half._caches, "digests", digest)
        monkeypatch.setattr(proof_verifier, "fetch_digests", ask)
        monkeypatch.setattr(proof_verifier, "fetch_rows", ask_rows)
        names = {"right": 0, "wrong": 1, "silent": 2, "late": 3}
        for name, seed in names.items():
            ids = made.expect(made.prefill(name, seed), name, seed, is_async=False)
            made.move(ids, 0)
            if name == "right":
                assert half.loaded() == set()
                assert events == ["digest", until]
                events.clear()
        half.loaded()
        assert events == ["digest"] * 3 + [until] * 3, "rows of the wrong one, too, by the step's deadline"
        found = {name: made.results(name)[0] for name in names}
        assert [result["status"] for result in found.values()] == [
            "equal",
            "mismatch",
            "unverified",
            "unverified",
        ]
        assert found["late"]["why"] == "the step has waited timeout_s for the proofs of others"


def test_only_blocks_that_were_loaded_fail() -> None:
    with pair(1, p={"groups": [0]}, groups=[0], on_mismatch="fail") as made:
        scheduler, half = made.consumer.scheduler, made.consumer.halves[0]
        params = made.prefill()
        (ids,) = made.consumer.workers[0].block_ids(TOKENS)
        made.move([ids], 1)
        scheduler.matched("d-r", 32, False)
        scheduler.allocated("d-r", params, [[ids[0], 0, *ids[2:]]], TOKENS - 32)
        half.begin_step(scheduler.take_notes())
        assert half.loaded() == set(ids[2:]), "neither what D had, nor the null block"
        assert made.results()[0]["status"] == "mismatch"


def test_what_may_be_loaded_layer_by_layer_is_not_accused() -> None:
    with pair(loads_at_once=False) as made:
        made.expect(made.prefill(), is_async=False)
        assert made.consumer.halves[0].loaded() == set()
        (result,) = made.results()
        assert (result["status"], result["words"]["mismatch"]) == ("unverified", 0)
        assert "layer by layer" in result["why"]


def test_a_verdict_is_pending_until_it_comes_and_none_of_what_is_not_known() -> None:
    with pair() as made:
        half = made.consumer.halves[0]
        assert half.proof_results("d-r")["status"] == "none"
        ids = made.expect(made.prefill())
        assert half.proof_results("d-r")["status"] == "pending"
        made.move(ids)
        half.received({"d-r"}, set())
        assert made.results()[0]["status"] == "equal"
        assert half.proof_results("d-r")["status"] == "none", "told once"


def test_reads_are_told_by_request() -> None:
    measured = {
        7: SimpleNamespace(totalBytes=4096, descCount=3, postDuration=2, xferDuration=50),
        8: SimpleNamespace(totalBytes=1024, descCount=1, postDuration=1, xferDuration=40),
        9: None,
    }
    nixl = SimpleNamespace(get_xfer_telemetry=measured.get)
    log = TransferLog(SimpleNamespace(nixl_wrapper=nixl, _recving_transfers={"a": [7, 8], "b": [9]}))
    assert [nixl.get_xfer_telemetry(handle) for handle in (8, 7, 9)] == [measured[8], measured[7], None]
    common = {"group": 0}
    assert log.pop("a") == [
        {
            "producer_rank": 0,
            **common,
            "bytes": 1024,
            "descriptors": 1,
            "post_ns": 1000,
            "transfer_ns": 40000,
        },
        {
            "producer_rank": 1,
            **common,
            "bytes": 4096,
            "descriptors": 3,
            "post_ns": 2000,
            "transfer_ns": 50000,
        },
    ]
    assert log.pop("a") == log.pop("b") == []


def test_what_cannot_be_digested_is_unverified_and_the_engine_goes_on() -> None:
    with pair() as made:
        half = made.consumer.halves[0]
        params = made.prefill()
        scheduler = made.consumer.scheduler
        scheduler.matched("d-r", 0, True)
        scheduler.allocated("d-r", params, [[10**6]] * 4, TOKENS)
        half.begin_step(scheduler.take_notes())
        assert half.received({"d-r"}, set()).arrived == {"d-r"}
        result = half.proof_results("d-r")
        assert (result["status"], result["words"]["equal"]) == ("unverified", 0)
        assert result["why"].startswith("a bug in the digest of d-r")
        # And at P: nothing is told of it, so that D finds no proof.
        strange = Produced("p-x", "n", ((10**6,),) * 4, TOKENS)
        for served in made.producer.halves:
            served.begin_step(Notes(produced=(strange,)))
            assert served.records.get("n") is None


def test_a_worker_tells_its_counts_at_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def serve(host: str, port: int, text: Any) -> Any:
        asked.append((host, port))
        return serve_metrics(host, 0, text)  # Any free one.

    monkeypatch.setattr(halves, "serve_metrics", serve)
    with pair(1, 2, metrics_port=9200) as made:
        made.run()
        assert asked == [("127.0.0.1", 9200), ("127.0.0.1", 9201)]
        server = made.consumer.halves[1]._metrics
        assert server is not None
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=HANG_S) as answer:
            assert 'rayk_kv_proof_requests_total{status="equal"} 1\n' in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/", timeout=HANG_S)
        with pytest.raises(UserError, match="metrics_port"):
            serve_metrics(*server.server_address[:2], str)
        with pytest.raises(UserError, match="metrics_port"):
            serve_metrics("127.0.0.1", 65536, str)  # A rank's number beyond the last port.


def test_requests_that_are_not_sampled_are_skipped_on_both_sides() -> None:
    with pair(p={"sampling_rate": 0.0}, sampling_rate=0.999) as made:
        params = made.prefill()
        assert (params["rayk_proof"]["ranks"], params["rayk_proof"]["sampled"]) == ([], False)
        made.move(made.expect(params))
        half = made.consumer.halves[0]
        assert half.received({"d-r"}, set()).arrived == {"d-r"}
        assert half.proof_results("d-r")["status"] == "skipped"
        assert half.take_verified() == ["d-r"]
        taken = half.counts.take()
        assert taken is not None
        assert dict(taken["proofs"]) == {"skipped": 1}
        assert made.producer.halves[0].counts.take() is None
    with pair(sampling_rate=0.0) as made:
        made.move(made.expect(made.prefill()))
        assert made.consumer.halves[0].received({"d-r"}, set()).arrived == {"d-r"}
        assert made.consumer.halves[0].take_verified() == ["d-r"]


@each(
    "told, why",
    [
        ({"ranks": [], "sampled": False}, "D's sampling_rate is 1"),
        ({"ranks": []}, "no worker that has its proof"),
    ],
)
def test_a_ticket_cannot_talk_d_out_of_proving_every_request(told: dict[str, Any], why: str) -> None:
    with pair() as made:
        params = made.prefill()
        params["rayk_proof"] = {**params["rayk_proof"], **told}
        made.move(made.expect(params))
        made.consumer.halves[0].received({"d-r"}, set())
        (result,) = made.results()
        assert (result["status"], result["words"]["equal"]) == ("unverified", 0)
        assert why in result["why"]


def test_what_the_inner_connector_did_not_load_is_unverified() -> None:
    with pair() as made:
        made.expect(made.prefill())
        half = made.consumer.halves[0]
        told = half.received({"d-r"}, {"d-r"})
        assert (told.arrived, told.failed) == ({"d-r"}, {"d-r"})
        assert half.proof_results("d-r")["why"] == "the inner connector failed to load it"
        # Loaded, but nothing tells where P's proof is.
        made.move(made.expect({"do_remote_prefill": True}, "s"))
        half.received({"d-s"}, set())
        (result,) = made.results("s")
        assert (result["status"], result["words"]["equal"]) == ("unverified", 0)


def test_what_d_did_not_load_is_told_as_such_and_never_as_equal() -> None:
    with pair(1, 2) as made:
        scheduler = made.consumer.scheduler
        params = made.prefill()
        for name, num_external, loader in (("all", 0, ""), ("tier", 32, "OffloadingConnector")):
            scheduler.matched(f"d-{name}", TOKENS - num_external, False)
            scheduler.allocated(f"d-{name}", params, [[1]], num_external, loader)
        scheduler.allocated("d-plain", None, [[1]], 0)  # Nothing was promised of it.
        notes = scheduler.take_notes()
        assert notes.expected == ()
        for half in made.consumer.halves:
            half.begin_step(notes)
            found = {name: half.proof_results(f"d-{name}") for name in ("all", "tier", "plain")}
            assert [result["status"] for result in found.values()] == ["local", "local", "none"]
            assert found["all"]["why"] == "D loads nothing of P's"
            assert (
                found["tier"]["why"]
                == f"{found['all']['why']}: OffloadingConnector loads 32 tokens that it had"
            )
            taken = half.counts.take()
            assert taken is not None
            assert (dict(taken["proofs"]), taken["words"], taken["fetch_s"]) == ({"local": 2}, [], [])


@each(
    "sources, from_producer, wrong",
    [
        (None, False, "mismatch"),
        (["p2p"], False, "mismatch"),
        (["external_unspecified"], False, "unverified"),
        (["external_unspecified"], True, "mismatch"),
        (["host", "p2p"], False, "unverified"),
    ],
)
def test_kv_of_a_store_is_equal_or_unverified_since_another_engine_may_have_made_it(
    sources: list[str] | None, from_producer: bool, wrong: str
) -> None:
    with pair(1, from_producer=from_producer) as made:
        for name, moved, expected in (("right", 1, "equal"), ("wrong", 2, wrong)):
            made.move(made.expect(made.prefill(name, 1), name, 1, sources=sources), moved)
            made.consumer.halves[0].received({f"d-{name}"}, set())
            (result,) = made.results(name)
            assert result["status"] == expected
            assert (result["mismatch"] is not None) == (expected == "mismatch")
            assert bool(result["words"]["unverified"]) == (expected == "unverified")
        if wrong == "unverified":
            differ = f"{result['words']['unverified']} words differ"
            assert result["why"] == f"a store may have had it of another engine: {differ}"
            assert result["words"]["mismatch"] == 0


@each(
    "loader, sources, is_own",
    [
        ("SimpleCPUOffloadConnector", None, True),
        ("NixlConnector", None, False),
        ("AnyConnector", ["host", "disk"], True),
        ("OffloadingConnector", ["host", "external_unspecified"], True),
        ("OffloadingConnector", ["external_unspecified"], False),
        ("OffloadingConnector", ["host", "p2p"], False),
    ],
)
def test_only_what_vllm_says_was_of_d_itself_is_local(
    loader: str, sources: list[str] | None, is_own: bool
) -> None:
    with pair(1) as made:
        scheduler = made.consumer.scheduler
        scheduler.allocated("d-r", made.prefill(), [[1]] * 4, TOKENS, loader, sources)
        notes = scheduler.take_notes()
        assert (len(notes.local), len(notes.expected)) == (is_own, not is_own)


@each("reloads", [False, True])
def test_what_is_recomputed_or_reloaded_of_a_preempted_request_does_not_change_its_verdict(
    reloads: bool,
) -> None:
    with pair(1) as made:
        scheduler, half = made.consumer.scheduler, made.consumer.halves[0]
        params = made.prefill()
        made.move(made.expect(params))
        half.received({"d-r"}, set())
        # vLLM has freed its blocks and begins anew; its own tier may have saved some.
        scheduler.matched("d-r", 0, False)
        scheduler.allocated("d-r", params, [[1]], 32 if reloads else 0, "OffloadingConnector")
        notes = scheduler.take_notes()
        assert (notes.local, notes.expected) == ((), ())
        half.begin_step(notes)
        assert made.results()[0]["status"] == "equal"


def test_a_request_id_that_comes_again_is_proven_by_its_own_ticket() -> None:
    with pair(1) as made:
        params = [made.prefill("r", seed) for seed in (1, 2)]
        half = made.consumer.halves[0]
        for seed, told in ((1, params[0]), (2, params[1]), (1, params[1])):
            made.move(made.expect(told, "r", seed), seed)
            assert half.received({"d-r"}, set()).arrived == {"d-r"}
            (result,) = made.results()
            assert result["status"] == ("equal" if told is params[seed - 1] else "mismatch")
        # Rows are asked for by the request's id: the last one's come first.
        rows = [made.producer.halves[0].kept_rows("p-r") for _ in range(3)]
        expected = [MODEL.values(TOKENS, seed)[0, "k"][:, 0].numpy().tobytes() for seed in (2, 1)]
        assert [kept[0, "k", 0].tobytes() for kept in rows[:2]] == expected
        assert rows[2] == {}


def test_a_request_id_that_comes_again_is_not_let_go_by_the_verdict_of_the_one_before() -> None:
    with pair(on_mismatch="fail") as made:
        half = made.consumer.halves[0]
        for seed, moved in ((1, 1), (2, 1)):
            made.move(made.expect(made.prefill("r", seed), "r", seed), moved)
            told = half.received({"d-r"}, set())
            until = time.monotonic() + HANG_S
            while not told.arrived:
                assert time.monotonic() < until
                time.sleep(0.001)
                told = half.received(set(), set())
            assert told.failed == (set() if seed == moved else {"d-r"})


def test_several_engines_and_all_answers_of_one_request_are_proven_by_one_ticket() -> None:
    with pair(2, 1) as made, pair(1, 2) as other:
        params = made.prefill()
        # n: 2 makes two requests of one; another engine may have the ticket, too.
        for consumer, name in ((made.consumer, "0_r"), (made.consumer, "1_r"), (other.consumer, "r")):
            of = Pair(made.producer, consumer)
            of.move(of.expect(dict(params), name))
            for half in consumer.halves:
                half.received({f"d-{name}"}, set())
            assert {result["status"] for result in of.results(name)} == {"equal"}


@each("status, is_told", [("FINISHED_ABORTED", False), ("FINISHED_ERROR", False), ("FINISHED_STOPPED", True)])
def test_a_request_that_ended_early_at_p_has_no_proof(status: str, is_told: bool) -> None:
    with pair(1) as made:
        request = SimpleNamespace(
            request_id="p-r",
            status=SimpleNamespace(name=status),
            kv_transfer_params={"do_remote_decode": True},
            num_computed_tokens=32,
            num_prompt_tokens=TOKENS,
        )
        scheduler = made.producer.scheduler
        params = scheduler.finished(request, made.producer.workers[0].block_ids(TOKENS), None)
        assert (params is not None) == is_told
        assert len(scheduler.take_notes().produced) == is_told


def test_only_rows_behind_the_local_prefix_are_expected() -> None:
    with pair() as made:
        scheduler = made.consumer.scheduler
        scheduler.matched("d", 32, True)
        scheduler.allocated("d", made.prefill(), [[1, 2, 3]], TOKENS - 32)
        (expected,) = scheduler.take_notes().expected
        assert isinstance(expected, Expected)
        assert (expected.num_tokens, expected.first_row, expected.is_async) == (TOKENS, 32, True)
        scheduler.allocated("d", None, [[1, 2, 3]], 0)  # Called again when all is there.
        assert scheduler.take_notes().expected == ()


def test_the_engine_steps_on_until_finished_requests_have_their_verdicts() -> None:
    with pair(1, 2, timeout_s=10) as made:
        scheduler, clock = made.consumer.scheduler, made.consumer.clock
        made.expect(made.prefill())
        assert not scheduler.has_pending()
        done = SimpleNamespace(request_id="d-r", kv_transfer_params={})
        scheduler.finished(done, [[1]], None)
        assert scheduler.has_pending()
        scheduler.verified(["d-r"])
        assert scheduler.has_pending()
        scheduler.verified(["d-r"])
        assert not scheduler.has_pending()
        # A worker that never tells does not keep it for ever.
        made.expect(made.prefill("s"), "s")
        scheduler.finished(SimpleNamespace(request_id="d-s", kv_transfer_params={}), [[1]], None)
        clock[0] = 24.0
        assert scheduler.has_pending()
        clock[0] = 26.0
        assert not scheduler.has_pending()


def test_an_engine_that_waits_for_verdicts_alone_does_not_step_without_pause() -> None:
    with pair(1, timeout_s=30) as made:
        scheduler, clock = made.consumer.scheduler, made.consumer.clock
        made.expect(made.prefill())
        scheduler.finished(SimpleNamespace(request_id="d-r", kv_transfer_params={}), [[1]], None)
        num_steps = 0
        while scheduler.has_pending():  # P is dead: nobody tells the verdict.
            scheduler.has_pending()  # vLLM asks several times a step.
            scheduler.take_notes()
            num_steps += 1
            assert num_steps <= 65 / halves.PACE_S + 2
        assert 65 <= clock[0] < 66


def test_rows_are_kept_of_a_request_that_asks_for_it_without_d() -> None:
    with pair(1) as made:
        ids = made.producer.workers[0].block_ids(TOKENS)
        asked = SimpleNamespace(
            request_id="r",
            kv_transfer_params={"rayk_proof": True},
            num_computed_tokens=TOKENS,
            num_prompt_tokens=TOKENS - 4,
        )
        params = made.producer.scheduler.finished(asked, ids, None)
        made.producer.halves[0].begin_step(made.producer.scheduler.take_notes())
        rows = made.producer.halves[0].kept_rows("r")
        assert params is not None
        assert len(rows[0, "k", 0]) == TOKENS
        made.producer.halves[0].forget()
        assert isinstance(made.producer.halves[0].records, ProofRecords)


def test_settings_are_checked_and_not_passed_on() -> None:
    settings = read_settings({**SECRET, "inner": "NixlConnector", "kv_lease_duration": 600})
    assert settings == ProvingSettings(SECRET["secret"].encode())
    assert SECRET["secret"] not in repr(settings)
    everything = dict.fromkeys(KEYS, 1)
    assert without_ours({**everything, "kv_lease_duration": 600}) == {"kv_lease_duration": 600}
    for wrong in (
        {"sampling_rate": 1.5},
        {"sampling_rate": True},
        {"on_mismatch": "ignore"},
        {"port": "x"},
        {"timeout_s": 0},
        {"planted": "nothing"},
        {"keep_rows": "yes"},
        {"from_producer": "yes"},
        {"host": "0.0.0.0"},
        {"host": "[::]"},
        {"host": "0::0"},
        {"host": "fe80::1%eth0"},
        {"host": "bad..label"},
    ):
        with pytest.raises(UserError, match=next(iter(wrong))):
            read_settings({**SECRET, **wrong})


def test_a_name_of_the_host_is_looked_up_once_where_it_is_written() -> None:
    for host, address in (("localhost", "127.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("::1", "::1")):
        assert read_settings({**SECRET, "host": host}).host == address
