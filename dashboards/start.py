"""`make dashboards`: Prometheus on loopback over the Ray cluster that runs here, and Grafana where it is
installed, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dashboards.tools import NotAvailableError, need

FOLDER = Path(__file__).resolve().parent
READY_S = 60.0
END_S = 10.0
"""How long a program may take to end when it is asked to."""
RETRY_S = 5.0
LOOPBACK = "127.0.0.1"


class Programs:
    """Programs that end when this one does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start one; what it prints goes to `<name>.log`. A terminal's Ctrl-C does not reach it."""
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        return self._running[name]

    def log(self, name: str) -> Path:
        """What a program printed."""
        return self.folder / f"{name}.log"

    def has_ended(self, name: str) -> bool:
        """Whether one that was started runs no more."""
        return self._running[name].poll() is not None

    def last_words(self, name: str) -> str:
        """The last line that a program printed."""
        lines = self.log(name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def end(self) -> None:
        """Ask all to end; those that do not are killed."""
        for program in self._running.values():
            if program.poll() is None:
                program.terminate()
        for program in self._running.values():
            try:
                program.wait(END_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def settings(targets: Path, fronts: list[str], rules: str | None = None) -> dict[str, Any]:
    """prometheus.yml with the cluster's own list of targets, whole paths, and `fronts` and `rules`, a file of
    alert rules, if any are given."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["rule_files"] = [str(Path(rules or FOLDER / "alerts.yml").resolve())]
    ray, front = config["scrape_configs"]
    ray["file_sd_configs"][0]["files"] = [str(targets)]
    front["file_sd_configs"][0]["files"] = [str(FOLDER / "fronts.yml")]
    if fronts:
        del front["file_sd_configs"]
        front["static_configs"] = [{"targets": fronts}]
    return config


def start_prometheus(
    programs: Programs, port: int, targets: Path, fronts: list[str], rules: str | None = None
) -> str:
    """Its URL, once it is ready. Raises NotAvailableError."""
    prometheus = need("prometheus")
    config = programs.folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings(targets, fronts, rules)))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise NotAvailableError(f"port {port}: {error.strerror}; choose another, --port N") from error
        port = probe.getsockname()[1]
    url = f"http://{LOOPBACK}:{port}"
    process = programs.start(
        "prometheus",
        [
            str(prometheus),
            f"--config.file={config}",
            f"--storage.tsdb.path={programs.folder / 'data'}",
            f"--web.listen-address={LOOPBACK}:{port}",
        ],
    )
    _wait_until_ready(f"{url}/-/ready", process, lambda: programs.last_words("prometheus"))
    return url


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], last_words: Callable[[], str]) -> None:
    waited = threading.Event()
    for _ in range(int(READY_S / 0.2)):
        if process.poll() is not None:
            raise NotAvailableError(f"Prometheus ended at once: {last_words()}")
        try:
            with urllib.request.urlopen(url, timeout=1.0):
                return
        except (urllib.error.URLError, OSError):
            waited.wait(0.2)
    raise NotAvailableError(f"Prometheus is not ready after {READY_S:.0f} s: {last_words()}")


def start_grafana(programs: Programs, prometheus_url: str, port: int) -> None:
    """Start it if it is here, else say how to point one at the dashboards."""
    variables = {"RAYK_PROMETHEUS": prometheus_url, "RAYK_DASHBOARDS": str(FOLDER)}
    provisioning = FOLDER / "provisioning"
    grafana = shutil.which("grafana-server")
    if grafana is None:
        print("Grafana: no grafana-server on PATH. To look at the dashboards with one that you have:")
        given = " ".join(f"{name}={value}" for name, value in variables.items())
        print(f"  {given} GF_PATHS_PROVISIONING={provisioning} grafana-server --homepath /usr/share/grafana")
        return
    home = os.environ.get("GRAFANA_HOME", "/usr/share/grafana")
    programs.start(
        "grafana",
        [grafana, "--homepath", home],
        **variables,
        GF_PATHS_PROVISIONING=str(provisioning),
        GF_PATHS_DATA=str(programs.folder / "grafana"),
        GF_SERVER_HTTP_ADDR=LOOPBACK,
        GF_SERVER_HTTP_PORT=str(port),
        GF_AUTH_ANONYMOUS_ENABLED="true",
    )
    print(f"Grafana: http://{LOOPBACK}:{port}/dashboards (log: {programs.log('grafana')})")


def watch_cluster(programs: Programs, targets: Path, address: str | None, stop: threading.Event) -> None:
    """Keep the list of the cluster's nodes until `stop`; of the next cluster when this one is gone. Raises
    NotAvailableError when Prometheus ends."""
    command = [sys.executable, "-m", "dashboards.nodes", str(targets), *([address] if address else [])]
    said = ""
    while not stop.is_set():
        process = programs.start("nodes", command, PYTHONPATH=str(FOLDER.parent))
        while process.poll() is None and not stop.wait(0.5):
            if programs.has_ended("prometheus"):
                raise NotAvailableError(f"Prometheus ended: {programs.last_words('prometheus')}")
        if not stop.is_set() and (news := programs.last_words("nodes")) != said:
            said = news
            print(f"Ray: {news}; looking again every {RETRY_S:.0f} s", flush=True)
        stop.wait(RETRY_S)


def run(options: argparse.Namespace, stop: threading.Event) -> int:
    """Until `stop`. 1: Prometheus could not be had or ended."""
    with tempfile.TemporaryDirectory(prefix="rayk-dashboards-") as name:
        programs = Programs(Path(name))
        try:
            targets = programs.folder / "nodes.json"
            url = start_prometheus(programs, options.port, targets, options.front, options.rules)
            print(f"Prometheus: {url} (alerts: {url}/alerts, targets: {url}/targets)")
            start_grafana(programs, url, options.grafana_port)
            print("Ctrl-C ends it all, with what was recorded.", flush=True)
            watch_cluster(programs, targets, options.address, stop)
        except NotAvailableError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        finally:
            programs.end()
    return 0


def main(arguments: list[str]) -> int:
    """0 after Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.start", description=__doc__)
    parser.add_argument("--address", help="Ray cluster [default: RAY_ADDRESS, else the one that runs here]")
    parser.add_argument("--port", type=int, default=9090, help="Prometheus'; 0: any free one [9090]")
    parser.add_argument("--grafana-port", type=int, default=3000, help="Grafana's [3000]")
    parser.add_argument(
        "--front",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="where a `rayk serve` listens; repeatable [default: those of dashboards/fronts.yml]",
    )
    parser.add_argument("--rules", metavar="FILE", help="alert rules [default: dashboards/alerts.yml]")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return run(options, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
