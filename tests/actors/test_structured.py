"""JSON answers of a server's engines while these are killed under it: those of one engine alone, and of their
schema. Workers are threads; jobs/serve_stress.py --structured kills processes."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jobs.stress_forms import aggregated, schema_of
from jobs.stress_load import draw_prompts
from rayk.actors.tokenizer import load_decoder
from rayk.actors.worker import RankSpec, Worker
from rayk.specs import serving as serving_module
from rayk.types.request import FinishReason
from rayk.types.structured import StructuredOutputs
from tests.actors import in_threads
from tests.actors.served import Got, complete, settings_for
from tests.markers import thorough

NUM_REQUESTS = 200
AT_ONCE = 24
NUM_LIVES = 3
"""So many lives of each engine end with a kill."""
MAX_TOKENS = 128
NUM_PROMPTS = 24


@dataclass
class Kills(in_threads.Plan):
    """Some rank of every engine's first lives is killed after some steps."""

    draws: random.Random = field(default_factory=lambda: random.Random(5))
    killed: list[tuple[str, int]] = field(default_factory=list)

    def plant(self, worker: Worker, spec: RankSpec) -> None:
        """In a rank that was just formed: the last of each engine, the first of every other life."""
        self.forms.append((spec.engine, spec.epoch, spec.rank))
        life = sum(form[::2] == (spec.engine, spec.rank) for form in self.forms)
        whose = 0 if life % 2 == 0 else spec.config.tp - 1
        if life > NUM_LIVES or spec.rank != whose:
            return
        assert worker._rank is not None
        left, step = self.draws.randint(5, 25), worker._rank.step

        def failing(batch: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                self.killed.append((spec.engine, spec.rank))
                raise in_threads.Killed
            return step(batch)

        worker._rank.step = failing  # type: ignore[method-assign]


@thorough
@pytest.mark.timeout(300)
def test_json_answers_while_ranks_are_killed_are_those_of_one_engine(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen3")
    prompts = draw_prompts(NUM_PROMPTS, (4, 60), 500, seed=1)
    expected, decode = aggregated(path, prompts, MAX_TOKENS), load_decoder(str(path))
    pool = in_threads.make_pool(monkeypatch)
    plan = pool.plan = Kills()
    plan.may_be_noticed.set()
    monkeypatch.setattr(serving_module, "PAUSES_S", (0.0,))

    async def run() -> list[Got]:
        settings = settings_for(path, "p1 p2 d2 d1", hang_s=60.0, num_blocks=256)
        async with in_threads.served(pool, settings, monkeypatch) as (_, router):
            places = asyncio.Semaphore(AT_ONCE)

            async def one(index: int) -> Got:
                number = index % NUM_PROMPTS
                form = StructuredOutputs(json=json.dumps(schema_of(number)), disable_any_whitespace=True)
                async with places:
                    return await complete(
                        router, prompts[number], MAX_TOKENS, f"r{index}", structured_outputs=form
                    )

            return await asyncio.gather(*(one(i) for i in range(NUM_REQUESTS)))

    found = asyncio.run(run())
    assert len(plan.killed) >= 4, plan.killed
    assert len(Counter(engine for engine, _ in plan.killed)) >= 3, "of both roles"
    for index, got in enumerate(found):
        number = index % NUM_PROMPTS
        assert (got.error, got.finish_reason) == (None, FinishReason.STOP)
        assert tuple(got.token_ids) == expected[number]
        jsonschema.validate(json.loads(decode(got.token_ids)), schema_of(number))
