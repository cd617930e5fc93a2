"""Send requests where most of their prompt is cached, as far as load allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayk.sched.policy import EngineLoad, EngineSet, Placement, PlacementRequest, PolicySettings
from rayk.sched.prefix_index import HeldPrefix, PrefixIndex, num_held
from rayk.sched.work import Chooser, Spared


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that somebody has. The last one is always computed, for its logits."""

    here: Sequence[HeldPrefix]  # in engines' own caches
    tiers: Mapping[str, int]  # in host tiers, by name

    def num_host_tokens(self, engine: EngineLoad) -> int:
        return max(0, self.tiers.get(engine.tier, 0) - num_held(self.here, engine.name))


class PrefixAware:
    """On each side the engine that would be through first, given what it is likely to hold.

    prefill: (work + prompt tokens it does not hold) / TP size
    decode: (work + move_cost * prompt tokens it does not hold + output_cost * max_tokens) / TP size

    where work = prompt tokens to compute + output_cost * output tokens to generate. So a cached prefix is
    worth a queue that is longer by as many tokens as it spares, and no longer one. An engine is taken to hold
    what it was given from that moment on: requests that share a prefix and come together stay together.

    Of the tokens that a prefill engine does not hold, those that its host tier has (all that any engine of
    that tier was given lately, as far as there is room for it) count host_cost each.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self.index = PrefixIndex(settings.block_tokens, settings.index_blocks)
        self._tiers: dict[str, PrefixIndex] = {}  # what each host tier holds
        self._settings = settings
        self._chooser = Chooser(settings.output_cost)

    def place(self, request: PlacementRequest, prefill: EngineSet, decode: EngineSet) -> Placement:
        cached = self.look_up(request)
        producer = self.producer(request, prefill, cached, is_alone=not decode)
        consumer = self.consumer(request, decode, cached) if decode else None
        return self.placed(request, producer, consumer, cached)

    def placed(
        self,
        request: PlacementRequest,
        producer: EngineLoad | None,
        consumer: EngineLoad | None,
        cached: CachedTokens,
    ) -> Placement:
        engines = [e for e in (producer, consumer) if e is not None]
        self.index.put(request.prefix_keys, [e.name for e in engines])
        for tier in {e.tier for e in engines if e.tier}:
            self._tier(tier).put(request.prefix_keys, [tier])
        return Placement(
            prefill=None if producer is None else producer.name,
            decode=None if consumer is None else consumer.name,
            num_cached_tokens=num_held(cached.here, engines[0].name),
            num_host_tokens=cached.num_host_tokens(engines[0]),
        )

    def _tier(self, name: str) -> PrefixIndex:
        if name not in self._tiers:
            self._tiers[name] = PrefixIndex(self._settings.block_tokens, self._settings.host_blocks)
        return self._tiers[name]

    def look_up(self, request: PlacementRequest) -> CachedTokens:
        """Find what need not be computed of a prompt, and where."""
        most, keys = request.num_prompt_tokens - 1, request.prefix_keys
        here = self.index.look_up(keys, most)
        if self._settings.host_cost >= 1:
            return CachedTokens(here, {})
        found = {name: num_held(tier.look_up(keys, most), name) for name, tier in self._tiers.items()}
        return CachedTokens(here, {name: num for name, num in found.items() if num})

    def spared(self, cached: CachedTokens, engine: EngineLoad) -> float:
        """Count the prompt tokens computed that an engine is spared."""
        in_tier = (1 - self._settings.host_cost) * cached.num_host_tokens(engine)
        return num_held(cached.here, engine.name) + in_tier

    def producer(
        self,
        request: PlacementRequest,
        prefill: EngineSet,
        cached: CachedTokens,
        *,
        is_alone: bool,
    ) -> EngineLoad:
        price = self._settings.output_cost
        own = request.num_prompt_tokens + (price * request.max_tokens if is_alone else 0.0)
        return self._chooser.least(prefill, own, self._spared(prefill, cached))

    def _spared(self, prefill: EngineSet, cached: CachedTokens) -> Spared:
        here = self.index.among(prefill, cached.here)
        if not cached.tiers:
            return here
        hold = {name for _, names in here for name in names}
        spared = defaultdict[float, set[str]](set)
        for engine in prefill:
            if engine.tier in cached.tiers or engine.name in hold:
                spared[self.spared(cached, engine)].add(engine.name)
        return list(spared.items())

    def consumer(self, request: PlacementRequest, decode: EngineSet, cached: CachedTokens) -> EngineLoad:
        price, move = self._settings.output_cost, self._settings.move_cost
        own = price * request.max_tokens + move * request.num_prompt_tokens
        spared = [(move * num, names) for num, names in self.index.among(decode, cached.here)]
        return self._chooser.least(decode, own, spared)

    def ended(self, request: PlacementRequest, placed: Placement) -> None: ...

    def lost(self, engine: str) -> None:
        """Forget the caches of an engine, or of the tier of that name."""
        self._tiers.pop(engine, None)
        self.index.forget(engine)
        self._chooser.lost(engine)
