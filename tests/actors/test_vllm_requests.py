"""What becomes of a cell's requests on vLLM's engines, from what their drivers answer."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.engines import EngineHandle
from rayk.actors.vllm_cell import NUM_HANDSHAKES, VllmCellRun
from rayk.experiments.verdict import Findings
from rayk.specs import Cell, expand, load_spec
from rayk.types.config import VllmEngineConfig
from rayk.types.errors import DeadlineExceeded, KVMismatch, TransferError, Unsupported
from rayk.types.rows import TransferRow
from tests.specs.models import decoder, spec

PROMPT = [3, 4, 5]
FIRST, TOKENS = 11, [11, 12]
PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1]]}
EQUAL = {"status": "equal", "why": "", "bytes_checked": 100, "bytes_mismatched": 0, "mismatch": None}
MOVED = {"producer_rank": 0, "group": 0, "bytes": 64, "descriptors": 4, "post_ns": 1, "transfer_ns": 9}
NOT_COMPARED = {"why": "", "bytes_checked": 0, "bytes_mismatched": 0, "mismatch": None, "transfers": []}
WRONG = {
    "layer": 1,
    "group": 0,
    "field": "k",
    "unit": 0,
    "unit_name": "head",
    "token": 2,
    "classification": "zeros",
}


class Answers:
    """Stands for the actor of an engine."""

    def __init__(self, *proofs: dict[str, Any] | list[dict[str, Any]] | Exception) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.ask = SimpleNamespace(remote=self._remote)
        self._proofs = list(proofs)
        self.failures: list[str | Exception] = []
        """What vLLM logged of the next requests, which it fails, or what ends the wait for them."""

    def _remote(self, timeout_s: float, op: str, **told: Any) -> Any:
        assert timeout_s > 0
        self.asked.append((op, told))
        return None if op == "abort" else self._ask(op, told)  # nobody waits for it

    async def _ask(self, op: str, told: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        if op == "proof":
            proof = self._proofs.pop(0)
            if isinstance(proof, Exception):
                raise proof
            return {"workers": [proof] if isinstance(proof, dict) else proof}, b""
        if op == "rows":
            return {"workers": [[[0, "k", 0, 3, 2]]]}, bytes(range(6))
        assert op == "generate", op
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return {"finish_reason": "error", "token_ids": [], "why": failure}, b""
        tokens = TOKENS[: told["sampling"]["max_tokens"]]
        pairs = [[[token, -0.5], [token, -0.5], [1, -2.0]] for token in tokens]
        return {
            "token_ids": tokens,
            "times_ns": list(range(5, 5 + len(tokens))),
            "finish_reason": "length",
            "stop_reason": None,
            "num_cached_tokens": 2 if told["kv_transfer_params"] == {"do_remote_decode": True} else 0,
            "kv_transfer_params": PARAMS,
            "logprobs": pairs,
            "prompt_logprobs": [None, [[4, -1.0]], [[5, -3.0]]]
            if told["sampling"]["prompt_logprobs"] == 0
            else None,
        }, b""


def cell(**sampling: Any) -> Cell:
    asked = {"max_tokens": 2, "logprobs": 1} | sampling
    (made,) = expand(load_spec(spec(device="cpu", matrix={}, sampling=asked)).spec, decoder())
    config = VllmEngineConfig(python="p", model="m")
    return replace(made, vllm=(config, config))


def run(
    of: Cell, *actors: Answers, capture: bool = False, facts: dict[str, Any] | None = None
) -> CellOutcome:
    async def requests() -> CellOutcome:
        names = ("prefill0", "decode0")
        handles = [
            EngineHandle(name, name[:-1], 0, of.prefill, [actor])
            for name, actor in zip(names, actors, strict=False)
        ]
        for handle in handles:
            handle.facts = facts or {}
        outcome = CellOutcome()
        await VllmCellRun(of, 0, outcome, handles, capture).run([PROMPT])
        return outcome

    return asyncio.run(requests())


def test_a_hand_over_is_a_row_like_any_other() -> None:
    prefill, decode = Answers(), Answers({"status": "pending"}, {**EQUAL, "transfers": [MOVED]})
    of = cell(prompt_logprobs=0)
    outcome = run(of, prefill, decode, capture=True)
    assert outcome.errors == []
    (row,) = outcome.requests
    assert (row.prefill_engine, row.decode_engine, row.kv_path) == ("prefill0", "decode0", "remote")
    assert (row.output_token_ids, row.token_times_ns, row.finish_reason) == (TOKENS, [5, 6], "length")
    assert row.output_logprobs == [-0.5, -0.5]
    assert row.output_top_logprobs == [[(11, -0.5), (1, -2.0)], [(12, -0.5), (1, -2.0)]]
    assert row.prompt_logprobs == [None, -1.0, -3.0], "the engine that computed the prompt tells them"
    assert outcome.num_kv_bytes_checked == 100
    (moved,) = outcome.transfers
    assert isinstance(moved, TransferRow)
    assert (moved.producer_rank, moved.consumer_rank, moved.bytes, moved.num_descriptors) == (0, 0, 64, 4)
    assert np.array_equal(outcome.captured[0][0][0]["k", 0], np.arange(6, dtype=np.uint8).reshape(3, 2))
    (_, given), *_ = decode.asked
    assert given["kv_transfer_params"] == PARAMS
    assert given["sampling"]["prompt_logprobs"] is None
    assert [op for op, _ in prefill.asked] == ["generate", "rows"], "rows are taken after the proof"


def test_a_model_with_states_tells_of_its_prompt_apart_from_the_hand_over() -> None:
    prefill, decode = Answers(), Answers(EQUAL | {"transfers": []})
    outcome = run(cell(prompt_logprobs=0), prefill, decode, facts={"keeps_states": True})
    assert outcome.errors == []
    assert outcome.requests[0].prompt_logprobs == [None, -1.0, -3.0]
    (_, of_prompt), (_, handed_on) = prefill.asked
    assert of_prompt["request_id"] != handed_on["request_id"]
    assert (of_prompt["kv_transfer_params"], of_prompt["sampling"]["prompt_logprobs"]) == (None, 0)
    assert handed_on["kv_transfer_params"]["do_remote_decode"]
    assert handed_on["sampling"]["prompt_logprobs"] is None


def test_tokens_of_kv_that_is_wrong_are_told_as_well() -> None:
    found = EQUAL | {"status": "mismatch", "mismatch": WRONG, "bytes_mismatched": 8, "transfers": []}
    outcome = run(cell(), Answers(), Answers(found))
    (error,) = outcome.errors
    assert isinstance(error, KVMismatch)
    assert (error.layer, error.head, error.token, error.num_bytes_mismatched) == (1, 0, 2, 8)
    assert outcome.requests[0].error is None
    assert outcome.requests[0].output_token_ids == TOKENS


def test_what_cannot_be_verified_is_not_taken_for_right() -> None:
    found = EQUAL | {
        "status": "unverified",
        "why": "P has no digest of it",
        "bytes_checked": 0,
        "transfers": [],
    }
    outcome = run(cell(), Answers(), Answers(found))
    (error,) = outcome.errors
    assert isinstance(error, TransferError)
    assert "cannot be verified: P has no digest of it" in str(error)
    assert outcome.requests[0].error == str(error)


WRONG_KV = EQUAL | {"status": "mismatch", "mismatch": WRONG, "bytes_mismatched": 8, "transfers": [MOVED]}
HANGS = DeadlineExceeded("proof on decode0", 30.0)


@pytest.mark.parametrize("failure", [TimeoutError(), DeadlineExceeded("generate", 9.0), "it was refused"])
def test_wrong_kv_counts_though_its_request_fails(failure: str | Exception) -> None:
    decode = Answers(WRONG_KV)
    decode.failures = [failure]
    outcome = run(cell(), Answers(), decode)
    wrong, ended = outcome.errors
    assert isinstance(wrong, KVMismatch)
    assert isinstance(ended, TransferError | DeadlineExceeded)
    assert outcome.requests[0].error == str(ended)
    assert (outcome.num_kv_bytes_checked, len(outcome.transfers)) == (100, 1)
    findings = Findings()
    findings.add_errors(outcome.errors)
    assert findings.judge() == ("KV_MISMATCH", str(wrong))
    assert [op for op, _ in decode.asked] == ["generate", "proof", "abort"]


@pytest.mark.parametrize(
    "proof", [HANGS, {"status": "none"}, {"status": "pending"}, EQUAL | {"transfers": []}]
)
def test_a_failed_request_whose_kv_is_not_known_as_wrong_failed_of_what_ended_it(proof: Any) -> None:
    decode = Answers(proof)
    decode.failures = [TimeoutError()]
    outcome = run(cell(), Answers(), decode)
    assert [type(error) for error in outcome.errors] == [DeadlineExceeded]
    assert outcome.transfers == []


def test_what_one_rank_found_is_kept_when_the_other_does_not_answer() -> None:
    decode = Answers([WRONG_KV, {"status": "pending"}], HANGS, HANGS)
    outcome = run(cell(), Answers(), decode)
    assert [type(error) for error in outcome.errors] == [KVMismatch, DeadlineExceeded]


def test_what_was_found_counts_once_though_its_request_fails_afterwards() -> None:
    outcome = run(cell(), Answers(), Answers([WRONG_KV, {"status": "none"}]))
    assert [type(error) for error in outcome.errors] == [KVMismatch, TransferError]
    assert outcome.num_kv_bytes_checked == 100


LATE = "base_worker.py:1339: NIXL transfer failure: handshake_setup_failed: zmq.error.Again: busy"


@pytest.mark.parametrize(
    ("failures", "num_asked"), [([LATE, LATE], 3), ([LATE] * 9, NUM_HANDSHAKES), (["transfer_failed"], 1)]
)
def test_a_handshake_that_came_too_late_is_tried_again(failures: list[str], num_asked: int) -> None:
    prefill, decode = Answers(), Answers(EQUAL | {"transfers": []})
    decode.failures = list(failures)
    outcome = run(cell(), prefill, decode)
    names = [told["request_id"] for op, told in decode.asked if op == "generate"]
    assert len(set(names)) == len(names) == num_asked
    base = prefill.asked[0][1]["request_id"]
    assert {re.sub(r"-[0-9a-f]{8}$", "", name) for name in names} == {base}
    if len(failures) < num_asked:
        assert outcome.errors == []
        assert [told["request_id"] for op, told in decode.asked if op == "proof"] == names[-1:]
    else:
        assert [type(error) for error in outcome.errors] == [TransferError]
        assert failures[0] in str(outcome.errors[0])


@pytest.mark.parametrize(
    "place",
    [
        "base_worker.py:1318: NIXL transfer failure: handshake_setup_failed | Context: {}: ",
        "base_worker.py:1354: Traceback (most recent call last):: ",
    ],
)
def test_a_pair_that_vllm_refuses_in_its_handshake_is_unsupported(place: str) -> None:
    for kind, words in (
        ("AssertionError", "Local block size 64 is not divisible by remote block size 128 or vice versa."),
        ("RuntimeError", "NIXL compatibility hash mismatch. Local: 3f, Remote: 95. Versions differ."),
    ):
        decode = Answers()
        decode.failures = [f"{place}{kind}: {words}"]
        outcome = run(cell(), Answers(), decode)
        (error,) = outcome.errors
        assert isinstance(error, Unsupported), error
        assert str(error) == f"vLLM refuses: {words}"


def test_kv_that_the_decode_engine_had_was_not_handed_over() -> None:
    outcome = run(cell(), Answers(), Answers(NOT_COMPARED | {"status": "local"}))
    assert outcome.errors == []
    assert outcome.requests[0].kv_path == "local"
    assert outcome.num_kv_bytes_checked == 0


def test_kv_that_was_handed_over_unproven_is_not_taken_for_the_decode_engines_own() -> None:
    outcome = run(cell(), Answers(), Answers(NOT_COMPARED | {"status": "skipped"}))
    assert (outcome.errors, outcome.num_kv_bytes_checked) == ([], 0)
    assert outcome.requests[0].kv_path == "remote"
    outcome = run(cell(), Answers(), Answers({"status": "none"}))
    (error,) = outcome.errors
    assert "cannot be verified: rank 0 knows nothing of it" in str(error)
    assert outcome.requests[0].kv_path == "remote"


def test_an_aggregated_engine_shows_the_rows_of_a_prompt_alone() -> None:
    of, engine = cell(), Answers()
    of = replace(of, mode="aggregated", decode=None, vllm=of.vllm[:1], num_decode_engines=0)
    outcome = run(of, engine, capture=True)
    (row,) = outcome.requests
    assert (row.kv_path, row.decode_engine, row.output_token_ids) == ("local", "prefill0", TOKENS)
    (_, whole), (_, again), (rows, _) = engine.asked
    assert rows == "rows"
    assert whole["kv_transfer_params"] is None
    assert (again["sampling"]["max_tokens"], again["kv_transfer_params"]) == (1, {"rayk_proof": True})
    assert list(outcome.captured) == [0]
