"""A plain proxy before two vLLM servers: `python jobs/vllm_proxy.py --prefill URL --decode URL --port N`.

Each request goes to P for one token, then to D with the kv_transfer_params that P answered, unchanged. What D
streams (`"stream": true`) is passed on as it comes. The standard library is all it needs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 600.0
PIECE_BYTES = 1 << 16
ONE_TOKEN = {"max_tokens": 1, "min_tokens": 0, "n": 1, "stream": False}
FOR_D = ("stream_options", "max_completion_tokens")
"""What P, which answers one token, does not take."""


def post(url: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """Send a request and return its answer, still to be read. Raises urllib.error.HTTPError for a status of
    400 or more."""
    content = json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})  # noqa: S310
    answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310
    return answer


def complete(prefill: str, decode: str, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """Have P compute the prompt and D the rest; returns D's answer, still to be read."""
    first = {key: value for key, value in body.items() if key not in FOR_D}
    with post(
        prefill + path, {**first, **ONE_TOKEN, "kv_transfer_params": {"do_remote_decode": True}}
    ) as told:
        params = json.load(told).get("kv_transfer_params")
    return post(decode + path, {**body, "kv_transfer_params": params})


class Handler(BaseHTTPRequestHandler):
    """Passes completions on to these two."""

    prefill, decode = "", ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            answer = complete(self.prefill, self.decode, self.path, body)
        except urllib.error.HTTPError as error:
            self._fail(error.code, error.read().decode(errors="replace"))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._fail(502, str(error))
        else:
            with answer:
                self._pass_on(answer)

    def _pass_on(self, answer: http.client.HTTPResponse) -> None:
        """Pass an answer on piece by piece: the end of the connection ends it, and what is cut is cut."""
        self.send_response(answer.status)
        for name in ("Content-Type", "Content-Length"):
            if answer.headers[name] is not None:
                self.send_header(name, answer.headers[name])
        self.end_headers()
        while piece := answer.read1(PIECE_BYTES):
            self.wfile.write(piece)

    def _fail(self, status: int, why: str) -> None:
        content = json.dumps({"error": why}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def make_handler(prefill: str, decode: str) -> type[Handler]:
    """Make a handler that passes completions on to these two."""
    return type("ProxyHandler", (Handler,), {"prefill": prefill, "decode": decode})


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], join_s: float | None = None) -> Iterator[str]:
    """Serve in a thread at a free port of loopback; yields the address. Its end may take `join_s`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(join_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", required=True, help="http://HOST:PORT of P")
    parser.add_argument("--decode", required=True, help="http://HOST:PORT of D")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    handler = make_handler(options.prefill.rstrip("/"), options.decode.rstrip("/"))
    with ThreadingHTTPServer(("127.0.0.1", options.port), handler) as server:
        print(f"P {options.prefill}, D {options.decode}: http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
