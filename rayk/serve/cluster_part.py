"""The Ray cluster as the driver looks after it: nothing outlives its GCS."""

from __future__ import annotations

import asyncio

from rayk.serve.supervisor import GaveUp

LOOK_S = 1.0
CONNECT_S = 5.0
NUM_TRIES = 3
"""A GCS that refuses so many connections in a row is gone."""


class ClusterLost(GaveUp):
    """The cluster's GCS is gone: Ray's other processes end soon."""


class ClusterPart:
    """Watches the cluster, as a supervisor.Part that neither starts nor ends it."""

    name = "the Ray cluster"

    def __init__(self, address: str) -> None:
        """`address` is the HOST:PORT of its GCS."""
        self._address = address

    async def start(self) -> None:
        """Do nothing: the cluster is there."""

    async def lost(self) -> str:
        """Raise ClusterLost once nobody listens at the GCS any more."""
        num_failed = 0
        while num_failed < NUM_TRIES:
            await asyncio.sleep(LOOK_S)
            try:
                async with asyncio.timeout(CONNECT_S):
                    host, _, port = self._address.rpartition(":")
                    _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                num_failed = 0
            except (OSError, TimeoutError):
                num_failed += 1
        raise ClusterLost(f"the Ray cluster is lost (its GCS at {self._address} is gone); the server ends")

    async def stop(self) -> None:
        """Do nothing: the cluster goes on, or ends with the driver."""
