"""Push between two engines of this process: the same bytes and tokens as a pull, layer by layer."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import Completion
from rayk.engine.leader import RequestEvent
from rayk.types.errors import TransferError
from tests.actors.cases import NUM_TOKENS, Model
from tests.pd import Pair, make_request, wait_until


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


def rows_of(completion: Completion) -> list[Any]:
    return list(completion.info["transfers"])


@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (2, 4)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_pushed_requests_decode_as_pulled_ones(qwen3: Model, tp: tuple[int, int]) -> None:
    with Pair.open(qwen3.path, tp=tp, push=True) as pair:
        requests = [make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(qwen3.prompts)]
        done = pair.complete(requests)
        assert [d.token_ids for d in done] == qwen3.expected
        assert {row.mode for d in done for row in rows_of(d)} == {"push"}
        pair.check_all_free()
