"""Steps that begin before the tokens of the one before are known, a turn at a time, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import make_leader
from rayk.engine.leader import RequestEvent
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.engine.rank import EngineRank
from rayk.engine.stopping import Decode
from rayk.parallel.local import LocalComm
from rayk.types.batch import UNKNOWN_TOKEN, ScheduledBatch
from rayk.types.config import EngineConfig
from rayk.types.request import FinishReason, Request
from tests.engine.test_engine import Model
from tests.engine.test_graphs import Again
from tests.markers import thorough
from tests.pd import NAN_POISON, Pair, make_request

NUM_TOKENS = 12


class Turns:
    """An engine in this thread."""

    def __init__(
        self,
        path: Path,
        decode: Decode | None = None,
        *,
        recorded: bool = False,
        load_vocabulary: Callable[[], str] | None = None,
        **more: Any,
    ) -> None:
        settings = {"num_blocks": 80, "max_batch_tokens": 512, "async_scheduling": "always", **more}
        config = EngineConfig(model=str(path), attention_backend="reference", **settings)
        recorder = Again() if recorded else None
        self.rank = EngineRank(config, LocalComm(), poison=NAN_POISON, recorder=recorder)
        load_decoder = None if decode is None else lambda: decode
        self.leader = make_leader(self.rank, None, load_decoder, load_vocabulary)
        self.loop = EngineLoop(self.rank, NoExtension(), self.leader)
        self.events: dict[str, list[RequestEvent]] = {}
        self.batches: list[ScheduledBatch] = []
        step = self.rank.step
        self.rank.step = lambda batch: (self.batches.append(batch), step(batch))[1]  # type: ignore[method-assign]

    def submit(self, *requests: Request) -> None:
        for request in requests:
            events = self.events[request.request_id] = []
            self.leader.submit(request, events.append)

    def tokens(self, request_id: str) -> list[int]:
        return [t for event in self.events[request_id] for t in event.token_ids]

    def end(self, request_id: str) -> FinishReason | None:
        return self.events[request_id][-1].finish_reason

    def finish(self) -> None:
        """Turn until all have ended, and no step is in flight; every block is then free."""
        while not all(events and events[-1].is_last for events in self.events.values()):
            self.loop.turn()
        self.loop.turn()
        self.leader.check_integrity()
        pool = self.leader.manager.pool
        assert pool.num_free_blocks == pool.num_blocks - 1

    def shares(self, request_id: str) -> list[tuple[int, ...]]:
        """What each step was to compute of a request."""
        found = (r for b in self.batches for r in b.requests)
        return [r.token_ids for r in found if r.request_id == request_id]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_token_is_settled_a_step_late_and_computed_on_before(model: Model, recorded: bool) -> None:
    turns = Turns(model.path, recorded=recorded)
    turns.submit(make_request("r", model.prompts[1], NUM_TOKENS))
    turns.loop.turn()
    assert turns.events["r"] == []
    turns.loop.turn()
    assert turns.tokens("r") == model.expected[1][:1]
    turns.finish()
    assert (turns.tokens("r"), turns.end("r")) == (model.expected[1][:NUM_TOKENS], FinishReason.LENGTH)
    unknown = [(UNKNOWN_TOKEN,)] * (NUM_TOKENS - 1)
    assert turns.shares("r") == [tuple(model.prompts[1]), *unknown], "a last token known before is the last"


def test_what_was_computed_beyond_an_eos_is_dropped(model: Model) -> None:
    """At the first decode step, beside a request that goes on, and whose row another one takes."""
    eos = model.expected[1][1]
    expected = model.expected[1][: model.expected[1].index(eos) + 1]
    turns = Turns(model.path, max_seqs=2)
    turns.leader.scheduler._eos_token_ids = frozenset([eos])
    turns.submit(
        make_request("ends", model.prompts[1], NUM_TOKENS, ignore_eos=False),
        make_request("goes on", model.prompts[0], NUM_TOKENS),
        make_request("waits", model.prompts[2], NUM_TOKENS),
    )
    turns.finish()
    assert (turns.tokens("ends"), turns.end("ends")) == (expected, FinishReason.STOP)
    assert turns.tokens("goes on") == model.expected[0][:NUM_TOKENS]
    assert turns.tokens("waits") == model.expected[2][:NUM_TOKENS]
    assert len(turns.shares("ends")) == len(expected) + 1, "one step too many, whose token is nobody's"


def test_a_stop_string_that_two_steps_complete(model: Model) -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return "".join(f"<{t}>" for t in token_ids)

    expected = model.expected[1]
    stop = decode(expected[3:5])[1:-1]
    ended = next(i for i in range(1, 25) if stop in decode(expected[:i]))
    turns = Turns(model.path, decode)
    turns.submit(make_request("r", model.prompts[1], 24, stop=(stop,)))
    turns.finish()
    assert turns.tokens("r") == expected[:ended]
    assert (turns.end("r"), turns.events["r"][-1].stop_reason) == (FinishReason.STOP, stop)


def test_an_abort_while_its_step_is_in_flight_gives_its_id_to_another(model: Model) -> None:
    turns = Turns(model.path)
    turns.submit(make_request("same", model.prompts[0], NUM_TOKENS))
    turns.submit(make_request("other", model.prompts[1], NUM_TOKENS))
    for _ in range(3):
        turns.loop.turn()
    aborted = turns.events["same"]
    turns.leader.abort("same")
    turns.submit(make_request("same", model.prompts[2], NUM_TOKENS))
    turns.finish()
    assert aborted[-1].finish_reason is FinishReason.ABORT
    assert [t for e in aborted for t in e.token_ids] == model.expected[0][:2]
    assert turns.tokens("same") == model.expected[2][:NUM_TOKENS]
    assert turns.tokens("other") == model.expected[1][:NUM_TOKENS]


@pytest.mark.parametrize("num_blocks", [22, 24])
def test_requests_are_preempted_once_their_tokens_are_known(model: Model, num_blocks: int) -> None:
    turns = Turns(model.path, num_blocks=num_blocks, max_batch_tokens=64)
    order = [0, 1, 2, 1]
    turns.submit(*(make_request(str(i), model.prompts[n], 24) for i, n in enumerate(order)))
    turns.finish()
    assert [turns.tokens(str(i)) for i in range(4)] == [model.expected[n] for n in order]
    assert turns.leader.scheduler.num_preemptions > 0
    assert any(UNKNOWN_TOKEN in r.token_ids for b in turns.batches for r in b.requests)


def test_the_last_position_ends_a_request_without_a_step_too_many(model: Model) -> None:
    turns = Turns(model.path)
    turns.submit(make_request("r", model.prompts[1], NUM_TOKENS))
    turns.loop.turn()
    turns.leader.scheduler.running[0].most_tokens = len(model.prompts[1]) + 5
    turns.finish()
    assert (turns.tokens("r"), turns.end("r")) == (model.expected[1][:5], FinishReason.LENGTH)
    assert len(turns.shares("r")) == 5


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 3},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.6, "temperature": 1.0, "seed": 5},
    ],
)
def test_sampling_is_the_same_as_without(model: Model, sampling: dict[str, Any]) -> None:
    found = []
    for scheduling in ("always", "never"):
        turns = Turns(model.path, async_scheduling=scheduling, max_batch_tokens=16)
        turns.submit(*(make_request(f"{i}", p, 6, **sampling) for i, p in enumerate(model.prompts[:2])))
        turns.submit(make_request("plain", model.prompts[0], NUM_TOKENS))
        turns.finish()
        events = (e for name in turns.events for e in turns.events[name] if e.token_ids)
        found.append([replace(e, info=None, time_ns=0) for e in events])
        assert turns.tokens("plain") == model.expected[0][:NUM_TOKENS]
    assert found[0] == found[1]
    assert any(e.logprobs or e.prompt_logprobs for e in found[0]) == any("logprobs" in s for s in sampling)


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_take_the_tokens_that_rank_0_sampled(model: Model, tp: int) -> None:
    with model.engine(tp=tp, async_scheduling="always", max_batch_tokens=40, prefix_caching=True) as engine:
        for _ in range(2):  # the second time from the prefix cache
            requests = [make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(model.prompts)]
            done = engine.generate(requests)
            assert [d.token_ids for d in done] == [e[:NUM_TOKENS] for e in model.expected]
        engine.leader.check_integrity()


@pytest.mark.parametrize(
    ("family", "tp"),
    [("qwen3", (1, 2)), *(pytest.param(f, (2, 1), marks=thorough) for f in ("jamba", "gemma3"))],
)
def test_a_hand_over_takes_only_what_is_settled(
    checkpoint: Callable[..., Path], reference: Callable[..., Any], family: str, tp: tuple[int, int]
) -> None:
    """The state of a recurrent layer after one more token would not be the prompt's."""
    path = checkpoint(family)
    model = Model(path, reference(path))
    settings: dict[str, Any] = {"async_scheduling": "always", "num_blocks": 160, "max_batch_tokens": 64}
    with Pair.open(path, tp=tp, **settings) as pair:
        assert pair.generate(model.prompts, NUM_TOKENS) == [e[:NUM_TOKENS] for e in model.expected]
        pair.check_all_free()


def test_it_can_be_turned_off_and_is_on_a_cpu(model: Model) -> None:
    notes = {}
    for setting in ("auto", "always", "never"):
        config = EngineConfig(model=str(model.path), async_scheduling=setting)
        notes[setting] = EngineRank(config, LocalComm()).scheduling_note
    assert notes == {
        "auto": "synchronous: device cpu computes before it returns",
        "always": "asynchronous",
        "never": "synchronous: engine.async_scheduling: never",
    }
