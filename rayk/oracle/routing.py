"""How near a router comes to sending a token to another expert, and routers that never come near.

A gap is the distance between the last chosen and the first rejected expert: in router logits, or in biased
scores where those decide (deepseek_v3, nemotron_h), there also between groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rayk.oracle.text import FedText

MAX_ATTEMPTS = 400
"""Routers tried for one layer: one in ten to a hundred has no near choice among 300 tokens."""


def routers(model: Any) -> dict[str, Any]:
    """name -> router, in layer order."""
    found = model.named_modules()
    kinds = ("topkrouter", "llama4router")
    return {name: module for name, module in found if type(module).__name__.lower().endswith(kinds)}


@contextmanager
def routing_gaps(model: Any) -> Iterator[list[float]]:
    """Yield a list that every forward pass extends by each router's smallest gap."""
    gaps: list[float] = []

    def record(router: Any, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        gaps.append(_smallest_gap(router, output))

    hooks = [router.register_forward_hook(record) for router in routers(model).values()]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


def settle_routers(
    model: Any, prompt: tuple[int, ...], *, min_gap: float, redraw: Callable[[str, int], None]
) -> bool:
    """Redraw each router until none of the prompt's tokens is nearer than `min_gap` to another choice.

    `redraw(name, attempt)` changes that router in place. Routers are settled in layer order, so that earlier
    choices are fixed. False if a layer takes too many attempts.
    """
    settled = True

    def settle(name: str, router: Any, hidden: torch.Tensor) -> None:
        nonlocal settled
        for attempt in range(1, MAX_ATTEMPTS):
            if _smallest_gap(router, router.forward(hidden)) > min_gap:
                return
            redraw(name, attempt)
        settled = False

    hooks = [
        router.register_forward_pre_hook(lambda module, inputs, name=name: settle(name, module, inputs[0]))
        for name, router in routers(model).items()
    ]
    try:
        FedText(model).feed(prompt, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return settled


def _smallest_gap(router: Any, output: tuple[torch.Tensor, ...]) -> float:
    """Smallest gap over all tokens. The router returns logits [T, experts] first, or last (llama4)."""
    logits = output[1] if len(output) == 2 else output[0]
    if not hasattr(router, "e_score_correction_bias"):
        return _gap(logits, router.top_k)
    scores = logits.sigmoid() + router.e_score_correction_bias
    grouped = scores.unflatten(-1, (router.num_group, -1))
    of_groups = grouped.topk(2, dim=-1).values.sum(-1)
    lowest = of_groups.topk(router.topk_group, dim=-1).values[:, -1:]
    allowed = grouped.masked_fill((of_groups < lowest)[..., None], -torch.inf).flatten(1)
    return min(_gap(of_groups, router.topk_group), _gap(allowed, router.top_k))


def _gap(scores: torch.Tensor, num_chosen: int) -> float:
    """scores [T, candidates]; infinite if all are chosen."""
    if scores.shape[-1] == num_chosen:
        return float("inf")
    ranked = scores.sort(dim=-1, descending=True).values
    return float((ranked[:, num_chosen - 1] - ranked[:, num_chosen]).min())
