"""Clusters joined or started, GPU shares, the coordinator of a run and the fleet of a server."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.job_config import JobConfig

from rayk.actors.coordinator_actor import CoordinatorActor
from rayk.actors.environment import TOKEN, is_protected, own_cluster, wanted_address
from rayk.actors.nodes import (
    Node,
    cell_demands,
    engine_demand,
    largest_demands,
    placement_of,
    plan_nodes,
)
from rayk.actors.placement import LOOPBACK, live_nodes, on_this_node, this_node
from rayk.actors.ray_private import joining, ray_environment, starting_own_cluster, without_paragraphs
from rayk.actors.sessions import session_folder
from rayk.actors.token_file import TokenFile
from rayk.specs import Cell
from rayk.specs.server_plan import ServerPlan
from rayk.specs.serving import ServerSettings
from rayk.types.errors import DeadlineExceeded, DeviceError
from rayk.types.signals import kept_sigterm

NAMESPACE = "rayk"
OBJECT_STORE_BYTES = 160 << 20
"""Results and captured rows only; KV never enters the object store."""
FLEET_CALLS = 4096
"""Calls that a fleet takes over Ray at once, far more than there are: requests come over its line."""
NAME_S, NAME_POLL_S = 30.0, 0.2
"""How long the name of a lost actor may take to be free."""


@dataclass(frozen=True)
class Joined:
    """The cluster that this process is in."""

    address: str
    is_own: bool
    """Whether the cluster ends with this process."""
    is_protected: bool | None
    """Whether it asked for a token when it was looked at before joining; None: that is not known."""
    pages: str = ""
    """HOST:PORT of Ray's pages; empty: it has none."""

    def in_words(self) -> str:
        """Say whether the cluster asks for a token."""
        if self.is_protected is None:
            return f"it is not known whether the Ray cluster at {self.address} asks for a token"
        if not self.is_protected:
            return (
                f"the Ray cluster at {self.address} asks for no token: whoever reaches its ports can run "
                "commands as its user (started with RAY_AUTH_MODE=token, it asks)"
            )
        pages = f", its pages at http://{self.pages} too" if self.pages else ""
        return f"the Ray cluster at {self.address} asks for a token{pages}"


@contextmanager
def connect(
    address: str | None,
    *,
    num_gpus: int | None = None,
    about: Mapping[str, str] | None = None,
    token_file: TokenFile | None = None,
) -> Iterator[Joined]:
    """Join the cluster at `address` or $RAY_ADDRESS, else start a local one that ends with the block.

    `about` becomes metadata of the driver's job in Ray. `token_file`: where a local one's owner finds its
    token; then it has Ray's pages, too. Raises DeviceError when there is none at that address, or none
    starts.
    """
    address = wanted_address(address)
    settings: dict[str, Any] = {
        "namespace": NAMESPACE,
        "configure_logging": True,
        "logging_level": logging.WARNING,
        "log_to_driver": False,
        "job_config": JobConfig(metadata=dict(about or {})),
    }
    protected: bool | None = True
    with ExitStack() as stack:
        if address is None:
            settings |= {
                "address": "local",
                "num_cpus": max(4, os.cpu_count() or 1),
                "include_dashboard": token_file is not None,
                "dashboard_host": LOOPBACK,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": stack.enter_context(session_folder()),
            }
            if num_gpus is not None:
                settings["num_gpus"] = num_gpus
            stack.enter_context(ray_environment(own_cluster()))
            stack.enter_context(starting_own_cluster(is_shared=token_file is not None))
        else:
            settings["address"], protected = stack.enter_context(joining(address))
        if not sys.stderr.isatty():
            stack.enter_context(without_paragraphs())
        stack.callback(ray.shutdown)
        try:
            with kept_sigterm():
                context: Any = ray.init(**settings)
        except Exception as error:  # noqa: BLE001 - Ray raises bare ones, of all that it waited for in vain
            raise _no_cluster(address, error) from error
        if token_file is not None:
            stack.callback(token_file.remove)
            token_file.write(os.environ[TOKEN])
        pages = "" if token_file is None else str(context["webui_url"])
        gcs = str(context["gcs_address"])
        yield Joined(gcs, is_own=address is None, is_protected=protected, pages=pages)


def joined_before() -> Joined:
    """Describe the cluster that this process had joined already."""
    address: str = ray.get_runtime_context().gcs_address
    try:
        protected = is_protected(address)
    except DeviceError:  # it may be out of reach from here (ray://), or slow
        protected = None
    return Joined(address, is_own=False, is_protected=protected)


def _no_cluster(address: str | None, error: Exception) -> DeviceError:
    """Explain in one line why Ray cannot be used."""
    why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    if address is None:
        return DeviceError(
            f"Ray does not start here: {why}",
            mend="try again when the machine is less busy; `rayk doctor` says what it can do",
        )
    return DeviceError(
        f"no Ray cluster answers at {address!r}: {why}",
        where="--address",
        mend="start one with `ray start --head`, or leave the address out",
    )


def num_cluster_gpus() -> float:
    """Count the GPUs of the whole cluster, in use or not."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("GPU", 0.0)


def cluster_device() -> str:
    """Return what `device: auto` means on the cluster, whose devices count, not the driver's."""
    return "cuda" if num_cluster_gpus() >= 1 else "cpu"


def describe_nodes() -> list[dict[str, Any]]:
    """Describe the cluster's live nodes for environment.json."""
    shown = ("CPU", "GPU")
    return [
        {
            "node": str(node),
            "is_driver": node.node_id == this_node(),
            "resources": {name: node.resources[name] for name in shown if name in node.resources},
            "labels": dict(node.labels),
        }
        for node in live_nodes()
    ]


def gpu_share(num_workers: int, asked: float | Literal["auto"], available: float) -> float:
    """Return the GPUs of each of `num_workers` workers that run at once.

    `auto` is a whole GPU, or 1/k where k workers must share one. Raises DeviceError when there are too few.
    """
    if asked == "auto":
        workers_per_gpu = math.ceil(num_workers / available) if available >= 1 else 1
        asked = _share_of(workers_per_gpu)
    needed = num_workers * asked
    if needed > available:
        raise DeviceError(
            f"{num_workers} workers of {asked:g} GPU need {needed:g} GPUs; the cluster has {available:g}",
            where="gpus_per_worker",
            mend="gpus_per_worker: auto lets workers share GPUs; or lower TP sizes, or add nodes",
        )
    return asked


def fit_cells(cells: Sequence[Cell]) -> tuple[list[Cell], bool]:
    """Decide every worker's share of a GPU; returns the cells with it, and whether the cluster holds the
    largest engine of every name at once.

    Raises DeviceError when some cell's engines cannot be placed on the cluster's nodes.
    """
    nodes, here = live_nodes(), this_node()
    available = sum(node.resources.get("GPU", 0.0) for node in nodes)
    on_gpus = [cell for cell in cells if cell.prefill.device == "cuda"]
    # One share for all cells: workers stay where they are from cell to cell.
    largest = max((cell.num_workers for cell in on_gpus), default=0)
    shares = {
        cell.cell_id: gpu_share(
            largest if cell.gpus_per_worker == "auto" else cell.num_workers, cell.gpus_per_worker, available
        )
        for cell in on_gpus
    }
    automatic = [cell for cell in on_gpus if cell.gpus_per_worker == "auto"]
    if automatic:
        share = _placeable_share(automatic, shares[automatic[0].cell_id], nodes, here)
        shares |= {cell.cell_id: share for cell in automatic}
    decided = [replace(cell, gpus_per_worker=shares.get(cell.cell_id, 0.0)) for cell in cells]
    for cell in decided:
        plan_nodes(cell_demands(cell, here), nodes, placement_of(cell))
    try:
        plan_nodes(largest_demands(decided, here), nodes, "auto")
    except DeviceError:
        return decided, False
    return decided, True


def _placeable_share(cells: Sequence[Cell], share: float, nodes: Sequence[Node], here: str) -> float:
    """Return the largest share, one k-th of a GPU and at most `share`, at which each cell finds its nodes."""
    first = round(1 / share)
    for workers_per_gpu in range(first, first + max(cell.num_workers for cell in cells)):
        smaller = _share_of(workers_per_gpu)
        try:
            for cell in cells:
                plan_nodes(cell_demands(cell, here, smaller), nodes, placement_of(cell))
        except DeviceError:
            continue
        return smaller
    return share


def _share_of(workers_per_gpu: int) -> float:
    return math.floor(1e4 / workers_per_gpu) / 1e4  # Ray counts resources in steps of 1e-4


def start_coordinator(name: str, **arguments: Any) -> Any:
    """Start the Coordinator actor of one run on the driver's node: losing any other node spares it."""
    return (
        ray.remote(CoordinatorActor)
        .options(
            name=name,
            num_cpus=0,
            max_concurrency=1000,
            max_restarts=0,
            scheduling_strategy=on_this_node(),
        )
        .remote(name, **arguments)
    )


def fit_server(plan: ServerPlan) -> ServerSettings:
    """Decide what is left to the cluster: the server's device, and its workers' share of a GPU.

    Raises SpecError where an engine cannot run on that device, DeviceError when the nodes cannot hold the
    engines.
    """
    settings = plan.on_device(cluster_device())
    nodes, share = live_nodes(), settings.gpus_per_worker
    if settings.device == "cuda":
        available = sum(node.resources.get("GPU", 0.0) for node in nodes)
        share = gpu_share(settings.num_workers, share, available)
    else:
        share = 0.0
    decided = replace(settings, gpus_per_worker=share)
    plan_nodes([engine_demand(e, decided) for e in decided.engines], nodes, decided.placement)
    return decided


def start_fleet(name: str, settings: ServerSettings) -> Any:
    """Start a server's Fleet actor on the driver's node; call its `start` next. Raises DeadlineExceeded when
    an earlier one keeps the name."""
    from rayk.actors.fleet import Fleet  # with torch, which a run's driver needs later

    until = time.monotonic() + NAME_S
    while True:
        try:
            return (
                ray.remote(Fleet)
                .options(
                    name=name,
                    num_cpus=0,
                    max_concurrency=FLEET_CALLS,
                    max_restarts=0,
                    enable_task_events=False,
                    scheduling_strategy=on_this_node(),
                )
                .remote(name, settings)
            )
        except ValueError as error:  # Ray frees a name only some time after its owner's death
            if time.monotonic() > until:
                raise DeadlineExceeded(f"the name {name}", NAME_S) from error
        time.sleep(NAME_POLL_S)
