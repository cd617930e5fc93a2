"""Ray clusters of tests, of one node or several, with a token of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cluster(*, is_one_node: bool = True, has_metrics: bool = False, **head: Any) -> Iterator[Any]:
    """A ray.cluster_utils.Cluster whose head is there; within the block this process has its token.

    One of one node listens on loopback alone. Without `has_metrics` they are told once an hour: Ray's agent
    keeps the counters of every process that ever was, and takes half a core for those of some dozens.
    """
    from ray.cluster_utils import Cluster

    from rayk.actors.environment import own_cluster
    from rayk.actors.ray_private import ray_environment, starting_own_cluster

    often = {"RAY_metrics_report_interval_ms": "1000" if has_metrics else "3600000"}
    with ray_environment(own_cluster(is_one_node=is_one_node) | often), starting_own_cluster():
        found = Cluster()
        try:
            found.add_node(**{"include_dashboard": False} | head)
            yield found
        finally:
            found.shutdown()
