"""Keep up to date what every engine has to do, for policies to look at."""

from __future__ import annotations

from collections.abc import Iterable

from rayk.sched.policy import Changes, EngineLoad, EngineSet, Placement, PlacementRequest


class LoadBook:
    """Keeps each engine's load. An event costs the same however many requests there are."""

    def __init__(self) -> None:
        self._tiers: dict[str, str] = {}
        """Engine -> its host tier, of those that have one."""
        self._loads: dict[str, EngineLoad] = {}
        self._changes = Changes()
        # by request id; and whether its prompt is still to be computed
        self._placed: dict[str, tuple[PlacementRequest, Placement, bool]] = {}

    def add(self, name: str, num_ranks: int = 1) -> EngineLoad:
        assert name not in self._loads, f"{name} is there already"
        self._loads[name] = EngineLoad(name=name, num_ranks=num_ranks, tier=self._tiers.get(name, ""))
        return self._loads[name]

    def of(self, names: Iterable[str]) -> EngineSet:
        """Make a set of these engines, whose loads stay up to date."""
        return EngineSet((self._loads[name] for name in names), self._changes)

    def attached(self, name: str, tier: str) -> None:
        self._tiers[name] = tier
        self._tell_tier(name)

    def detached(self, name: str) -> None:
        self._tiers.pop(name, None)
        self._tell_tier(name)

    def tier_lost(self, tier: str) -> None:
        for name in [name for name, other in self._tiers.items() if other == tier]:
            self.detached(name)

    def _tell_tier(self, name: str) -> None:
        if name in self._loads:
            self._loads[name].tier = self._tiers.get(name, "")

    def remove(self, name: str) -> None:
        """Forget an engine; its requests are accounted for as they end."""
        del self._loads[name]

    def placed(self, request: PlacementRequest, placed: Placement) -> None:
        assert request.request_id not in self._placed, f"{request.request_id} is placed twice"
        self._placed[request.request_id] = (request, placed, True)
        self._count(request, placed, 1)

    def prefilled(self, request_id: str) -> None:
        """Note that its prompt was computed. Requests that are over are passed over."""
        if request_id in self._placed:
            request, placed, is_ahead = self._placed[request_id]
            if is_ahead:
                self._count_prompt(request, placed, -1)
                self._placed[request_id] = (request, placed, False)

    def ended(self, request_id: str) -> tuple[PlacementRequest, Placement] | None:
        """End a request, and return where it was; None if it had ended before."""
        if request_id not in self._placed:
            return None
        self.prefilled(request_id)
        request, placed, _ = self._placed.pop(request_id)
        self._count(request, placed, -1, with_prompt=False)
        return request, placed

    def _count(
        self, request: PlacementRequest, placed: Placement, sign: int, *, with_prompt: bool = True
    ) -> None:
        for name in {placed.prefill, placed.decode} - {None}:
            if name in self._loads:
                self._loads[name].num_requests += sign
                self._changes.note(name)
        decoder = placed.decode or placed.prefill
        if decoder in self._loads:
            self._loads[decoder].num_output_tokens += sign * request.max_tokens
        if with_prompt:
            self._count_prompt(request, placed, sign)

    def _count_prompt(self, request: PlacementRequest, placed: Placement, sign: int) -> None:
        computer = placed.prefill or placed.decode
        if computer in self._loads:
            num_new = request.num_prompt_tokens - placed.num_cached_tokens - placed.num_host_tokens
            self._loads[computer].num_prompt_tokens += sign * num_new
            self._changes.note(computer)
