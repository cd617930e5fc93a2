"""What the hand-over's tests share: probe prompts with known outputs, and agents that misbehave."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayk.oracle.checkpoint import read_marker
from rayk.transfer.agent import Transfer, TransferState
from rayk.transfer.local_agent import LocalAgent, LocalNetwork

NUM_TOKENS = 24


class Model:
    """A checkpoint, its probe prompts (5, 37 and 300 tokens) and their greedy output."""

    def __init__(self, path: Path, reference: Any) -> None:
        self.path = path
        self.prompts: list[list[int]] = [probe["prompt"] for probe in read_marker(path)["probes"]]
        outputs = reference.generate(self.prompts, NUM_TOKENS, ignore_eos=True)
        self.expected = [list(o.token_ids) for o in outputs]


def models_by_name(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    """A model by its checkpoint's name, made when it is first asked for."""

    @functools.cache
    def model(name: str) -> Model:
        path = checkpoint(name)
        return Model(path, reference(path))

    return model


class StubbornAgent(LocalAgent):
    """Reads in flight cannot be cancelled, as with a real transport; `go` lets them end."""

    go = False

    def poll(self, transfer: Transfer) -> Any:
        if not self.go:
            self._in_flight[transfer].polls_left = 1
        return super().poll(transfer)

    def release(self, transfer: Transfer) -> bool:
        read = self._in_flight.get(transfer)
        if read is not None and read.state.name == "PENDING":
            return False
        return super().release(transfer)


def stubborn_agents() -> tuple[Callable[[str], LocalAgent], list[StubbornAgent]]:
    network, made = LocalNetwork(), []

    def make(name: str) -> LocalAgent:
        made.append(StubbornAgent(name, network))
        return made[-1]

    return make, made


class TamperingAgent(LocalAgent):
    """`tamper` runs once, when the first read has landed; or all of them, before digests are computed."""

    tamper: Callable[[], None] | None = None
    waits_for_all = False

    def poll(self, transfer: Transfer) -> TransferState:
        state = super().poll(transfer)
        # Generations are read when all data is there, 8 bytes each.
        is_last = self._in_flight[transfer].prepared.local.lengths.tolist() == [8]
        if state is TransferState.DONE and self.tamper is not None and (is_last or not self.waits_for_all):
            tamper, self.tamper = self.tamper, None
            tamper()
        return state
