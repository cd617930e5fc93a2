"""What drafters on ranks propose, token by token: an oracle's that reads the whole text at once in float64.
Random ones, of which nearly nothing is accepted: what is said is what the model says without them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.engine.build import ThreadEngine
from rayk.engine.graphs import DecodeGraphs
from rayk.types.batch import ScheduledBatch
from rayk.types.config import EngineConfig
from tests.drafters import APPLIES, Drafted, make_drafted, noted
from tests.engine.test_speculative import num_drafted_and_accepted
from tests.markers import one_per, sweep
from tests.models.test_decoder import prompts
from tests.pd import HANG_S, NAN_POISON, make_request

NUM_TOKENS = 12
SHARED = 120
"""Tokens of a prefix: whole blocks of each model."""


def engine_of(made: Drafted, *, drafts: bool = True, **shape: Any) -> ThreadEngine:
    settings = {"num_blocks": 100, "block_size": 8, "max_batch_tokens": 30} | shape
    speculative = made.speculative if drafts else None
    config = EngineConfig(model=str(made.saved.path), speculative=speculative, **settings)
    return ThreadEngine(config, poison=NAN_POISON, timeout_s=HANG_S)


def run(engine: ThreadEngine, texts: Sequence[Sequence[int]], name: str = "r") -> list[list[int]]:
    """What the engine says after texts that run together."""
    done = engine.generate(make_request(f"{name}{i}", text, NUM_TOKENS) for i, text in enumerate(texts))
    assert [one.error for one in done] == [None] * len(texts)
    engine.leader.check_integrity()
    return [one.token_ids for one in done]


@sweep(12)
@one_per("method")
@pytest.mark.parametrize(
    ("shape", "own_tp"), [({}, None), ({"tp": 2}, None), ({"tp": 2, "layout": "BHLNC"}, 2)], ids=str
)
@pytest.mark.parametrize(("method", "family"), APPLIES)
def test_they_are_an_oracles(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    family: str,
    shape: dict[str, Any],
    own_tp: int | None,
) -> None:
    """Prompts are computed in chunks, beside requests that decode."""
    made, texts = make_drafted(tmp_path, method, family, tp=own_tp), prompts()[:2]
    expected = [made.says(text, NUM_TOKENS) for text in texts]
    with engine_of(made, drafts=False, **shape) as engine:
        assert run(engine, texts) == expected
    with noted(monkeypatch) as found, engine_of(made, **shape) as engine:
        assert run(engine, texts) == expected
        assert num_drafted_and_accepted(engine)[0] > 0
    assert len(found) >= NUM_TOKENS
    made.check(found)


def test_they_are_an_oracles_of_hidden_states_of_recorded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any number of rows, and of one recording after another."""
    made, texts = make_drafted(tmp_path, "eagle3", "llama"), prompts()[:2]
    replay, replayed = DecodeGraphs.replay, list[int]()

    def counting(self: DecodeGraphs, batch: ScheduledBatch, prepare: Any) -> torch.Tensor:
        replayed.append(batch.num_tokens)
        return replay(self, batch, prepare)

    monkeypatch.setattr(DecodeGraphs, "replay", counting)
    with noted(monkeypatch) as found, engine_of(made) as engine:
        assert run(engine, texts) == [made.says(text, NUM_TOKENS) for text in texts]
    made.check(found)
    with_drafts = [n for n in replayed if n > len(texts)]
    assert 1 < len(set(with_drafts)) < len(with_drafts), "several recordings, and one again after others"


@sweep(12)
@pytest.mark.parametrize(("method", "family"), APPLIES)
@one_per()
def test_they_are_the_same_after_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, family: str
) -> None:
    made, texts = make_drafted(tmp_path, method, family), [prompts()[2][:30], *prompts()[1:]] * 4
    with engine_of(made, drafts=False, num_blocks=200) as engine:
        expected = run(engine, texts)
    for num_blocks in (28, 24, 20, 16, 12):  # groups of windows need more, states fewer
        with noted(monkeypatch) as found, engine_of(made, num_blocks=num_blocks) as engine:
            assert run(engine, texts) == expected
            if engine.leader.scheduler.num_preemptions > 0:
                break
    else:
        pytest.fail("nobody was preempted in any pool")
    assert len(found) > len(texts)
    made.check(found)


@sweep(7)
@one_per()
@pytest.mark.parametrize(("method", "family"), [pair for pair in APPLIES if pair[0] != "draft"])
def test_they_are_the_same_after_a_cached_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, family: str
) -> None:
    """A row depends on the token after its own: of a prefix that others go on from otherwise, the last block
    is not theirs."""
    made, text = make_drafted(tmp_path, method, family), (prompts()[1] * 6)[:130]
    other = (text[SHARED] + 1) % 263
    texts = [text, [*text[:SHARED], other, *text[SHARED + 1 :]], [*text[: SHARED + 1], other]]
    with (
        noted(monkeypatch) as found,
        engine_of(made, prefix_caching=True, state_block_size=8) as engine,
    ):
        for number, one in enumerate(texts):
            assert run(engine, [one], f"r{number}-") == [made.says(one, NUM_TOKENS)]
        assert engine.leader.manager.prefixes is not None
        unit = engine.leader.manager.prefixes.unit_tokens
        assert engine.leader.scheduler.num_found_tokens == (SHARED - 1) // unit * unit + SHARED
    assert len(found) > len(texts)
    made.check(found)
