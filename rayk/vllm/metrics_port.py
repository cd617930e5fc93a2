"""A worker's counts over HTTP, in Prometheus' text format, for engines without /metrics of their own (vLLM's
`LLM`, or --disable-log-stats)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rayk.types.errors import UserError


def serve_metrics(host: str, port: int, text: Callable[[], str]) -> ThreadingHTTPServer:
    """Answer GET /metrics with `text()` from a thread. Raises UserError where the port cannot be had."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            content = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:  # OverflowError: of a port beyond the last
        raise UserError(
            f"no metrics at {host}:{port}: {error}",
            "kv_connector_extra_config",
            "choose another metrics_port (each tensor-parallel rank adds its number to it)",
        ) from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="rayk-metrics", daemon=True).start()
    return server
