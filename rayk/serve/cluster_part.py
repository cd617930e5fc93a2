"""The Ray cluster as the driver looks after it: nothing outlives its GCS."""

from __future__ import annotations

import asyncio

from rayk.serve.supervisor import GaveUp

LOOK_S = 1.0
CONNECT_S = 5.0
NUM_TRIES = 3
"""A GCS that takes no connection so often in a row is gone."""


class ClusterLost(GaveUp):
    """Its GCS is gone: Ray's other processes end soon."""


class ClusterPart:
    """Implements supervisor.Part. It neither starts nor ends the cluster."""

    name = "the Ray cluster"

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT of its GCS."""
        self._address = address

    async def start(self) -> None:
        """It is there."""

    async def lost(self) -> str:
        """Raises ClusterLost once nobody listens there any more."""
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
        """It goes on, or ends with the driver."""
