"""Prefix caching under whatever comes together: conversations at several turns over two engines that have too
few blocks, aborted at any point, prefilled again behind what was delivered, some of whose transfers fail."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from rayk.engine.build import RequestResult
from rayk.engine.leader import RequestEvent
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.ticket import TransferTicket
from rayk.types.config import EngineConfig
from rayk.types.errors import TransferError
from rayk.types.request import FinishReason, Request
from tests.handover.cases import NUM_TOKENS, Model, models_by_name
from tests.markers import slow
from tests.pd import NAN_POISON, Pair, Side, _make_side, make_request, wait_until

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3": {"hybrid_kv": False},
    "falcon_h1": {"state_block_size": 16},
}
BLOCKS = {"qwen3": (42, 34), "gemma3": (46, 38), "falcon_h1": (60, 50)}
"""Of P and D: enough for two of the longest prompts at P, and not quite at D."""


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    return models_by_name(checkpoint, reference)


class UnreliableAgent(LocalAgent):
    """Reads take some polls, and some of them fail when they are posted."""

    def __init__(self, name: str, network: LocalNetwork, draw: random.Random, chance: float) -> None:
        super().__init__(name, network, delay_polls=3)
        self._draw, self._chance = draw, chance

    def read(self, *args: Any, **kwargs: Any) -> Any:
        if self._draw.random() < self._chance:
            raise TransferError("", "planted")
        return super().read(*args, **kwargs)


@dataclass(eq=False)
class Talk:
    """One request: turn `turn` of a conversation, of which `num_known` more tokens were delivered before."""

    request: Request
    wanted: list[int]
    num_known: int
    fate: str
    """Where it is aborted: at p, handed, at d; or kept."""
    is_alone: bool
    """The decode engine computes the prompt itself."""
    done: RequestResult | None = None


def some_talks(model: Model, draw: random.Random, num: int) -> list[Talk]:
    found = []
    for number in range(num):
        index, turn = draw.choice((0, 1, 2, 2, 2)), draw.choice((0, 0, 5, 9, 14))
        request = make_request(
            f"r{number}", model.prompts[index] + model.expected[index][:turn], NUM_TOKENS - turn
        )
        fate = draw.choice(("kept",) * 6 + ("p", "handed", "d"))
        num_known, is_alone = draw.choice((0, 0, 0, 3)), draw.random() < 0.2
        found.append(Talk(request, model.expected[index][turn:], num_known, fate, is_alone))
    return found


def play(pair: Pair, talk: Talk, recompute: bool) -> None:
    """A request's way, to its end."""
    request, known = talk.request, tuple(talk.wanted[: talk.num_known])
    events: SimpleQueue[RequestEvent] = SimpleQueue()
    if talk.is_alone:
        pair.d.handover.submit(request, events.put, hand_over=False, output_token_ids=known)
        if talk.fate != "kept":
            pair.d.engine.leader.abort(request.request_id)
        talk.done = pair.d.engine.collect(events)
        talk.done.token_ids[:0] = known
        return
    pair.p.handover.submit(request, events.put, hand_over=True)
    if talk.fate == "p":
        pair.p.engine.leader.abort(request.request_id)
    talk.done = pair.p.engine.collect(events)
    if talk.done.payload is not None:
        hand_over(pair, talk, known, recompute)


def hand_over(pair: Pair, talk: Talk, known: tuple[int, ...], recompute: bool) -> None:
    """From a ticket on, behind what was delivered."""
    request_id, done = talk.request.request_id, talk.done
    assert done is not None
    assert isinstance(done.payload, TransferTicket)
    assert 0 <= done.info["num_cached_tokens"] < len(talk.request.prompt_token_ids)
    if talk.fate != "handed":
        events: SimpleQueue[RequestEvent] = SimpleQueue()
        known = max(known, tuple(done.token_ids), key=len)
        done.token_ids[:] = known
        more = {"reserve_s": 120.0, "recompute": recompute}
        pair.d.handover.submit_decode(talk.request, done.payload, known, 120.0, events.put, **more)  # type: ignore[arg-type]
        if talk.fate == "d":
            pair.d.engine.leader.abort(request_id)
        pair.d.engine.collect(events, into=done)
    pair.p.handover.settle(request_id)
    pair.d.handover.settle(request_id)


def play_all(pair: Pair, talks: list[Talk], recompute: bool, num_at_once: int = 6) -> None:
    """So many on their way at once. Every answer is that of transformers, as far as it goes."""
    left, errors = iter(talks), []
    lock = threading.Lock()

    def work() -> None:
        try:
            for talk in _taken(left, lock):
                play(pair, talk, recompute)
        except BaseException as error:  # noqa: BLE001 - shown by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for talk in talks:
        assert talk.done is not None
        output, wanted = talk.done.token_ids, talk.wanted
        if talk.fate == "kept" and talk.done.error is None:
            assert talk.done.finish_reason is FinishReason.LENGTH
            assert output == wanted, talk
        assert output == wanted[: len(output)], talk
        assert talk.done.error is None or isinstance(talk.done.error, TransferError), talk.done.error


def _taken(left: Iterator[Talk], lock: threading.Lock) -> Iterator[Talk]:
    while True:
        with lock:
            talk = next(left, None)
        if talk is None:
            return
        yield talk


def check_nothing_left(sides: list[Side]) -> None:
    """Every block, lease and name of a request comes back; what is kept can be found."""
    for side in sides:
        wait_until(side.has_all_blocks, 120.0)
        wait_until(lambda side=side: not side.handover.needs_gather(), 120.0)  # type: ignore[misc]
        side.run(side.engine.leader.check_integrity)
        manager = side.engine.leader.manager
        assert manager.leases == ()
        assert not manager._keys, "of requests that are over"
        assert manager.ledger.num_held == 0


@pytest.mark.parametrize("seed", [5, *(pytest.param(n, marks=slow) for n in range(5))])
@pytest.mark.parametrize("name", SETTINGS)
def test_conversations_whatever_comes_together(models: Callable[[str], Model], name: str, seed: int) -> None:
    model, draw = models(name), random.Random(seed)
    network = LocalNetwork()
    chance, recompute = draw.choice(((0.0, False), (0.1, True), (0.1, False)))

    def make_agent(agent: str) -> LocalAgent:
        return UnreliableAgent(agent, network, random.Random(f"{seed} {agent[0]}"), chance)

    changes: Any = tuple({"num_blocks": num} for num in BLOCKS[name])
    more: dict[str, Any] = {"max_batch_tokens": draw.choice((48, 64, 512)), "max_seqs": 6, **SETTINGS[name]}
    with Pair.open(model.path, make_agent=make_agent, prefix_caching=True, changes=changes, **more) as pair:
        talks = some_talks(model, draw, 24)
        play_all(pair, talks, recompute)
        assert any(t.done is not None and t.done.info.get("num_cached_tokens") for t in talks)
        check_nothing_left([pair.p, pair.d])


def test_a_decode_engine_that_is_formed_again_holds_nothing(models: Callable[[str], Model]) -> None:
    """Its successor is sent all of a prompt, whatever the producer's cache has, and then holds that."""
    model, network = models("qwen3"), LocalNetwork()

    def make_agent(agent: str) -> LocalAgent:
        return LocalAgent(agent, network)

    prompt = model.prompts[2]
    with Pair.open(model.path, make_agent=make_agent, prefix_caching=True) as pair, ExitStack() as stack:
        moved = []
        for number in range(2):
            (done,) = pair.complete([make_request(f"r{number}", prompt, NUM_TOKENS)])
            assert done.token_ids == model.expected[2]
            moved.append(sum(r.bytes for r in done.info["transfers"]))
        config = EngineConfig(model=str(model.path), num_blocks=64, prefix_caching=True)
        options = {"poison": NAN_POISON, "push": False, "push_layers": None, "renewed_lease_s": None}
        other = Pair(pair.p, _make_side(stack, "d-again", config, make_agent, 60.0, options))
        other.connect()
        for number in range(2):
            (done,) = other.complete([make_request(f"s{number}", prompt, NUM_TOKENS)])
            assert done.token_ids == model.expected[2]
            assert done.info["num_cached_tokens"] == 288
            moved.append(sum(r.bytes for r in done.info["transfers"]))
        assert moved[:2] == moved[2:]
        assert moved[1] < moved[0]
        check_nothing_left([pair.p, pair.d, other.d])
