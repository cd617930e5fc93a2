"""`make dashboards`: what it starts and with which settings, what it says, and that it ends cleanly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from dashboards import tools
from dashboards.build import FOLDER
from dashboards.nodes import write_targets
from dashboards.start import Programs, settings, start_grafana, start_prometheus

ROOT = FOLDER.parent
FAKE_PROMETHEUS = """#!{python}
import http.server, sys
from pathlib import Path
option = lambda name: next(a.split("=", 1)[1] for a in sys.argv if a.startswith(f"--{{name}}="))
Path({seen!r}).write_text(Path(option("config.file")).read_text())
host, _, port = option("web.listen-address").rpartition(":")
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/-/ready" else 404)
        self.end_headers()
http.server.HTTPServer((host, int(port)), Ready).serve_forever()
"""
FAKE_GRAFANA = """#!{python}
import json, os, sys, time
from pathlib import Path
Path({seen!r}).write_text(json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}))
time.sleep(600)
"""


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a program on PATH; returns the file that it writes what it saw to. What this machine has of them is
    not there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("cp", "mkdir"):
        (programs / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(tools, "FOLDER", tmp_path / "unpacked")

    def write(name: str, source: str) -> Path:
        seen = tmp_path / f"{name}.seen"
        (programs / name).write_text(source.format(python=sys.executable, seen=str(seen)))
        (programs / name).chmod(0o755)
        return seen

    return write


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    (tmp_path / "run").mkdir()
    made = Programs(tmp_path / "run")
    yield made
    made.end()


Plant = Callable[[str, str], Path]


def test_settings_name_files_wholly_and_take_fronts(tmp_path: Path) -> None:
    targets = tmp_path / "nodes.json"
    config = settings(targets, [])
    assert [Path(name).is_file() and Path(name).is_absolute() for name in config["rule_files"]] == [True]
    ray, front = config["scrape_configs"]
    assert ray["file_sd_configs"][0]["files"] == [str(targets)]
    assert Path(front["file_sd_configs"][0]["files"][0]).is_file()
    _, front = settings(targets, ["127.0.0.1:81"])["scrape_configs"]
    assert front == {"job_name": "rayk-front", "static_configs": [{"targets": ["127.0.0.1:81"]}]}


def test_prometheus_takes_these_settings(tmp_path: Path) -> None:
    try:
        promtool = tools.need("promtool")
    except tools.NotAvailableError as error:
        pytest.skip(str(error))
    (tmp_path / "nodes.json").write_text("[]")
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings(tmp_path / "nodes.json", ["127.0.0.1:81"])))
    done = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_it_starts_all_and_ends_by_one_interrupt(tmp_path: Path, plant: Plant) -> None:
    config, grafana = plant("prometheus", FAKE_PROMETHEUS), plant("grafana-server", FAKE_GRAFANA)
    command = [sys.executable, "-m", "dashboards.start", "--port", "0", "--address", "127.0.0.1:1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        third = process.stdout.readline()
        news = process.stdout.readline()
        while process.poll() is None and not (grafana.exists() and grafana.read_text().endswith("}")):
            time.sleep(0.1)
        left = list(tmp_path.glob("rayk-dashboards-*"))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert first.startswith("Prometheus: http://127.0.0.1:")
    assert second.startswith("Grafana: http://127.0.0.1:3000")
    assert third.startswith("Ctrl-C ends it all")
    assert news.startswith("Ray: no Ray cluster answers at '127.0.0.1:1'")
    seen = json.loads(grafana.read_text())["environment"]
    assert seen["RAYK_PROMETHEUS"] == first.split()[1]
    assert Path(seen["RAYK_DASHBOARDS"], "rayk-overview.json").is_file()
    assert Path(seen["GF_PATHS_PROVISIONING"], "dashboards/rayk.yml").is_file()
    assert yaml.safe_load(config.read_text())["rule_files"] == [str(FOLDER / "alerts.yml")]
    assert len(left) == 1
    assert list(tmp_path.glob("rayk-dashboards-*")) == []
    with socket.socket() as probe:  # Prometheus ended too
        assert probe.connect_ex(("127.0.0.1", int(first.split()[1].rpartition(":")[2]))) != 0


def test_without_grafana_it_says_how_to_use_one(
    tmp_path: Path, plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    start_grafana(Programs(tmp_path), "http://127.0.0.1:9", 3000)
    said = capsys.readouterr().out
    assert "no grafana-server on PATH" in said
    assert f"RAYK_PROMETHEUS=http://127.0.0.1:9 RAYK_DASHBOARDS={FOLDER}" in said


def test_a_port_that_is_taken_is_named(plant: Plant, programs: Programs, tmp_path: Path) -> None:
    plant("prometheus", FAKE_PROMETHEUS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(tools.NotAvailableError, match=f"port {port}: .*choose another, --port N"):
            start_prometheus(programs, port, tmp_path / "nodes.json", [])


def test_a_prometheus_that_ends_at_once_is_quoted(plant: Plant, programs: Programs, tmp_path: Path) -> None:
    plant("prometheus", "#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    with pytest.raises(tools.NotAvailableError, match="ended at once: no such flag"):
        start_prometheus(programs, 0, tmp_path / "nodes.json", [])


def test_without_prometheus_and_apt_it_says_what_to_do(
    tmp_path: Path, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(tools.NotAvailableError, match="no apt-get to fetch it with: install Prometheus"):
        tools.need("prometheus")


def test_what_apt_says_is_told(plant: Plant) -> None:
    plant("apt-get", "#!/bin/sh\necho 'E: no network' >&2\nexit 100\n")
    plant("dpkg-deb", "#!/bin/sh\nexit 0\n")
    with pytest.raises(tools.NotAvailableError, match="apt-get update` failed: E: no network"):
        tools.need("prometheus")


def test_without_lists_of_packages_it_makes_its_own_and_leaves_none(plant: Plant) -> None:
    apt = """#!/bin/sh
case "$*" in
  "download prometheus") echo "E: Unable to locate package prometheus" >&2; exit 100 ;;
  *"Dir::State::lists="*" update") ;;
  *"Dir::State::lists="*" download prometheus") echo deb > prometheus_2_amd64.deb ;;
  *) exit 9 ;;
esac
"""
    plant("apt-get", apt)
    plant("dpkg-deb", "#!/bin/sh\nmkdir -p $3/usr/bin && cp $2 $3/usr/bin/promtool\n")
    assert tools.need("promtool").read_text() == "deb\n"
    assert sorted(p.name for p in tools.FOLDER.iterdir()) == [".lock", "usr"]


def test_a_fetched_package_is_unpacked_and_found(plant: Plant) -> None:
    plant("apt-get", "#!/bin/sh\n[ $1 = download ] && echo deb > prometheus_2_amd64.deb\n")
    plant("dpkg-deb", "#!/bin/sh\nmkdir -p $3/usr/bin && cp $2 $3/usr/bin/prometheus\n")
    assert tools.need("prometheus").read_text() == "deb\n"
    assert list(tools.FOLDER.glob("*.deb")) == []
    with pytest.raises(tools.NotAvailableError, match="has no promtool"):
        tools.need("promtool")


def test_an_address_without_a_cluster_is_told_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dashboards.nodes", str(tmp_path / "nodes.json"), "127.0.0.1:1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2
    assert done.stderr.startswith("no Ray cluster answers at '127.0.0.1:1'")
    assert list(tmp_path.iterdir()) == []


def test_targets_are_as_file_sd_reads_them(tmp_path: Path) -> None:
    """https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config"""
    path = tmp_path / "nodes.json"
    write_targets(path, ["10.0.0.2:9", "10.0.0.1:8"])
    (group,) = json.loads(path.read_text())
    assert group["targets"] == ["10.0.0.1:8", "10.0.0.2:9"]
    assert [p.name for p in tmp_path.iterdir()] == ["nodes.json"]
