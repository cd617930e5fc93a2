"""What a front counts of itself and shows at its own /metrics; the names stand in rayk.metrics."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayk.metrics import METRICS, Metric, MetricKind
from rayk.serve.choices import Choices, Piece
from rayk.serve.replies import FATE
from rayk.types.serving import Health

PREFIX = "rayk_front_"
CONTENT_TYPE = CONTENT_TYPE_LATEST
PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/health",
        "/metrics",
        "/engines",
        "/openapi.json",
    }
)
"""Paths that are counted by name: clients must not be able to make new rows."""
LOOKING = ("/metrics", "/health")
"""Paths that only look at a server, and are not counted as running requests."""
GENERATING = ("/v1/completions", "/v1/chat/completions")
STATUSES = ("200", "500", "503", "504")
"""Statuses that alerts look at: they are counted from 0, so that the first has a rate."""
CLIENT_GONE = 499
"""Counted where nobody waits for the answer any more; never sent."""


class FrontMetrics:
    """Counts for one front, in Prometheus' own client, the metrics whose names begin with `PREFIX`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {
            name: _make(metric, self.registry) for name, metric in METRICS.items() if name.startswith(PREFIX)
        }
        for path, status in itertools.product(GENERATING, STATUSES):
            self.add("rayk_front_requests_total", 0.0, path=path, status=status)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        self._of(name, labels).inc(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        self._of(name, labels).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._of(name, labels).observe(value)

    def count_running(self, change: int) -> None:
        """Count requests that came (1) or ended (-1)."""
        self._metrics["rayk_front_running_requests"].inc(change)

    def see(self, health: Health) -> None:
        """Tell of the engines as they are now, and forget those that are gone."""
        self._metrics["rayk_front_engine_ready"].clear()
        for engine in health.engines:
            labels = {"engine": str(engine.get("name")), "role": str(engine.get("role"))}
            self.set("rayk_front_engine_ready", float(engine.get("state") == "ready"), **labels)

    def text(self) -> bytes:
        """Write everything in Prometheus' form."""
        return generate_latest(self.registry)

    async def metered(self, choices: Choices) -> AsyncGenerator[Piece, None]:
        """Pass a call's pieces on and count them."""
        began = time.monotonic()
        has_begun = False
        async with aclosing(choices.pieces()) as pieces:
            try:
                async for piece in pieces:
                    if piece.token_ids and not has_begun:
                        has_begun = True
                        self.observe("rayk_front_ttft_seconds", time.monotonic() - began)
                    yield piece
                self.observe("rayk_front_e2e_seconds", time.monotonic() - began)
            finally:
                usage = choices.usage()
                self.add("rayk_front_prompt_tokens_total", usage["prompt_tokens"])
                self.add("rayk_front_output_tokens_total", usage["completion_tokens"])
                cached = usage["prompt_tokens_details"] or {"cached_tokens": 0}
                self.add("rayk_front_cached_tokens_total", cached["cached_tokens"])

    def _of(self, name: str, labels: dict[str, str]) -> Any:
        metric = self._metrics[name]
        return metric.labels(**labels) if labels else metric


def _make(metric: Metric, registry: CollectorRegistry) -> Any:
    if metric.kind is MetricKind.COUNTER:
        return Counter(metric.name, metric.help, metric.labels, registry=registry)
    if metric.kind is MetricKind.GAUGE:
        return Gauge(metric.name, metric.help, metric.labels, registry=registry)
    return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)


class Counted:
    """Counts requests, whoever answers them (ASGI)."""

    def __init__(self, app: ASGIApp, metrics: FrontMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE
        fate: dict[str, int] = {}

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        is_work = scope["path"] not in LOOKING
        self._metrics.count_running(is_work)
        try:
            await self._app({**scope, FATE: fate}, receive, watched)
        finally:
            self._metrics.count_running(-is_work)
            path = scope["path"] if scope["path"] in PATHS else "other"
            status = fate.get("status", status)
            self._metrics.add("rayk_front_requests_total", path=path, status=str(status))
