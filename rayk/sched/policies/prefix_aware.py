"""Requests go where most of their prompt is cached, as far as load allows."""

from __future__ import annotations

from collections.abc import Sequence

from rayk.sched.policies import Asked, EngineLoad, Placed, PolicySettings
from rayk.sched.prefix_index import PrefixIndex
from rayk.sched.work import Chooser, work


class PrefixAware:
    """On each side the engine that would be through first, given what it is likely to hold.

    prefill: (work + prompt tokens it does not hold) / TP size
    decode: (work + move_cost * prompt tokens it does not hold + output_cost * max_tokens) / TP size

    where work = prompt tokens to compute + output_cost * output tokens to generate. So a cached prefix is
    worth a queue that is longer by as many tokens as it spares, and no longer one. An engine is taken to hold
    what it was given from that moment on: requests that share a prefix and come together stay together.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self.index = PrefixIndex(settings.block_tokens, settings.index_blocks)
        self._settings = settings
        self._chooser = Chooser()

    def place(self, asked: Asked, prefill: Sequence[EngineLoad], decode: Sequence[EngineLoad]) -> Placed:
        """The cheapest of each side."""
        held = self.look_up(asked)
        producer = self.producer(asked, prefill, held, is_alone=not decode)
        consumer = self.consumer(asked, decode, held) if decode else None
        names = [e.name for e in (producer, consumer) if e is not None]
        self.index.put(asked.prefix_keys, names)
        return Placed(
            prefill=producer.name,
            decode=None if consumer is None else consumer.name,
            num_cached_tokens=held.get(producer.name, 0),
        )

    def look_up(self, asked: Asked) -> dict[str, int]:
        """Engine -> prompt tokens that it need not compute. The last one it always does, for its logits."""
        held = self.index.num_held_tokens(asked.prefix_keys)
        most = asked.num_prompt_tokens - 1
        return {name: min(num, most) for name, num in held.items()}

    def producer(
        self, asked: Asked, prefill: Sequence[EngineLoad], held: dict[str, int], *, is_alone: bool
    ) -> EngineLoad:
        """Who computes the prompt, and (`is_alone`) decodes, too."""
        price = self._settings.output_cost
        own = asked.num_prompt_tokens + (price * asked.max_tokens if is_alone else 0.0)
        return self._chooser.least(prefill, work(prefill, price, own, held))

    def consumer(self, asked: Asked, decode: Sequence[EngineLoad], held: dict[str, int]) -> EngineLoad:
        """Who decodes."""
        price, move = self._settings.output_cost, self._settings.move_cost
        own = price * asked.max_tokens + move * asked.num_prompt_tokens
        spared = {name: move * num for name, num in held.items()}
        return self._chooser.least(decode, work(decode, price, own, spared))

    def ended(self, asked: Asked, placed: Placed) -> None:
        """No matter: its prefixes were noted when it was placed."""

    def lost(self, engine: str) -> None:
        """Its caches are gone."""
        self.index.forget(engine)
        self._chooser.lost(engine)
