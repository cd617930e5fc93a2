"""Engines on several raylets: where they go, and what a lost node does to a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from rayk import Experiment, load
from rayk.types.errors import CheckpointError, DeviceError
from tests.clusters import cluster
from tests.experiments.conftest import wait_until, worker_processes
from tests.markers import nixl, ray, slow, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(240), thorough]

HEALTH_CHECK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 2,
}
"""A killed node, which refuses connections, is missed after a second; Ray's own settings take 14. One that is
slow to answer is not."""
NODE = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 << 20}


class Nodes:
    """A head that holds no engine (the driver's and the coordinator's node) and nodes that do."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "object_store_memory": 100 << 20, "_system_config": HEALTH_CHECK}
        self._nodes: dict[str, Any] = {}
        with ExitStack() as stack:
            self.cluster = stack.enter_context(cluster(is_one_node=False, **head))
            self.add("a")
            self.add("b")
            self.close = stack.pop_all().close

    def add(self, name: str) -> None:
        """A node with the label rack=`name`."""
        self._nodes[name] = self.cluster.add_node(**NODE, labels={"rack": name})

    def kill(self, name: str) -> None:
        """As if its power went: no process of it says goodbye."""
        self.cluster.remove_node(self._nodes[name], allow_graceful=False)

    @property
    def alive(self) -> list[str]:
        """Nodes whose raylet runs."""
        raylets = {name: n.all_processes.get("raylet", ()) for name, n in self._nodes.items()}
        return [name for name, found in raylets.items() if any(r.process.poll() is None for r in found)]

    def of(self, text: str) -> str:
        """The node that a text names."""
        (found,) = [name for name, n in self._nodes.items() if n.node_id[:8] in text]
        return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    yield found
    found.close()


class Hooks:
    """Runs functions when a cell begins or has ended. Implements types.progress.Progress."""

    def __init__(self, **hooks: Callable[[], object]) -> None:
        """begin_1=f: when the second cell begins."""
        self._hooks = hooks
        self._num = {"begin": 0, "end": 0}

    def plan(self, num_cells: int, num_finished: int) -> None: ...

    def phase(self, text: str) -> None: ...

    def begin(self, cell_id: str) -> None:
        self._call("begin")

    def end(self, cell_id: str, verdict: str, reason: str) -> None:
        self._call("end")

    def _call(self, event: str) -> None:
        number = self._num[event]
        self._num[event] += 1
        self._hooks.get(f"{event}_{number}", lambda: None)()


def test_rayk_run_spreads_and_packs_engines_on_a_cluster_it_joins(nodes, spec, tmp_path):
    matrix = [
        {"placement": ["spread"], "prefill.node_labels": [{"rack": "!in(a, c)"}]},
        {"placement": ["pack"]},
    ]
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec(matrix)))
    command = [sys.executable, "-m", "rayk.cli.main", "run", "spec.yaml", "--out", "run"]
    command += ["--address", nodes.cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = load(tmp_path / "run")
    places = result.cells[["prefill.node", "decode.node"]].map(nodes.of).to_numpy().tolist()
    assert places[0] == ["b", "a"]
    assert places[1] in (["a", "a"], ["b", "b"])
    assert set(result.transfers["verdict"]) == {"OK"}
    assert result.cells["num_kv_bytes_checked"].gt(0).all()
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    racks = {n["labels"].get("rack"): n["is_driver"] for n in environment["nodes"]}
    assert racks == {None: True, "a": False, "b": False}


def test_what_no_node_can_hold_is_refused_before_any_worker(nodes, spec, tmp_path):
    def refusal(matrix: Any, **changes: Any) -> str:
        with pytest.raises(DeviceError) as told:
            Experiment(spec(matrix, **changes)).run(tmp_path / "run", address=nodes.cluster.address)
        return str(told.value)

    one, rack_a = {"prefill.tp": 1, "decode.tp": 1}, {"node_labels": {"rack": "a"}}
    # Two GPUs in the cluster, but no node has both.
    text = refusal({"prefill.tp": 2, "mode": "aggregated"}, device="cuda")
    assert "prefill.tp: no node can hold engine prefill0 (2 workers of 0.01 CPU and 1 GPU)" in text
    text = refusal(one, device="cuda", placement="pack")
    assert "placement: pack wants one node for all of 2 engines" in text
    text = refusal(one, decode={"node_labels": {"rack": "z"}})
    assert "decode.node_labels: no node can hold engine decode0" in text
    text = refusal(one, placement="spread", prefill=rack_a, decode=rack_a)
    assert "placement: spread wants prefill and decode engines on different nodes" in text
    assert not worker_processes()


def test_a_model_that_is_not_on_every_node_is_bad_input(nodes, spec, tmp_path, checkpoint):
    """The driver sees the folder; the workers are shown one that is not there."""
    import ray

    from rayk.actors import launch
    from rayk.actors.nodes import EngineDemand, worker_resources

    demand = EngineDemand(name="prefill0", num_workers=1, resources=worker_resources("cpu", 0))
    with launch.connect(nodes.cluster.address):
        coordinator = launch.start_coordinator("rayk/coordinator/models")
        try:
            ray.get(coordinator.prepare.remote([demand], "auto", str(checkpoint("qwen3"))))
            with pytest.raises(CheckpointError) as told:
                ray.get(coordinator.prepare.remote([demand], "auto", str(tmp_path / "elsewhere")))
            assert str(tmp_path / "elsewhere") in str(told.value)
            assert nodes.of(str(told.value)) in nodes.alive
            assert "same folder of every node" in str(told.value)
        finally:
            ray.get(coordinator.shutdown.remote())
            ray.kill(coordinator)


@slow
def test_an_idle_worker_that_is_stopped_is_replaced(nodes):
    import ray

    from rayk.actors import launch
    from rayk.actors.nodes import EngineDemand, worker_resources

    demand = EngineDemand(name="prefill0", num_workers=2, resources=worker_resources("cpu", 0))
    with launch.connect(nodes.cluster.address):
        coordinator = launch.start_coordinator("rayk/coordinator/stopped")
        try:
            before = ray.get(coordinator.prepare.remote([demand]))
            os.kill(before["rayk/stopped/prefill0/r1"], signal.SIGSTOP)
            after = ray.get(coordinator.prepare.remote([demand]), timeout=60)
            assert set(after) == {"rayk/stopped/prefill0/r0#1", "rayk/stopped/prefill0/r1#1"}
            assert not set(after.values()) & set(before.values())
        finally:
            ray.get(coordinator.shutdown.remote())
            ray.kill(coordinator)
    wait_until(lambda: not worker_processes(), "even the stopped worker is gone")


def test_lost_nodes_end_their_cells_and_the_rest_run_on_the_nodes_left(nodes, spec, tmp_path, capfd):
    """In one run, nodes are lost at a decode step, between cells, and at a transfer; then none is left."""
    lost_at_decode = [{"kind": "kill_node", "point": "decode", "step": 3}]
    lost_at_transfer = [{"kind": "kill_node", "point": "transfer", "role": "decode"}]
    lost_at_prefill = [{"kind": "kill_node", "point": "prefill"}]
    cells = [
        {"placement": "pack", "faults": lost_at_decode},
        {"placement": "pack", "faults": []},
        {"placement": "pack", "faults": [], "decode.layout": "LBNHC"},
        {"placement": "spread", "faults": lost_at_transfer},
        {"placement": "pack", "faults": lost_at_prefill},
        {"placement": "auto", "faults": []},
        {"placement": "spread", "faults": []},
    ]
    matrix = [{key: [value] for key, value in cell.items()} for cell in cells]
    left: list[str] = []

    def lose_the_one_left() -> None:
        """Where cell 1 ran is lost just before cell 2 begins, which finds two other nodes."""
        left.extend(nodes.alive)
        nodes.add("c")
        nodes.add("d")
        nodes.kill(left[0])
        # Its workers are gone at once; that it is, Ray finds out later.
        wait_until(lambda: not worker_processes(), "workers end with their node")

    hooks = Hooks(end_1=lose_the_one_left)
    result = Experiment(spec(matrix)).run(tmp_path / "run", address=nodes.cluster.address, progress=hooks)
    capfd.readouterr()  # the raylets' last words, page by page
    cells = result.cells
    reasons, places = cells["reason"], cells[["prefill.node", "decode.node"]]
    died = "ENGINE_ERROR"
    verdicts = cells["verdict"].tolist()
    assert verdicts == [died, "PASS", "PASS", died, died, died, died], reasons.tolist()
    assert cells["met"].tolist() == [True] * 5 + [False] * 2
    assert reasons[0].startswith("engine ")
    assert reasons[3].startswith("engine decode0 ")
    for cell in (0, 3, 4):
        assert f"node {places.iloc[cell, 1]}" in reasons[cell]
    assert nodes.of(places.iloc[0, 0]) != left[0]
    assert [nodes.of(n) for n in places.iloc[1]] == left * 2
    assert nodes.of(places.iloc[2, 0]) in ("c", "d")
    # Cell 0 was lost in the middle: its requests had their first tokens.
    lost = result.requests[result.requests["cell_id"] == cells["cell_id"][0]]
    assert lost["output_token_ids"].map(len).between(1, 11).any()
    assert lost["error"].notna().all()
    assert "node" in lost["error"].iloc[0]
    for cell in (5, 6):
        assert "no node can hold engine" in reasons[cell]
    assert cells["wall_s"].max() < 80, "nothing is waited for that cannot come"
    assert nodes.alive == []
    check_nothing_is_left(nodes)


def check_nothing_is_left(nodes: Nodes) -> None:
    """No worker process, actor or placement group outlives a run."""
    from rayk.actors import launch

    wait_until(lambda: not worker_processes(), "workers end with their run")
    with launch.connect(nodes.cluster.address):
        from ray.util import list_named_actors, placement_group_table

        wait_until(lambda: not list_named_actors(all_namespaces=True), "actors end with their run")
        groups = placement_group_table().values()
        assert groups
        assert {g["state"] for g in groups} == {"REMOVED"}
