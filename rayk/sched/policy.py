"""Define a placement policy, what it knows and what it can be told. A policy sees engines as `EngineLoad`s,
which the coordinator keeps up to date, and is told what became of the requests it placed. A decision's cost
depends on the number of engines and of the prompt's blocks, not of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PrefixKeys = tuple[int, ...]  # of a prompt's first block, first two and so on: equal for equal prefixes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRequest:
    """What a policy knows of a request. Made by `RequestDescriber`."""

    request_id: str
    num_prompt_tokens: int
    prefix_keys: PrefixKeys = ()  # empty where the policy heeds none
    max_tokens: int = 0
    session: str | None = None


@dataclass(kw_only=True, slots=True)
class EngineLoad:
    """One engine as policies see it. Filled by whoever places requests."""

    name: str
    tp: int = 1
    num_requests: int = 0  # placed here and not over
    num_prompt_tokens: int = 0  # to be computed here still, without tokens that it holds already
    num_output_tokens: int = 0  # that requests decoding here, or about to, may still generate
    tier: str = ""  # the host tier that it shares with others of its node; empty: it has none just now


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Names the engines of a request."""

    prefill: str | None  # None: the decode engine computes the prompt itself
    decode: str | None  # None: there are no decode engines; the prefill engine does it all
    num_cached_tokens: int = 0  # of the prompt, that the engine which computes it is expected to hold already
    num_host_tokens: int = 0  # of those behind them, that it is expected to load from a host tier


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """Settings of policies; `policies.POLICIES` says which of them each heeds."""

    output_cost: float = 1.0  # what an output token costs an engine, in prompt tokens computed
    move_cost: float = 0.1  # of moving a prompt token's KV to a decode engine, in prompt tokens computed
    block_tokens: int = 64  # prompts are known by their prefixes of so many tokens, and multiples of it
    # prefixes remembered, the least recently used are forgotten; 0: engines have no prefix caches
    index_blocks: int = 65536
    host_cost: float = 0.1  # of loading a prompt token's KV from a host tier; from 1 on none is worth it
    host_blocks: int = 0
    """Prefixes taken to be in the host tier that the engines share. 0: there is none; in a spec: as many as
    have room."""
    # a decode engine computes a prompt itself that has at most so many tokens it does not hold
    local_prompt_tokens: int = 64
    local_backlog_tokens: int = 512  # and only while so many, with these, are to be computed there


class Policy(Protocol):
    """Chooses engines. All calls come from one thread."""

    def place(
        self, request: PlacementRequest, prefill: Sequence[EngineLoad], decode: Sequence[EngineLoad]
    ) -> Placement:
        """Choose among engines that take requests now. `prefill` is never empty; without `decode` its engines
        do both."""

    def ended(self, request: PlacementRequest, placed: Placement) -> None:
        """Note that a placed request is over: its KV may be in these engines' prefix caches."""

    def lost(self, engine: str) -> None:
        """Forget the caches of an engine or a host tier that died."""
