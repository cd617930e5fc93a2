"""Planning nodes against brute force over every assignment."""

from __future__ import annotations

import itertools
import random

import pytest

from rayk.actors.nodes import (
    FETCH_S,
    FORM_S,
    WORKER_S,
    EngineDemand,
    Node,
    matches,
    plan_nodes,
    start_limit_s,
)
from rayk.types.errors import DeviceError
from tests.each import each
from tests.markers import thorough


def node(index: int, gpus: float, free: float | None = None, **labels: str) -> Node:
    return Node(
        node_id=f"{index:08d}",
        address=f"10.0.0.{index}",
        resources={"GPU": gpus, "CPU": 8.0},
        free={"GPU": gpus if free is None else free, "CPU": 8.0},
        labels=labels,
    )


def demand(name: str, tp: int, share: float = 1.0, home: int | None = None, **labels: str) -> EngineDemand:
    return EngineDemand(
        name=name,
        num_workers=tp,
        resources={"CPU": 0.01, "GPU": share},
        labels=labels,
        home=None if home is None else f"{home:08d}",
    )


def holds(demands: list[EngineDemand], where: tuple[Node, ...], placement: str) -> bool:
    """By the words of the definition."""
    used: dict[str, float] = {}
    sides: dict[str, set[str]] = {}
    for a, n in zip(demands, where, strict=True):
        used[n.node_id] = used.get(n.node_id, 0.0) + a.num_workers * a.resources["GPU"]
        sides.setdefault(n.node_id, set()).add(a.name[:-1])
        if any(n.labels.get(k) != v for k, v in a.labels.items()):
            return False
    if any(amount > n.resources["GPU"] for n in where for i, amount in used.items() if i == n.node_id):
        return False
    if placement == "pack":
        return len(used) <= 1
    return placement == "auto" or all(len(s) == 1 for s in sides.values())


@each("seed", range(60))
def test_plans_hold_and_are_found_whenever_one_exists(seed):
    draw = random.Random(seed)
    nodes = [node(i, draw.choice([0, 1, 2, 4]), rack=draw.choice("ab")) for i in range(draw.randint(1, 4))]
    demands = [
        demand(f"{side}{i}", draw.choice([1, 1, 2, 4]), **({"rack": "a"} if draw.random() < 0.2 else {}))
        for side in ("prefill", "decode")
        for i in range(draw.randint(1, 2))
    ]
    for placement in ("auto", "pack", "spread"):
        every = itertools.product(nodes, repeat=len(demands))
        possible = any(holds(demands, where, placement) for where in every)
        try:
            found = plan_nodes(demands, nodes, placement)
        except DeviceError:
            assert not possible, placement
        else:
            assert holds(demands, tuple(found[a.name] for a in demands), placement)


def test_engines_stay_where_their_workers_are():
    nodes = [node(0, 4), node(1, 4, free=2), node(2, 4)]
    demands = [demand("prefill0", 2, home=1), demand("decode0", 2)]
    for placement, decode in (("pack", 1), ("auto", 1)):
        found = plan_nodes(demands, nodes, placement)
        assert found["prefill0"] is nodes[1]
        assert found["decode0"] is nodes[decode]
    spread = plan_nodes(demands, nodes, "spread")
    assert spread["prefill0"] is nodes[1]
    assert spread["decode0"] is not nodes[1]


def test_what_others_hold_is_not_free_but_ones_own_home_is():
    nodes = [node(0, 4, free=1), node(1, 4, free=3)]
    assert plan_nodes([demand("prefill0", 2)], nodes, "auto", free=True)["prefill0"] is nodes[1]
    # Three of the four GPUs of node 0 are its own.
    stays = plan_nodes([demand("prefill0", 3, home=0)], nodes, "auto", free=True)
    assert stays["prefill0"] is nodes[0]
    with pytest.raises(DeviceError, match="no node|at once"):
        plan_nodes([demand("prefill0", 4)], nodes, "auto", free=True)


def test_refusals_name_engines_nodes_and_what_is_wanted():
    two = [node(0, 2), node(1, 2)]
    with pytest.raises(
        DeviceError, match=r"no node can hold engine decode0 \(4 workers of .* 1 GPU\)"
    ) as told:
        plan_nodes([demand("prefill0", 1), demand("decode0", 4)], two, "auto")
    assert "10.0.0.0 (00000000) with 2 GPU" in str(told.value)
    assert told.value.where == "decode.tp"
    with pytest.raises(DeviceError, match="spread wants prefill and decode engines on different nodes"):
        plan_nodes([demand("prefill0", 1), demand("decode0", 1)], two[:1], "spread")
    with pytest.raises(DeviceError, match="pack wants one node for all of 2 engines"):
        plan_nodes([demand("prefill0", 2), demand("decode0", 1)], two, "pack")
    with pytest.raises(DeviceError, match="the nodes cannot hold 3 engines"):
        plan_nodes([demand("prefill0", 2), demand("decode0", 2), demand("decode1", 1)], two, "auto")
    with pytest.raises(DeviceError, match="live nodes are none"):
        plan_nodes([demand("prefill0", 1)], [], "auto")
    with pytest.raises(DeviceError, match="rack=a") as told:
        plan_nodes([demand("prefill0", 1, rack="a")], two, "auto")
    assert told.value.where == "prefill.node_labels"


@thorough
@pytest.mark.timeout(120)
def test_many_engines_on_many_nodes_are_planned_at_once():
    """A search through all ways to place them would not end."""
    nodes = [node(i, 8) for i in range(32)]
    demands = [demand(f"prefill{i}", 4) for i in range(32)] + [demand(f"decode{i}", 8) for i in range(16)]
    found = plan_nodes(demands, nodes, "spread")
    assert len(set(map(id, found.values()))) == 32
    with pytest.raises(DeviceError):
        plan_nodes([*demands, demand("decode16", 1)], nodes, "spread")


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ("a", {"rack": "a"}, True),
        ("a", {"rack": "b"}, False),
        ("a", {}, False),
        ("!a", {"rack": "b"}, True),
        ("!a", {"rack": "a"}, False),
        ("!a", {}, True),
        ("in(a, b)", {"rack": "b"}, True),
        ("in(a,b)", {"rack": "c"}, False),
        ("!in(a,b)", {"rack": "c"}, True),
        ("!in(a,b)", {"rack": "a"}, False),
    ],
)
def test_labels_are_read_as_ray_reads_them(selector, labels, expected):
    assert matches({"rack": selector}, labels) is expected


def test_many_workers_may_take_longer_to_start() -> None:
    few, many = [demand("prefill0", 8)], [demand(f"decode{i}", 2) for i in range(12)]
    assert start_limit_s(None, few) == start_limit_s("a folder") == FORM_S
    assert start_limit_s(None, many) == FORM_S + 16 * WORKER_S
    assert start_limit_s("org/model", many) == FORM_S + 16 * WORKER_S + FETCH_S
