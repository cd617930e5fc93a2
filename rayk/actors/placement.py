"""Where workers run: placement groups, resources, and the plain Worker class made remote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayk.actors.environment import prepare_environment

prepare_environment()

import ray  # noqa: E402 - reads its environment once, when imported
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

from rayk.actors.worker import Worker  # noqa: E402

CPU_SHARE = 0.01
"""CPU slots are logical: a worker never waits for a core."""
CONCURRENCY_GROUPS = {"control": 8, "io": 128, "loop": 1}
"""Threads of a worker: commands, one per request that streams, and the engine's loop."""


def worker_resources(device: str, gpus_per_worker: float) -> dict[str, float]:
    """Ray resources of one worker."""
    if device == "cuda":
        return {"CPU": CPU_SHARE, "GPU": gpus_per_worker}
    return {"CPU": CPU_SHARE}


def reserve_group(name: str, bundles: int, resources: Mapping[str, float]) -> PlacementGroup:
    """A placement group of one engine: all its workers on one node."""
    group: PlacementGroup = placement_group([dict(resources)] * bundles, strategy="STRICT_PACK", name=name)
    return group


def free_group(group: PlacementGroup) -> None:
    """Give a group back; its actors end."""
    remove_placement_group(group)


def start_worker(name: str, group: PlacementGroup, index: int, resources: Mapping[str, float]) -> Any:
    """A Worker actor in bundle `index` of `group`, named as the dashboard should show it."""
    return (
        ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(Worker)  # type: ignore[call-overload]
        .options(
            name=name,
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}} if "GPU" not in resources else {},
        )
        .remote(name)
    )


def kill(worker: Any) -> None:
    """End a worker's process at once."""
    ray.kill(worker, no_restart=True)
