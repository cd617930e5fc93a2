"""Engines whose model drafts for itself: it foresees all that it says if its draft layers have every row
right, and each proposed token is accepted. test_proposals.py holds every kind of drafter to oracles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.engine.build import ThreadEngine
from rayk.engine.proposing import Proposing
from rayk.oracle.mtp import add_mtp
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported, UserError
from rayk.types.speculative import SpeculativeConfig
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.drafters import noted
from tests.engine.test_async_scheduling import Turns
from tests.engine.test_speculative import ask, num_drafted_and_accepted, replace_prompts
from tests.engine.test_token_shards import engine_of
from tests.markers import one_per
from tests.models.tiny import write_checkpoint
from tests.pd import HANG_S, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
}


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


def of_itself(found: Answers, **settings: Any) -> SpeculativeConfig:
    """The model drafts for itself."""
    return SpeculativeConfig(**{"method": "draft", "model": str(found.path), "num_tokens": 4} | settings)


@one_per()
@pytest.mark.parametrize(
    ("model", "shape", "own_tp"),
    [
        ("llama", {}, None),
        ("llama", {"tp": 2}, None),
        ("llama", {"tp": 2}, 2),
        ("llama", {"tp": 4}, 4),
        ("llama", {"block_size": 4, "layout": "BHLNC"}, None),
        ("llama", {"max_batch_tokens": 7}, None),
        ("deepseek_v3", {"tp": 2}, 2),
        ("gpt_oss", {}, None),
        ("gpt_oss", {"tp": 2}, None),
    ],
)
def test_a_model_foresees_what_it_says(
    answers: Callable[[str], Answers], model: str, shape: dict[str, Any], own_tp: int | None
) -> None:
    """All is accepted: after the first token four steps of five tokens, and one of three."""
    found = answers(model)
    settings = {"speculative": of_itself(found, tp=own_tp), "num_blocks": 200, "max_batch_tokens": 400}
    with engine_of(found, **settings | shape) as engine:
        done = ask(engine, found)
        drafted, accepted = num_drafted_and_accepted(engine)
        assert drafted == accepted > 0
        if "max_batch_tokens" not in shape:
            assert all(one.info["drafted_at"] == (5, 5, 4, 4) for one in done)


def test_accepted_drafts_save_steps_where_steps_are_recorded(answers: Callable[[str], Answers]) -> None:
    """The model's decode steps are replayed; its drafter's are not."""
    found = answers("llama")
    turns = Turns(found.path, recorded=True, speculative=of_itself(found), async_scheduling="auto")
    turns.submit(make_request("r", found.prompts[1], NUM_TOKENS))
    turns.finish()
    assert turns.tokens("r") == found.expected[1]
    assert [len(tokens) for tokens in turns.shares("r")] == [37, 5, 5, 5, 5, 3]
    assert turns.rank.graph_sizes


@pytest.mark.parametrize("num_blocks", [24, 30])
def test_preempted_requests_are_foreseen_again(answers: Callable[[str], Answers], num_blocks: int) -> None:
    """Rows of the drafter are computed again with those of the model."""
    found = answers("llama")
    settings = {"num_blocks": num_blocks, "max_batch_tokens": 64}
    with engine_of(found, speculative=of_itself(found), **settings) as engine:
        ask(engine, found, 3)
        assert engine.leader.scheduler.num_preemptions > 0
        drafted, accepted = num_drafted_and_accepted(engine)
        assert drafted == accepted > 0


def test_cached_prefixes_are_foreseen_from(answers: Callable[[str], Answers]) -> None:
    """Blocks bring the rows of draft layers, too."""
    found = answers("llama")
    longer = replace_prompts(found, 16)
    settings = {"num_blocks": 120, "block_size": 4, "prefix_caching": True}
    with engine_of(found, speculative=of_itself(found), **settings) as engine:
        ask(engine, found)
        requests = [
            make_request(f"later{i}", prompt, len(longer.expected[i]))
            for i, prompt in enumerate(longer.prompts)
        ]
        done = engine.generate(requests)
        assert [d.token_ids for d in done] == longer.expected
        assert all(d.info["num_cached_tokens"] > len(p) for d, p in zip(done, found.prompts, strict=True))
        assert engine.leader.manager.num_undrafted_tokens == 0
        drafted, accepted = num_drafted_and_accepted(engine)
        assert drafted == accepted > 0


def test_a_smaller_model_proposes_nothing_beyond_its_positions(
    answers: Callable[[str], Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model goes on alone."""
    found = answers("llama")
    short = tmp_path / "short"
    shutil.copytree(found.path, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 45}))
    drafts = of_itself(found, model=str(short))
    with noted(monkeypatch) as proposed, engine_of(found, speculative=drafts, num_blocks=200) as engine:
        ask(engine, found)
        drafted, accepted = num_drafted_and_accepted(engine)
        assert drafted == accepted > 0
    # The token after the last position is foreseen by it.
    assert max(len(tokens) + len(after) for tokens, after in proposed) == 46


def test_a_drafter_with_wrong_rows_shows(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the tests above would notice."""
    rows = Proposing._rows

    def shifted(self: Proposing, batch: Any, plan: Any) -> Any:
        return rows(self, batch, tuple(share._replace(next_token=5) for share in plan))

    found = answers("llama")
    monkeypatch.setattr(Proposing, "_rows", shifted)
    with engine_of(found, speculative=of_itself(found), num_blocks=200) as engine:
        ask(engine, found)
        drafted, accepted = num_drafted_and_accepted(engine)
        assert accepted < drafted / 2


@pytest.mark.parametrize("shape", [{}, {"tp": 2}], ids=str)
def test_a_drafter_that_draws_as_the_model_does_is_believed(
    answers: Callable[[str], Answers], shape: dict[str, Any]
) -> None:
    """Both have the same distribution: its draws are kept, whichever they are, and are the same again."""
    found = answers("llama")
    settings = {"speculative": of_itself(found, accept="rejection"), "num_blocks": 200}
    said = []
    for _ in range(2):
        with engine_of(found, **settings, **shape) as engine:
            done = engine.generate(
                make_request(f"r{i}", prompt, NUM_TOKENS, temperature=0.9, seed=i)
                for i, prompt in enumerate(found.prompts)
            )
            assert [d.error for d in done] == [None] * len(done)
            drafted, accepted = num_drafted_and_accepted(engine)
            assert drafted == accepted > 0
            said.append([d.token_ids for d in done])
    assert said[0] == said[1]
    assert all(a != b for a, b in zip(said[0], found.expected, strict=True)), "they are drawn"


def test_drafters_that_engines_cannot_follow_are_refused(
    answers: Callable[[str], Answers], tmp_path: Path
) -> None:
    found = answers("llama")
    for shape, word in (({"pp": 2}, "pp: 2"), ({"tp": 4, "dcp": 2}, "dcp: 2")):
        with pytest.raises(UserError, match=word), engine_of(found, speculative=of_itself(found), **shape):
            pass
    with pytest.raises(UserError, match="no multi-token prediction layers"):
        engine_of(found, speculative=SpeculativeConfig(method="mtp")).close()
    with pytest.raises(UserError, match="no such folder"):
        engine_of(found, speculative=of_itself(found, model=str(tmp_path / "none"))).close()
    saved = write_checkpoint(tmp_path / "model", "deepseek_v3", num_nextn_predict_layers=2)
    add_mtp(saved.path, saved.model, 2, seed=4, dtype=torch.float32)
    two = EngineConfig(
        model=str(saved.path), num_blocks=20, speculative=SpeculativeConfig(method="mtp", num_tokens=2)
    )
    with pytest.raises(Unsupported, match="2 MTP layers"):
        ThreadEngine(two, timeout_s=HANG_S).close()
