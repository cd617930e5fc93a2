"""Ray clusters of tests, of one node or several, with a token of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def cluster(*, is_one_node: bool = True, **head: Any) -> Iterator[Any]:
    """A ray.cluster_utils.Cluster whose head is there; within the block this process has its token.

    One of one node listens on loopback alone.
    """
    from ray.cluster_utils import Cluster

    from rayk.actors.environment import own_cluster
    from rayk.actors.ray_private import ray_environment, starting_own_cluster

    with ray_environment(own_cluster(is_one_node=is_one_node)), starting_own_cluster():
        found = Cluster()
        try:
            found.add_node(**{"include_dashboard": False} | head)
            yield found
        finally:
            found.shutdown()
