"""Tries to get into a server as somebody on its machine who has neither its key nor its token.

    python jobs/attack.py [--http serve|uvicorn]     starts `rayk serve` with a key, and attacks it
    python jobs/attack.py --control                  the same attacks on Ray as it starts without a token

Every port of the server's processes is asked for what it gives to strangers; jobs are submitted, drivers
join, pickles are sent, files are read as another user (where root runs this), and requests come without the
key, with hostile heads and bodies. A table says of each attack what it reached, and how it was refused.

Exit status 1 where anything got in, or where that is not known (nobody answered in time, or not with a
refusal); with --control where an attack did not get in, which would prove nothing then.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install


from jobs.attack_files import Try, environment_of, file_attacks, index_attack, shm_attacks
from jobs.serving import serving
from rayk.actors.environment import open_channel
from rayk.cli.guard import run_guarded, stdout
from rayk.cli.listening import LATE, NUM_PROBES, OPEN, Port, PortAnswer, answers, ray_ports
from rayk.cli.plain import print_table
from rayk.lines.protocol import framed
from rayk.oracle.checkpoint import write_checkpoint
from rayk.types.errors import DeadlineExceeded

MODEL = Path("checkpoints/attack/qwen3")
TOKEN = "token"
START_S = 300.0
ANSWER_S = 60.0
"""For whatever is asked, and for what a stranger had run to show."""
JOIN_S = 180.0
"""Ray itself tries for half a minute."""
PICKLE_S = 5.0
CLOSED = 0
"""In place of an HTTP status."""
JOBS = ("/api/job_agent/jobs/", "/api/jobs/")
KEEP = b"\x0a\x08stranger\x12\x01x\x22\x01x"
"""InternalKVPutRequest: a key, a value and a namespace."""
JOIN = "import ray; ray.init({address!r}, logging_level='ERROR'); print('joined', len(ray.nodes()), 'nodes')"


@dataclass(kw_only=True)
class Target:
    process: subprocess.Popen[str]
    folder: Path
    """The attacker's own."""
    ports: Sequence[tuple[Port, PortAnswer]]
    is_loopback: bool

    @property
    def mark(self) -> Path:
        """Whoever runs what a stranger sends leaves this file."""
        return self.folder / "mark"

    def where(self, program: str, word: str = "") -> list[str]:
        """HOST:PORT of a program's ports, of whose answer `word` is a part."""
        found = [p for p, answer in self.ports if p.program.startswith(program) and word in answer.text]
        return [f"{reachable(p.host)}:{p.port}" for p in found]


def reachable(host: str) -> str:
    """Where a port that listens everywhere is called."""
    return {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)


# --- attacks ------------------------------------------------------------------------------------------------


def port_attacks(target: Target) -> Iterator[Try]:
    """Ask each port of each process over HTTP, gRPC and as a line."""
    for port, answer in target.ports:
        where = f"{port.host}:{port.port}"
        got_in = None if answer.status == LATE else answer.status == OPEN
        yield Try(f"be served by {port.program}", where, answer.text, got_in)


def job_attacks(target: Target) -> Iterator[Try]:
    """Submit a job to whatever speaks HTTP: Ray's job agent and dashboard run commands."""
    for port, _ in [found for found in target.ports if "(HTTP" in found[1].text]:
        for path in JOBS:
            body = json.dumps({"entrypoint": f"touch {target.mark}"}).encode()
            place = f"{reachable(port.host)}:{port.port}"
            status, _ = send(place, "POST", path, body, {"Content-Type": "application/json"})
            ran = status == 200 and appears(target.mark)
            got_in = True if ran else False if status in (401, 403) else None
            if status not in (404, 405):
                yield Try(f"submit a job to {port.program}", place + path, http_words(status), got_in)


def join_attacks(target: Target) -> Iterator[Try]:
    """Write to the GCS, and join the cluster as a driver."""
    import grpc

    for where in target.where("gcs_server", "gRPC"):
        with open_channel(where) as channel:
            try:
                channel.unary_unary("/ray.rpc.InternalKVGcsService/InternalKVPut")(KEEP, timeout=ANSWER_S)
            except grpc.RpcError as error:
                is_refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
                told = f"gRPC {error.code().name}"
                yield Try("write to the GCS", where, told, False if is_refused else None)
            else:
                yield Try("write to the GCS", where, "it was written", got_in=True)
        for token in (None, secrets.token_hex(32)):
            yield join(target, where, "without a token" if token is None else "with a wrong token", token)
    if not target.where("Ray's client server"):  # where it is, its port is among the others
        yield Try("join by Ray's client", "no port", "nothing listens for it")


def join(target: Target, address: str, how: str, token: str | None) -> Try:
    """Have a driver of another home join the cluster."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY")} | {
        "HOME": str(target.folder)
    }
    if token is not None:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    if target.is_loopback:
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    command = [sys.executable, "-c", JOIN.format(address=address)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=JOIN_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Try(f"join {how}", address, f"nothing within {JOIN_S:g} s", None)
    told = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return Try(f"join {how}", address, (told or ["?"])[-1][:100], got_in=done.returncode == 0)


def pickle_attacks(target: Target) -> list[Try]:
    """Send pickles that run a command to every port, as they are and as frames of a line."""

    def send_to(port: Port) -> Try:
        where, mark = (reachable(port.host), port.port), target.folder / f"mark-{port.port}"
        bomb, unreached = pickle.dumps(Bomb(str(mark))), ""
        for dress in (bomb, framed(bomb), bytes(32) + bytes(32) + framed(bomb)):
            try:
                connection = socket.create_connection(where, timeout=PICKLE_S)
            except OSError as error:
                unreached = f"not every pickle arrived: {error}"
                continue
            with connection, contextlib.suppress(OSError):  # it may close before it has all
                connection.sendall(dress)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass  # until it has done with them
        ran = mark.exists()
        told = "it ran" if ran else unreached or "nothing ran"
        got_in = True if ran else None if unreached else False
        return Try(f"have {port.program} unpickle", f"{where[0]}:{where[1]}", told, got_in)

    with ThreadPoolExecutor(NUM_PROBES) as pool:
        return list(pool.map(send_to, [port for port, _ in target.ports]))


class Bomb:
    """Leaves the mark where it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def http_attacks(place: str, key: str) -> Iterator[Try]:
    """Requests without the key: what needs it, keys that are nearly right, hostile heads and bodies."""
    prompt = json.dumps({"model": "qwen3", "prompt": [1, 2], "max_tokens": 1}).encode()
    attempts: list[tuple[str, str, bytes, dict[str, str]]] = [
        *(
            ("GET", path, b"", {})
            for path in ("/v1/models", "/metrics", "/engines", "/openapi.json", "/docs")
        ),
        *(("POST", path, prompt, {}) for path in ("/v1/completions", "/v1/chat/completions")),
        ("POST", "/engines/decode0/role", b'{"role": "prefill"}', {}),
        ("GET", "/health/../v1/models", b"", {}),
        ("GET", "//v1/models", b"", {}),
        ("GET", f"/v1/models?api_key={key[:-1]}", b"", {}),
        ("POST", "/v1/completions", b"[" * 100_000, {}),
        ("POST", "/v1/completions", b"", {"Content-Length": "9" * 18}),
        ("POST", "/v1/completions", b"0" * (9 << 20), {}),
        ("GET", "/v1/models", b"", {"X-Padding": "x" * (1 << 20)}),
        *(("GET", "/v1/models", b"", {"Authorization": word}) for word in wrong_keys(key)),
    ]
    for method, path, body, headers in attempts:
        status, _ = send(place, method, path, body, headers)
        about = next((f" with {name}: {value[:40]}" for name, value in headers.items()), "")
        size = f" of {len(body):,} bytes" if body else ""
        what = f"{method} {path}{about}{size}".replace(key[:-1], "KEY")
        is_refused = status == CLOSED or 400 <= (status or 0) < 500
        got_in = False if is_refused else True if 200 <= (status or 0) < 300 else None
        yield Try("ask without the key", what, http_words(status), got_in)
    status, told = send(place, "GET", "/health", b"", {})
    more = None if status != 200 else json.loads(told) != {"status": "ready"}
    yield Try(
        "learn from /health", "still ready, after all this", f"{http_words(status)} {told[:80]!r}", more
    )


def http_words(status: int | None) -> str:
    if status is None:
        return f"nothing within {ANSWER_S:g} s, or nobody is there"
    return "the connection was closed" if status == CLOSED else f"HTTP {status}"


def wrong_keys(key: str) -> tuple[str, ...]:
    return "Bearer", f"Bearer {key[:-1]}", f"Bearer {key}x", f"Basic {key}", key


def send(
    place: str, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int | None, bytes]:
    """The status and body of an answer: CLOSED where the connection ends without one, None where none comes
    in time, or nobody is there."""
    connection = http.client.HTTPConnection(place, timeout=ANSWER_S)
    try:
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (TimeoutError, ConnectionRefusedError):
        return None, b""
    except (OSError, http.client.HTTPException):
        return CLOSED, b""
    finally:
        connection.close()


def appears(mark: Path) -> bool:
    """Whether the mark is left, which is taken away then."""
    until = time.monotonic() + ANSWER_S
    while not mark.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    mark.unlink()
    return True


# --- what is attacked ---------------------------------------------------------------------------------------


@contextmanager
def a_server(front: str, folder: Path, key: str) -> Iterator[tuple[Target, str]]:
    """`rayk serve` with a key, prefilling at TP 2, and its HOST:PORT."""
    write_checkpoint("qwen3", MODEL)
    told = ["--http", front, "--prefill-tp", "2", "--decode-tp", "1"]
    told += ["--ray-token-file", str(folder / TOKEN)]  # which also starts Ray's pages
    told += ["--set", "engine.comm=gloo"]  # the other way of two ranks is attacked by itself
    environment = os.environ | {"RAYK_API_KEY": key, "TMPDIR": str(folder)}
    environment.pop("RAY_ADDRESS", None)  # a cluster of its own
    with serving(MODEL, told, folder / "log", START_S, environment) as server:
        yield aimed_at(server.process, folder), urlsplit(server.url).netloc


@contextmanager
def a_plain_cluster(folder: Path) -> Iterator[Target]:
    """Ray as `ray start --head` starts it where no token is asked for."""
    ports = free_ports(4)
    words = ("--port", "--dashboard-port", "--dashboard-agent-listen-port", "--ray-client-server-port")
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=1"]
    command += [f"{word}={port}" for word, port in zip(words, ports, strict=True)]
    command += [f"--temp-dir={folder / 'ray'}", "--node-ip-address=127.0.0.1"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY")} | {
        "RAY_AUTH_MODE": "disabled"
    }
    with (folder / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=environment)
        try:
            until = time.monotonic() + START_S
            while not all(map(is_open, ports)):
                if process.poll() is not None or time.monotonic() > until:
                    raise DeadlineExceeded("the start of Ray", START_S, {"log": str(folder / "log")})
                time.sleep(0.5)
            yield aimed_at(process, folder)
        finally:
            process.terminate()
            process.wait(ANSWER_S)


def is_open(port: int) -> bool:
    """Whether somebody listens on loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [s.getsockname()[1] for s in sockets]


def aimed_at(process: subprocess.Popen[str], folder: Path) -> Target:
    """The ports of a process and its descendants, asked what they give."""
    found = list(answers(ray_ports(process.pid)))
    is_loopback = all(port.is_loopback for port, _ in found if port.program == "gcs_server")
    return Target(process=process, folder=folder, ports=found, is_loopback=is_loopback)


# --- the whole ----------------------------------------------------------------------------------------------


def attack_server(front: str, folder: Path) -> list[Try]:
    key = secrets.token_hex(16)
    with a_server(front, folder, key) as (target, place):
        of_gcs = next(port.pid for port, _ in target.ports if port.program == "gcs_server")
        token = environment_of(of_gcs)["RAY_AUTH_TOKEN"]
        pids = [of_gcs, *sorted({port.pid for port, _ in target.ports})]
        session = next(folder.glob("rayk-*"))
        return [
            *port_attacks(target),
            *job_attacks(target),
            *join_attacks(target),
            *pickle_attacks(target),
            *shm_attacks(),
            *file_attacks((session, folder / TOKEN), pids, (key, token)),
            *index_attack(folder / "hostile"),
            *http_attacks(place, key),
        ]


def attack_ray(folder: Path) -> list[Try]:
    """What of them Ray itself has to refuse, on a cluster that refuses nobody."""
    with a_plain_cluster(folder) as target:
        tries = [*port_attacks(target), *job_attacks(target), *join_attacks(target)]
    return [t for t in tries if "metrics" not in t.refused and "no HTTP" not in t.refused]


def show(tries: Sequence[Try]) -> None:
    table = Table(title="attacks", title_justify="left")
    for name in ("attack", "reached", "refused", ""):
        table.add_column(name, overflow="fold")
    for t in tries:
        table.add_row(t.attack, t.reached, t.refused, t.in_words())
    print_table(stdout(), table)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--http", choices=("serve", "uvicorn"), default="serve", help="the front")
    parser.add_argument("--control", action="store_true", help="attack a plain Ray cluster without a token")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atk-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # what is in it has to be closed by itself
        tries = attack_ray(folder) if options.control else attack_server(options.http, folder)
    show(tries)
    words, status = verdict(tries, is_control=options.control)
    print(words)
    return status


def verdict(tries: Sequence[Try], *, is_control: bool) -> tuple[str, int]:
    """How many got in of those that were tried, and the exit status."""
    tried = [t for t in tries if t.is_tried]
    num_in, unknown = sum(t.got_in is True for t in tried), sum(t.got_in is None for t in tried)
    words = f"{num_in} of {len(tried)} attacks got in"
    if unknown:
        words += f", of {unknown} it is not known"
    if len(tried) < len(tries):
        words += f", {len(tries) - len(tried)} were not tried"
    return words, int(num_in < len(tried)) if is_control else int(num_in + unknown > 0)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
