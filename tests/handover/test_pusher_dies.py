"""A pusher whose thread ends takes its rank down by name, whatever the engine does at the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.transfer.pusher import Pusher, _PushThread
from rayk.types.errors import InternalError
from tests.handover.cases import NUM_TOKENS, Model
from tests.pd import Pair, make_request, wait_until


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


def pusher_of(pair: Pair, rank: int) -> Pusher:
    pusher = pair.p.extensions[rank]._push._pusher
    assert pusher is not None
    return pusher


def die() -> None:
    raise KeyError("a bug in the pusher")


def dies_when_written(worker: _PushThread) -> None:
    """At the first layer that is computed when something was written: whoever watched from another thread
    might look too late."""
    computed = worker.computed

    def compute(*arguments: Any) -> None:
        if any(push.num_posted for push in worker.pushes.values()):
            die()
        computed(*arguments)

    worker.computed = compute  # type: ignore[method-assign]


def use_while_idle(model: Model, rank: int) -> None:
    with Pair.open(model.path, tp=(2, 1), push=True) as pair:
        pair.complete([make_request("r", model.prompts[1], NUM_TOKENS)])
        pusher_of(pair, rank)._post(die)
        wait_until(lambda: pair.p.engine.error is not None)
        pair.check_all_free()


def use_while_writing(model: Model, rank: int) -> None:
    with Pair.open(model.path, tp=(2, 1), push=True, push_layers=1, max_batch_tokens=8) as pair:
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        reservation = pair.reserve(request)
        dies_when_written(pusher_of(pair, rank)._worker)
        stream = pair.start_prefill(request, reservation=reservation)
        done = pair.p.engine.collect(stream)
        assert isinstance(done.error, InternalError)
        assert "a bug in the pusher" in done.error.cause
        # Where another engine waits for blocks of this one, it is told what became of it at once.
        with pytest.raises(InternalError, match="a bug in the pusher"):
            pair.p.has_all_blocks()


@pytest.mark.parametrize("use", [use_while_idle, use_while_writing])
@pytest.mark.parametrize("rank", [0, 1])
def test_its_engine_says_what_ended_it(qwen3: Model, rank: int, use: Callable[[Model, int], None]) -> None:
    with pytest.raises(InternalError, match=f"rank {rank}.*a bug in the pusher"):
        use(qwen3, rank)
