"""Where workers run: nodes, placement groups, and the plain WorkerActor class made remote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rayk.actors.nodes import Node
from rayk.actors.ray_private import free_resources
from rayk.actors.worker_actor import WorkerActor

NODE_ID_LABEL = "ray.io/node-id"
"""A label Ray gives every node."""
THREADS = "OMP_NUM_THREADS"
LOOPBACK = "127.0.0.1"
CONCURRENCY_GROUPS = {"control": 8, "io": 128, "loop": 1}
"""Threads of a worker: commands, one per request that streams, and the engine's loop."""


VLLM_CALLS = 4096
"""Calls that an engine of vLLM answers at once, far more than there are."""


def live_nodes() -> list[Node]:
    """List the nodes that Ray believes to be alive. A killed node is missed only after its health check."""
    free = free_resources()
    return [
        Node(
            node_id=n["NodeID"],
            address=n["NodeManagerAddress"],
            resources=n["Resources"],
            free=free.get(n["NodeID"], {}),
            labels=n["Labels"],
        )
        for n in ray.nodes()  # type: ignore[no-untyped-call]
        if n["Alive"]
    ]


def this_node() -> str:
    """Return the id of this process's node: the driver's, for the driver and its coordinator."""
    return str(ray.get_runtime_context().get_node_id())


def line_host(node_id: str) -> str:
    """Return the address at which a node's processes serve lines: loopback in a cluster of one node."""
    addresses = {n.node_id: n.address for n in live_nodes()}
    return LOOPBACK if len(addresses) <= 1 else addresses.get(node_id, LOOPBACK)


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Return the strategy of an actor that must live on its creator's node."""
    return NodeAffinitySchedulingStrategy(this_node(), soft=False)


def reserve_group(
    name: str, bundles: int, resources: Mapping[str, float], labels: Mapping[str, str]
) -> PlacementGroup:
    """Reserve a placement group for one engine: all its workers on one node with these labels."""
    group: PlacementGroup = placement_group(
        [dict(resources)] * bundles,
        strategy="STRICT_PACK",
        name=name,
        bundle_label_selector=[dict(labels)] * bundles if labels else None,
    )
    return group


def node_of(group: PlacementGroup) -> str | None:
    """Return the id of a group's node; None while it has none."""
    table = cast("dict[str, Any]", placement_group_table(group))
    ids = set(table["bundles_to_node_id"].values()) if table["state"] == "CREATED" else set()
    return str(ids.pop()) if ids else None


def free_group(group: PlacementGroup) -> None:
    """Give a group back; its actors end."""
    remove_placement_group(group)


def start_worker(name: str, group: PlacementGroup, index: int, resources: Mapping[str, float]) -> Any:
    """Start a Worker actor in bundle `index` of `group`, named as the dashboard should show it."""
    remote: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor)  # type: ignore[call-overload]
    return _start(remote, name, group, index, resources)


def start_vllm_engine(name: str, group: PlacementGroup, index: int, resources: Mapping[str, float]) -> Any:
    """Create a VllmEngine actor in bundle `index` of `group`."""
    from rayk.actors.vllm_engine import VllmEngine

    # Each concurrency group of an actor has an event loop of its own: this one has none.
    remote: Any = ray.remote(max_concurrency=VLLM_CALLS)(VllmEngine)  # type: ignore[call-overload]
    return _start(remote, name, group, index, resources)


def _start(remote: Any, name: str, group: PlacementGroup, index: int, resources: Mapping[str, float]) -> Any:
    options = {
        "name": name,
        "num_cpus": resources["CPU"],
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        "max_restarts": 0,
        "max_task_retries": 0,
        "enable_task_events": False,
        "runtime_env": {"env_vars": {THREADS: "1"}} if _must_be_told(resources) else {},
    }
    return remote.options(**options).remote(name)


def _must_be_told(resources: Mapping[str, float]) -> bool:
    """Tell whether a process without a GPU may get more than one thread of OpenMP. Ray gives one to whoever
    has less than two CPUs, such as the coordinator that asks here, where the node's environment says nothing.
    It costs time to tell: an agent makes the environment, and no process that Ray started ahead will do."""
    nodes: list[Any] = ray.nodes()  # type: ignore[no-untyped-call]
    has_one_here = len(nodes) == 1 and os.environ.get(THREADS, "1") == "1"
    return "GPU" not in resources and not (has_one_here and resources["CPU"] < 2)


def kill(worker: Any) -> None:
    """End a worker's process at once."""
    ray.kill(worker, no_restart=True)
