"""A plain proxy before two vLLM servers: `python jobs/vllm_proxy.py --prefill URL --decode URL --port N`.

Each request goes to P for one token, then to D with the kv_transfer_params that P answered, unchanged. The
standard library is all it needs.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 600.0


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer. Raises urllib.error.HTTPError for any other status than 200."""
    content = json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
        return dict(json.load(answer))


def complete(prefill: str, decode: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One completion: prefill on P, the rest on D."""
    first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    params = post(prefill + path, first).get("kv_transfer_params")
    return post(decode + path, {**body, "kv_transfer_params": params})


def make_handler(prefill: str, decode: str) -> type[BaseHTTPRequestHandler]:
    """A handler that passes completions on to these two."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self._answer(200, complete(prefill, decode, self.path, body))
            except urllib.error.HTTPError as error:
                self._answer(error.code, {"error": error.read().decode(errors="replace")})
            except OSError as error:
                self._answer(502, {"error": str(error)})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


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
