"""States in the hand-over of real engines: falcon_h1, whose every layer has attention and a Mamba2 state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.handover.commands import Capture
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.types.errors import KVMismatch
from tests.handover.cases import Model, TamperingAgent
from tests.pd import Pair, make_request

LAYER, NUM_TOKENS = 1, 37
HEAD_SIZE = 20
"""Channels of a Mamba head of the tiny checkpoint."""
FIELDS = {"k", "v", "conv_x", "conv_b", "conv_c", "ssm"}
Views = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def falcon(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("falcon_h1")
    return Model(path, reference(path))


def swap_b_and_c(views: Views, block: int) -> None:
    b, c = views["conv_b"][block], views["conv_c"][block]
    kept = b.clone()
    b.copy_(c)
    c.copy_(kept)


def shift_taps(views: Views, block: int) -> None:
    """A newer input than the last has come in."""
    taps = views["conv_x"][block].unflatten(-1, (HEAD_SIZE, -1))
    taps.copy_(torch.cat((taps[..., 1:], taps[..., :1] + 1), dim=-1))


def forget(views: Views, block: int) -> None:
    views["ssm"][block] = 0


def take_anothers(views: Views, block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("conv_x", "ssm"):
        view = views[name]
        view[block] = torch.randn(view[block].shape, generator=generator)


FAULTS = {
    "b-c": (swap_b_and_c, "conv_b", "conv_b and conv_c swapped"),
    "taps": (shift_taps, "conv_x", "taps shifted by one: tap i of each channel holds tap i+1"),
    "zeros": (forget, "ssm", "block 0 of the sequence never written: token 36 holds only 0x00"),
    "foreign": (
        take_anothers,
        "conv_x",
        "block 0 of the sequence missing: token 36 holds stale or foreign content",
    ),
}


def state_views(extension: Any, layer: int) -> tuple[int, Views]:
    """(group, field -> view) of a layer's state, as its kernels use it."""
    (view,) = (v for v in extension._views if v.layer == layer and v.group.spec.part == "state")
    return view.group.index, {f.name: f.view for f in view.fields}


def test_wrong_states_are_named_and_nothing_is_decoded_from_them(falcon: Model) -> None:
    network, agents = LocalNetwork(), []

    def make_agent(name: str) -> LocalAgent:
        agents.append(TamperingAgent(name, network))
        return agents[-1]

    with Pair.open(falcon.path, tp=(1, 2), layouts=("BHLNC", "LBNHC"), make_agent=make_agent) as pair:
        extension = pair.d.extensions[1]
        (agent,) = (a for a in agents if a.name == extension.transfer.description.agent_name)
        agent.waits_for_all = True
        group, views = state_views(extension, LAYER)
        manager = pair.d.engine.leader.manager
        for name, (fault, field, why) in FAULTS.items():

            def tamper(fault: Any = fault, name: str = name) -> None:
                fault(views, manager.block_tables(name)[group][0])

            agent.tamper = tamper
            request = make_request(name, falcon.prompts[1])
            prefilled = pair.prefill(request)
            done = pair.decode(request, prefilled)
            assert isinstance(done.error, KVMismatch), name
            assert done.token_ids == [], "nothing is decoded from a wrong state"
            ticket: Any = prefilled.payload
            found = pair.diagnose(name, ticket)
            assert {(m.layer, m.group, m.field, m.token) for m in found} == {(LAYER, group, field, 36)}
            assert (done.error.layer, done.error.group, done.error.field) == (LAYER, group, field)
            assert [m.classification for m in found] == [why]
            units = {"conv_b": "group", "conv_c": "group"}
            assert {m.unit_name for m in (done.error, *found)} == {units.get(field, "head")}
            pair.d.handover.settle(name)
        pair.check_all_free()
        assert pair.generate(falcon.prompts[:2]) == falcon.expected[:2]


def test_a_capture_has_the_fields_of_all_of_a_layers_caches(falcon: Model) -> None:
    with Pair.open(falcon.path, tp=(2, 1)) as pair:
        request = make_request("r", falcon.prompts[1])
        prefilled = pair.prefill(request)
        ticket: Any = prefilled.payload
        parts: Any = pair.p.call(Capture("r", ticket.num_tokens, ticket.block_tables))
        captured = [part.rows for part in parts]
        for rows in captured:
            for by_field in rows.values():
                assert {name for name, _ in by_field} == FIELDS
                for (name, _), values in by_field.items():
                    assert len(values) == (NUM_TOKENS if name in ("k", "v") else 1)
        heads = [{unit for name, unit in rows[LAYER] if name == "ssm"} for rows in captured]
        assert heads[0].isdisjoint(heads[1]), "each rank has heads of its own"
        done = pair.decode(request, prefilled)
        assert prefilled.token_ids + done.token_ids == falcon.expected[1]
