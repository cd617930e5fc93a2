"""What NIXL measured of each request's reads. vLLM's NixlConnector only keeps sums over all requests. So this
module replaces the one call with which it measures, and keeps the reads of each request apart."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MAX_REQUESTS = 4096


class TransferLog:
    """The reads of the last requests of one worker."""

    def __init__(self, nixl_worker: Any) -> None:
        self._worker = nixl_worker
        self._reads: OrderedDict[str, list[dict[str, int]]] = OrderedDict()
        self._measure = nixl_worker.nixl_wrapper.get_xfer_telemetry
        nixl_worker.nixl_wrapper.get_xfer_telemetry = self._noted

    def pop(self, request_id: str) -> list[dict[str, int]]:
        """Return a request's reads. NIXL does not say which P rank each was of: they are numbered as they
        ended."""
        reads = self._reads.pop(request_id, [])
        return [{"producer_rank": number, "group": 0, **read} for number, read in enumerate(reads)]

    def clear(self) -> None:
        """Forget all."""
        self._reads.clear()

    def _noted(self, handle: int) -> Any:
        """Stands for `get_xfer_telemetry`, which vLLM calls once for each read that is done."""
        measured = self._measure(handle)
        for request_id, handles in self._worker._recving_transfers.items():
            if handle in handles and measured is not None:
                read = {
                    "bytes": int(measured.totalBytes),
                    "descriptors": int(measured.descCount),
                    "post_ns": int(measured.postDuration * 1000),
                    "transfer_ns": int(measured.xferDuration * 1000),
                }
                self._reads.setdefault(request_id, []).append(read)
                while len(self._reads) > MAX_REQUESTS:
                    self._reads.popitem(last=False)
        return measured
