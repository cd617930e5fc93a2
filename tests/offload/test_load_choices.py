"""Whether a prompt is loaded: what is weighed, and when it is not even tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.offload.costs import Choice
from tests.offload.faults import Case
from tests.offload.node import Node, NodeEngine
from tests.pd import make_request

LENGTHS = (600, 301, 290, 280)
ROOM: dict[str, Any] = {"num_blocks": 400}


@pytest.fixture(scope="module")
def case(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Case:
    path = checkpoint("qwen3")
    return Case.make(path, reference(path), LENGTHS)


def told(engine: NodeEngine) -> dict[str, Any]:
    return engine.offloading.status()


def test_what_is_here_is_weighed_as_what_the_rest_sees(case: Case) -> None:
    """An engine has a prompt's beginning and the tier more of it: what is weighed lies behind that."""
    with Node.open(case.path, [ROOM, {**ROOM, "prefix_caching": True}]) as node:
        first, second = node.engines
        case.complete(first, "a", 0)
        node.settle()
        weighed, costs = [], second.offloading.costs
        real = costs.load

        def load(num_bytes: int, num_tokens: int, *more: Any, **here: int) -> Choice:
            weighed.append((num_tokens, here["num_here"]))
            return real(num_bytes, num_tokens, *more, **here)

        costs.load = load  # type: ignore[method-assign]
        side = second.offloading.side
        tier, side.tier = side.tier, None
        second.complete([make_request("b", case.prompts[0][:280], 1)])
        second.run(lambda: setattr(side, "tier", tier))
        (done,) = case.complete(second, "c", 0)
        # Whole blocks of 16: 272 of 280 are kept here, 592 of 600 there.
        assert weighed == [(592 - 272, 272)]
        assert (done.info["num_cached_tokens"], done.info["num_host_tokens"]) == (592, 320)
        node.settle()
