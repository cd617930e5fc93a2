"""Engines with a drafter around a host tier: what is stored and loaded has the rows of draft layers, too.

A model that drafts for itself foresees all that it says if these are right; what heads propose is held to a
float64 module that reads the whole text.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.actors.tier_actor import TierHost, plain_identity, tier_identity
from rayk.actors.tiers import HostTiers, _TierActor
from rayk.handover.tier_side import TierFacts
from rayk.oracle.eagle3 import write_eagle3
from rayk.types.config import EngineConfig
from rayk.types.errors import HandshakeMismatch
from rayk.types.offload import OffloadSettings
from rayk.types.speculative import SpeculativeConfig
from tests.drafters import make_drafted, noted
from tests.handover.cases import NUM_TOKENS, Model, models_by_name
from tests.markers import one_per
from tests.models.test_decoder import prompts
from tests.offload.disk import finish
from tests.offload.node import Node, NodeEngine, describe
from tests.pd import make_request


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    return models_by_name(checkpoint, reference)


def of_itself(model: Model, own_tp: int | None = None, **settings: Any) -> dict[str, Any]:
    """Settings of an engine whose model drafts for itself."""
    drafts = SpeculativeConfig(method="draft", model=str(model.path), num_tokens=4, tp=own_tp)
    return {"speculative": drafts, "num_blocks": 96, **settings}


def drafted(engine: NodeEngine) -> tuple[int, int, int, int]:
    """Tokens drafted and accepted, requests that were not drafted for, tokens computed again for drafts."""
    leader = engine.engine.leader
    drafting = leader.scheduler.drafting
    assert drafting is not None
    counts = drafting.counts
    again = leader.manager.num_undrafted_tokens
    return counts.num_draft_tokens, counts.num_accepted_tokens, drafting.num_undrafted, again


def check_foreseen(engine: NodeEngine) -> None:
    """All that was drafted was right, and no request's drafter lacked rows."""
    num_drafted, num_accepted, *lacking = drafted(engine)
    assert num_drafted == num_accepted > 0
    assert lacking == [0, 0]


def complete(engine: NodeEngine, model: Model, name: str) -> list[Any]:
    done = engine.complete([make_request(f"{name}{i}", p, NUM_TOKENS) for i, p in enumerate(model.prompts)])
    assert [d.token_ids for d in done] == model.expected
    return done


@one_per()
@pytest.mark.parametrize(
    ("name", "stored", "loaded"),
    [
        ("llama", {}, {"tp": 2, "layout": "LBNHC", "own": 2}),
        ("llama", {"tp": 2, "own": 2, "block_size": 32}, {"layout": "BLHNC"}),
        ("deepseek_v3", {"tp": 2}, {"block_size": 32}),
        ("gpt_oss", {}, {"tp": 2, "own": 2}),
    ],
)
def test_prompts_are_foreseen_from_where_they_were_loaded(
    models: Callable[[str], Model], name: str, stored: dict[str, Any], loaded: dict[str, Any]
) -> None:
    model = models(name)
    engines = [
        of_itself(model, shape.get("own"), **{k: v for k, v in shape.items() if k != "own"})
        for shape in (stored, loaded)
    ]
    with Node.open(model.path, engines) as node:
        complete(node.engines[0], model, "a")
        node.settle()
        done = complete(node.engines[1], model, "b")
        assert [bool(d.info.get("num_host_tokens")) for d in done] == [len(p) > 32 for p in model.prompts]
        node.settle()
        for engine in node.engines:
            check_foreseen(engine)


def test_pages_on_disk_have_rows_of_drafts(models: Callable[[str], Model], tmp_path: Path) -> None:
    model = models("llama")
    found = []
    for name in "ab":
        with Node.open(model.path, [of_itself(model)], disk_folder=str(tmp_path)) as node:
            done = complete(node.engines[0], model, name)
            found.append([d.info.get("num_disk_tokens", 0) for d in done])
            node.settle()
            node.thread.ask(lambda tier: finish(tier.pages._disk))
            check_foreseen(node.engines[0])
    assert found == [[0, 0, 0], [0, 32, 288]]


def test_engines_without_a_drafter_share_its_tier(models: Callable[[str], Model]) -> None:
    """What one without stored lacks rows of drafts: to one with a drafter it is not there."""
    model = models("llama")
    with Node.open(model.path, [of_itself(model), {"tp": 2}]) as node:
        drafting, plain = node.engines
        complete(plain, model, "a")
        node.settle()
        done = complete(drafting, model, "b")
        assert [d.info.get("num_host_tokens", 0) for d in done] == [0, 0, 0]
        node.settle()
        check_foreseen(drafting)
    with Node.open(model.path, [of_itself(model), {"tp": 2}]) as node:
        drafting, plain = node.engines
        complete(drafting, model, "a")
        node.settle()
        done = complete(plain, model, "b")
        assert [d.info.get("num_host_tokens", 0) for d in done] == [0, 32, 288]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_swapped_requests_are_foreseen_as_if_they_had_stayed(
    models: Callable[[str], Model], name: str
) -> None:
    model, order = models(name), [1, 2, 1, 0, 1]
    requests = [make_request(f"r{i}", model.prompts[n], NUM_TOKENS) for i, n in enumerate(order)]
    settings = of_itself(model, num_blocks=24, max_batch_tokens=64)
    with Node.open(model.path, [settings], load="never") as node:
        (engine,) = node.engines
        done = engine.complete(requests)
        assert engine.offloading.counts["swaps"] > 0
        assert engine.offloading.counts["swaps_failed"] == 0
        node.settle()
        check_foreseen(engine)
    assert [one.token_ids for one in done] == [model.expected[n] for n in order]


@one_per()
@pytest.mark.parametrize(("tp", "own_tp"), [(1, None), (2, 2)])
def test_heads_propose_from_what_was_loaded_as_if_they_had_computed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, own_tp: int | None
) -> None:
    """A row depends on the token after its own: texts that part where a block ends share none of its rows."""
    made = make_drafted(tmp_path, "eagle3", "llama")
    base = [token for text in prompts() for token in text][:49]
    texts = [base, [*base[:32], *(7 + t for t in base[32:])], [*base[:48], base[48] + 1]]
    common = {"block_size": 8, "max_batch_tokens": 20, "num_blocks": 100}
    engines = [{"speculative": made.of_tp(None)}, {"speculative": made.of_tp(own_tp), "tp": tp}]
    tier: dict[str, Any] = {"block_size": 16, "disk_folder": str(tmp_path / "disk")}
    with noted(monkeypatch) as found, Node.open(made.saved.path, engines, common=common, **tier) as node:
        first, second = node.engines
        first.complete([make_request("a", texts[0], 12)])
        node.settle()
        loaded = []
        for i, text in enumerate(texts):
            (done,) = second.complete([make_request(f"b{i}", text, 12)])
            loaded.append(done.info.get("num_host_tokens", 0))
            node.settle()
        for engine in node.engines:
            assert drafted(engine)[2:] == (0, 0)
    # The block before the token in which a text differs is another one.
    assert loaded == [48, 16, 32]
    assert len(found) >= 20
    made.check(found)


def test_who_shares_pages_with_whom(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = checkpoint("llama")
    settings = OffloadSettings(host_bytes=16 << 20)
    heads = [str(write_eagle3(tmp_path / f"head{seed}", path, seed=seed)) for seed in range(2)]
    plain = EngineConfig(model=str(path), num_blocks=64)
    a, other = (replace(plain, speculative=SpeculativeConfig(method="eagle3", model=head)) for head in heads)
    longer = replace(
        plain, tp=2, speculative=SpeculativeConfig(method="eagle3", model=heads[0], num_tokens=5)
    )
    configs = (plain, a, other, longer)
    likes = [describe(config) for config in configs]
    texts = [tier_identity(config, settings, like) for config, like in zip(configs, likes, strict=True)]
    assert texts[1] == texts[3]
    assert len({text.text for text in texts}) == 3
    assert plain_identity(a, settings, likes[1]) == texts[0]
    host = TierHost("t")
    host._identities = (texts[1], texts[0])
    with pytest.raises(HandshakeMismatch, match="drafter eagle3"):
        asyncio.run(host.attach([likes[2]], texts[2], 1.0))

    pairs = zip(configs, likes, strict=True)
    of_plain, of_a, of_other, of_longer = (
        SimpleNamespace(config=c, descriptions=(like,)) for c, like in pairs
    )
    assert tiers_of(settings, of_plain) == [0]
    assert tiers_of(settings, of_a, of_plain, of_longer, of_other, of_plain) == [0, 0, 0, 1, 0]
    assert tiers_of(settings, of_plain, of_a, of_plain) == [0, 1, 1]


def tiers_of(settings: OffloadSettings, *engines: Any) -> list[int]:
    """The number of the tier that each engine of one node gets, one after the other."""
    tiers, numbers = HostTiers("t", settings), itertools.count()

    async def opened(engine: Any, node_id: str) -> _TierActor:
        facts = TierFacts(epoch=0, unit_tokens=16, row_unit_tokens=256)
        plain = tiers._plain_kind_of(engine, node_id)
        return _TierActor(str(next(numbers)), None, facts, 1, node_id, plain=plain)

    async def watched(tier: _TierActor) -> None: ...

    tiers._open, tiers._watch = opened, watched  # type: ignore[method-assign]

    async def found() -> list[int]:
        return [int((await tiers._tier_for(engine, "node")).name) for engine in engines]

    return asyncio.run(found())
