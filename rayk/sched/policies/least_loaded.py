"""Send requests where least work is outstanding, on either side."""

from __future__ import annotations

from rayk.sched.policy import EngineSet, Placement, PlacementRequest, PolicySettings
from rayk.sched.work import Chooser


class LeastLoaded:
    """On each side the engine that would be through first with what it has and the request.

    The work is (prompt tokens to compute + output_cost * output tokens to generate) / TP size, the request's
    own included: its prompt's at a prefill engine, its output's at a decode engine.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._output_cost = settings.output_cost
        self._chooser = Chooser(settings.output_cost)

    def place(self, request: PlacementRequest, prefill: EngineSet, decode: EngineSet) -> Placement:
        price = self._output_cost
        prompt, output = request.num_prompt_tokens, price * request.max_tokens
        own = prompt if decode else prompt + output
        producer = self._chooser.least(prefill, own)
        if not decode:
            return Placement(prefill=producer.name, decode=None)
        consumer = self._chooser.least(decode, output)
        return Placement(prefill=producer.name, decode=consumer.name)

    def ended(self, request: PlacementRequest, placed: Placement) -> None: ...

    def lost(self, engine: str) -> None:
        self._chooser.lost(engine)
