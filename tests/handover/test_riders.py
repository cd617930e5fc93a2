"""Hand-overs between whole engines of which both, one or none have a drafter, whose layers stand-ins keep.

A stand-in writes, after each step, rows of every token that the step computed through the tensors that it was
bound to: content that tells layer, field, head and position. No drafter reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.engine import rank as rank_module
from rayk.engine.rank import EngineRank
from rayk.handover.commands import Capture
from rayk.kv.caches import FieldView
from rayk.kv.geometry import GroupGeometry
from rayk.kv.riders import Riders
from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, MlaSpec
from rayk.transfer.wire import field_views
from rayk.types.batch import ScheduledBatch
from rayk.types.errors import KVMismatch
from tests.actors.test_recompute import tampering_agents
from tests.handover.cases import NUM_TOKENS, Model, models_by_name
from tests.pd import Pair, Side, make_request
from tests.transfer.brute import brute_shard

FIRST = 100
DRAFTS: dict[tuple[int, str], KVCacheSpec] = {
    (FIRST, "attention"): FullAttentionSpec(16, 2, 8, 4, "float32", 4),
    (FIRST + 1, "attention"): MlaSpec(16, 6, 2, "float32", 4),
}
WITH, WITHOUT = {"num_blocks": 101}, {"num_blocks": 100}
"""Engines of 101 blocks have the drafter."""
CARRIED = 300
"""Tokens of the longest prompt."""


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    return models_by_name(checkpoint, reference)


class StandIn:
    """A draft layer that keeps a cache and computes nothing."""

    def __init__(self, layer: int, group: GroupGeometry, draft_tp: int, rank: int) -> None:
        self.layer, self.group = layer, group
        fields = group.group.spec.fields()
        self.units = {
            f.name: tuple(brute_shard(f.units, draft_tp, rank % draft_tp, f.readers)) for f in fields
        }
        self.view: Any = None

    def bind_kv_cache(self, view: Any) -> None:
        self.view = view

    def unbind_kv_cache(self) -> None:
        self.view = None

    def field_views(self) -> tuple[FieldView, ...]:
        return tuple(field_views(self.group.group, self.view, self.units))

    def write(self, blocks: list[int], slots: list[int], positions: list[int]) -> None:
        for field in self.field_views():
            rows = [content(self.layer, field.name, unit, positions) for unit in field.units]
            field.view[blocks, :, slots] = torch.stack(rows, dim=1)


def content(layer: int, field: str, unit: int, positions: list[int]) -> torch.Tensor:
    """Rows [positions, elements] that no other layer, field or head has."""
    size = {"k": 8, "v": 4, "latent": 6, "rope": 2}[field]
    first = (layer - FIRST) * 10_000 + ord(field[0]) * 100 + unit * 10_000_000
    rows = torch.tensor(positions, dtype=torch.float32)[:, None] + first
    return rows + torch.arange(size, dtype=torch.float32) / 16


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Gives engines of 101 blocks a drafter, on as many ranks as the test says."""
    settings = {"draft_tp": 1}
    plan, load, step = rank_module.plan_engine, EngineRank._load, EngineRank.step

    def plan_engine(config: Any, *args: Any, **more: Any) -> Any:
        if config.num_blocks == WITH["num_blocks"]:
            draft_tp = min(settings["draft_tp"], config.tp)
            more |= {"riders": Riders(DRAFTS, drafter="stand-in"), "draft_tp": draft_tp}
        return plan(config, *args, **more)

    def loading(self: EngineRank, *args: Any, **more: Any) -> Any:
        decoder, memory = load(self, *args, **more)
        geometry = self.caches.geometry
        decoder.cache_owners |= {
            key: StandIn(key[0], group, geometry.shape.draft_tp, geometry.rank)
            for group in geometry.groups
            if group.group.rides is not None
            for key in group.keys
        }
        return decoder, memory

    def stepping(self: EngineRank, batch: ScheduledBatch) -> torch.Tensor:
        logits = step(self, batch)
        for stand_in in [o for o in self.decoder.cache_owners.values() if isinstance(o, StandIn)]:
            index, size = stand_in.group.group.index, stand_in.group.kernel_block_size
            table = self._inputs._tables[index]
            for r in batch.requests:
                first = r.num_computed_tokens
                positions = list(range(first, first + len(r.token_ids)))
                blocks = [int(table[r.row, p // size]) for p in positions]
                assert all(blocks), "a null block"
                stand_in.write(blocks, [p % size for p in positions], positions)
            if self.on_layer is not None:
                self.on_layer(stand_in.layer)
        return logits

    monkeypatch.setattr(rank_module, "plan_engine", plan_engine)
    monkeypatch.setattr(EngineRank, "_load", loading)
    monkeypatch.setattr(EngineRank, "step", stepping)
    return settings


def expect_rows(side: Side, tables: Any, num_tokens: int, first: int = 0) -> None:
    """Every rank holds what the stand-ins wrote of these tokens, wherever they were written."""
    parts = side.call(Capture("", num_tokens, tables))
    assert parts
    for part in parts:
        for layer in (FIRST, FIRST + 1):
            for (field, unit), rows in part.rows[layer].items():  # type: ignore[attr-defined]
                wanted = content(layer, field, unit, list(range(first, num_tokens)))
                found = torch.from_numpy(rows.copy()).view(torch.float32)[first:]
                assert torch.equal(found, wanted), (layer, field, unit)


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("name", "tp", "draft_tp", "layouts"),
    [
        ("qwen3", (1, 1), 1, ("auto", "auto")),
        ("qwen3", (2, 1), 2, ("LBNHC", "BLHNC")),
        ("gemma3", (1, 2), 1, ("auto", "auto")),
        ("falcon_h1", (2, 2), 2, ("auto", "auto")),
    ],
)
def test_drafts_come_over(
    models: Callable[[str], Model],
    drafting: dict[str, int],
    name: str,
    tp: tuple[int, int],
    draft_tp: int,
    layouts: tuple[str, str],
    push: bool,
) -> None:
    """Tokens are the model's, and D holds the drafts' rows of the prompt; nothing is left out."""
    model, drafting["draft_tp"] = models(name), draft_tp
    with Pair.open(model.path, tp=tp, layouts=layouts, push=push, changes=(WITH, WITH)) as pair:
        assert len(pair.p.engine.leader.manager.all_groups) == len(pair.p.engine.leader.manager.groups) + 2
        seen: list[Any] = []
        start = pair.d.engine.leader.start

        def starting(request: Any, *args: Any, **more: Any) -> None:
            tables = pair.d.engine.leader.manager.group_tables(request.request_id)
            seen.append(tables)
            start(request, *args, **more)

        pair.d.engine.leader.start = starting  # type: ignore[method-assign]
        (done,) = pair.complete([make_request("r", model.prompts[2], NUM_TOKENS)])
        assert done.token_ids == model.expected[2]
        rows = done.info["transfers"]
        assert {row.left_out for row in rows} == {""}
        num_own = len(pair.d.engine.leader.manager.groups)
        assert {row.group for row in rows} >= {num_own, num_own + 1}
        expect_rows(pair.d, seen[0], CARRIED)
        assert pair.d.engine.leader.manager.first_draft_row("r") == 0
        pair.check_all_free()


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("drafted", [(True, False), (False, True)], ids=["p", "d"])
@pytest.mark.parametrize("tp", [(1, 1), (2, 1)], ids=str)
def test_what_one_engine_lacks_is_left_out_and_said(
    models: Callable[[str], Model],
    drafting: dict[str, int],
    drafted: tuple[bool, bool],
    tp: tuple[int, int],
    push: bool,
) -> None:
    model, sides = models("qwen3"), tuple(WITH if d else WITHOUT for d in drafted)
    lacks = "consumer" if drafted[0] else "producer"
    with Pair.open(model.path, tp=tp, push=push, prefix_caching=True, changes=sides) as pair:
        manager = pair.d.engine.leader.manager
        lacked: list[int] = []
        lack = manager.lack_drafts

        def lacking(request_id: str, num_tokens: int) -> None:
            lack(request_id, num_tokens)
            lacked.append(manager.first_draft_row(request_id))

        manager.lack_drafts = lacking  # type: ignore[method-assign]
        for number in range(2):
            (done,) = pair.complete([make_request(f"r{number}", model.prompts[2], NUM_TOKENS)])
            assert done.token_ids == model.expected[2]
            wanted = "; ".join(f"draft layer {i}: the {lacks} has none" for i in (0, 1))
            assert {row.left_out for row in done.info["transfers"]} == {wanted}
        assert lacked == ([CARRIED] * 2 if drafted[1] else [])
        if drafted[1]:
            # Of its own accord D computes the prompt, drafts and all: what came over lacks these.
            before = manager.num_undrafted_tokens
            assert manager.match("look", model.prompts[2], 299) == 0
            assert manager.num_undrafted_tokens - before > 200
        pair.check_all_free()


def test_a_wrong_byte_of_a_draft_layer_is_a_mismatch_that_names_it(
    models: Callable[[str], Model], drafting: dict[str, int]
) -> None:
    model = models("qwen3")
    make_agent, agents = tampering_agents()
    with Pair.open(model.path, make_agent=make_agent, changes=(WITH, WITH)) as pair:
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        prefilled = pair.prefill(request)
        transfer = pair.d.extensions[0].transfer
        agent = next(a for a in agents if a.name == transfer.description.agent_name)

        def damage() -> None:
            view = next(v for v in transfer._views if v.layer == FIRST + 1)
            incoming = pair.d.handover.receiving._reading["r"]
            blocks, slots, _ = view.places(incoming.block_tables[view.group.index], CARRIED)
            view.fields[0].view.view(torch.uint8)[blocks[77], 0, slots[77], 0] ^= 1

        agent.waits_for_all, agent.tamper = True, damage
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch)
        assert (done.error.layer, done.error.draft_layer) == (FIRST + 1, 1)
        assert "draft layer 1" in str(done.error)
        found = pair.explain("r", prefilled.payload)
        assert (found.draft_layer, found.field, found.token) == (1, "latent", 77)
        pair.d.handover.settle("r")
        pair.p.handover.settle("r")
        pair.check_all_free()


def test_a_cached_prefix_of_drafts_is_held_and_not_moved_again(
    models: Callable[[str], Model], drafting: dict[str, int]
) -> None:
    model = models("qwen3")
    with Pair.open(model.path, prefix_caching=True, changes=(WITH, WITH)) as pair:
        found = []
        for number in range(2):
            (done,) = pair.complete([make_request(f"r{number}", model.prompts[2], NUM_TOKENS)])
            assert done.token_ids == model.expected[2]
            rows = done.info["transfers"]
            found.append((sum(r.bytes for r in rows), sum(r.held_bytes for r in rows)))
        assert found[0][1] == 0
        assert found[1][0] + found[1][1] == found[0][0]
        assert found[1][1] > 0
        assert pair.d.engine.leader.manager.num_undrafted_tokens == 0
        pair.check_all_free()
