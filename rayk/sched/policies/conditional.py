"""Prompts that are short, or cached for the most part, are computed where they are decoded."""

from __future__ import annotations

from collections.abc import Sequence

from rayk.sched.policies import Asked, EngineLoad, Placed, PolicySettings
from rayk.sched.policies.prefix_aware import PrefixAware, num_cached


class Conditional:
    """The decode engine that PrefixAware would choose computes the prompt itself where that is little work.

    That is: at most `local_prompt_tokens` of it are not held there, and with these at most
    `local_backlog_tokens` are to be computed there: the next tokens of its other requests wait for them.
    Every other prompt goes where PrefixAware says.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._aware = PrefixAware(settings)

    def place(self, asked: Asked, prefill: Sequence[EngineLoad], decode: Sequence[EngineLoad]) -> Placed:
        """One engine or two."""
        if not decode:
            return self._aware.place(asked, prefill, decode)
        index = self._aware.index
        keys = index.keys(asked.prompt_token_ids)
        held = index.num_held_tokens(keys)
        consumer = self._aware.consumer(asked, decode, held)
        num_new = len(asked.prompt_token_ids) - num_cached(asked, held, consumer)
        is_short = num_new <= self._settings.local_prompt_tokens
        if is_short and num_new + consumer.num_prompt_tokens <= self._settings.local_backlog_tokens:
            index.put(keys, [consumer.name])
            cached = num_cached(asked, held, consumer)
            return Placed(prefill=None, decode=consumer.name, num_cached_tokens=cached)
        producer = self._aware.producer(asked, prefill, held, is_alone=False)
        index.put(keys, [producer.name, consumer.name])
        cached = num_cached(asked, held, producer)
        return Placed(prefill=producer.name, decode=consumer.name, num_cached_tokens=cached)

    def ended(self, asked: Asked, placed: Placed) -> None:
        """No matter."""

    def lost(self, engine: str) -> None:
        """Its caches are gone."""
        self._aware.lost(engine)
