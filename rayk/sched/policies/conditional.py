"""Compute short or mostly cached prompts where they are decoded."""

from __future__ import annotations

from rayk.sched.policies.prefix_aware import CachedTokens, PrefixAware
from rayk.sched.policy import EngineLoad, EngineSet, Placement, PlacementRequest, PolicySettings


class Conditional:
    """The decode engine that PrefixAware would choose computes the prompt itself where that is little work.

    That is: at most `local_prompt_tokens` of it are not held there, and with these at most
    `local_backlog_tokens` are to be computed there: the next tokens of its other requests wait for them. A
    token that the host tier has counts host_cost.
    Every other prompt goes where PrefixAware says.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._aware = PrefixAware(settings)

    def place(self, request: PlacementRequest, prefill: EngineSet, decode: EngineSet) -> Placement:
        if not decode:
            return self._aware.place(request, prefill, decode)
        cached = self._aware.look_up(request)
        consumer = self._aware.consumer(request, decode, cached)
        is_little = self._is_little(request, consumer, cached)
        producer = None if is_little else self._aware.producer(request, prefill, cached, is_alone=False)
        return self._aware.placed(request, producer, consumer, cached)

    def _is_little(self, request: PlacementRequest, consumer: EngineLoad, cached: CachedTokens) -> bool:
        num_new = request.num_prompt_tokens - self._aware.spared(cached, consumer)
        is_short = num_new <= self._settings.local_prompt_tokens
        return is_short and num_new + consumer.num_prompt_tokens <= self._settings.local_backlog_tokens

    def ended(self, request: PlacementRequest, placed: Placement) -> None: ...

    def lost(self, engine: str) -> None:
        self._aware.lost(engine)
