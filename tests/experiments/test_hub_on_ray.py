"""A model by its name on the hub, run, served and asked on nodes that each have a cache of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
import yaml

from rayk import load
from tests.clusters import cluster
from tests.conftest import CheckpointFactory
from tests.local_hub import (
    COMMIT,
    NAME,
    PINNED,
    WEIGHTS,
    LocalHub,
    hub_environment,
    local_hub,
    with_tiny_model,
)
from tests.markers import nixl, ray, slow
from tests.serve.test_serve_command import serving

pytestmark = [ray, nixl, pytest.mark.timeout(300)]

TOKEN = "hf_a_token_that_nobody_prints"
PROMPTS = [[5, 6, 7], list(range(20, 60))]
ASK = f"""
import json, sys
from rayk import LLM, SamplingParams
few = {{"engine.max_seqs": 2, "engine.num_blocks": 64}}
with LLM({NAME!r}, prefill_tp=2, decode_tp=1, device="cpu", address=sys.argv[1], settings=few) as llm:
    found = llm.generate({PROMPTS}, SamplingParams(max_tokens=8, ignore_eos=True))
print(json.dumps([list(c.token_ids) for c in found]))
"""


class World(NamedTuple):
    """A hub that wants a token, and a cluster of a head and two nodes, each with an HF_HOME of its own."""

    hub: LocalHub
    address: str
    homes: dict[str, Path]
    environment: dict[str, str]
    """The driver's."""

    def run(self, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            cwd=folder,
            env=os.environ | self.environment,
            timeout=200,
            check=False,
        )


@pytest.fixture(scope="module")
def world(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("nodes")
    homes = {name: folder / name for name in ("driver", "a", "b")}
    with local_hub() as hub:
        with_tiny_model(hub, checkpoint("qwen3"), folder / "source")
        hub.tokens[NAME] = TOKEN
        of = {name: hub_environment(hub, home, HF_TOKEN=TOKEN) for name, home in homes.items()}
        head = {"num_cpus": 0, "object_store_memory": 100 << 20, "env_vars": of["driver"]}
        with cluster(is_one_node=False, **head) as found:
            for name in ("a", "b"):
                found.add_node(
                    num_cpus=2, object_store_memory=80 << 20, labels={"rack": name}, env_vars=of[name]
                )
            yield World(hub, found.address, homes, of["driver"])


def holds(home: Path) -> bool:
    """Whether a node's cache has the weights."""
    return (home / "hub").is_dir() and len([*home.glob(f"hub/*/snapshots/{COMMIT}/{WEIGHTS}")]) == 1


@slow
def test_a_run_on_two_nodes_that_each_fetch_the_model(
    world: World, spec: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    matrix = {"prefill.tp": [2], "decode.tp": [1]}
    text = yaml.safe_dump(spec(matrix, model=NAME, placement="spread"))
    (tmp_path / "spec.yaml").write_text(text)
    command = ["-m", "rayk.cli.main", "run", "spec.yaml", "--out", "run", "--address", world.address]
    done = world.run(tmp_path, *command)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"model {PINNED}: {world.homes['driver']}" in done.stderr
    result = load(tmp_path / "run")
    (cell,) = result.cells.to_dict("records")
    assert cell["verdict"] == "PASS"
    assert yaml.safe_load((tmp_path / "run" / "spec.yaml").read_text())["model"] == PINNED
    assert cell["prefill.node"] != cell["decode.node"]
    assert set(result.transfers["verdict"]) == {"OK"}
    assert {name for name, home in world.homes.items() if holds(home)} == {"driver", "a", "b"}
    assert world.hub.fetched().count(WEIGHTS) == 3  # two ranks of a node fetch once
    assert world.hub.authorizations == {f"Bearer {TOKEN}"}
    assert "spec.yaml" in tells_no_token(tmp_path / "run", said)


@slow
def test_python_and_the_server_take_the_name(
    world: World, tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [o.token_ids for o in reference(world.hub.folders[NAME]).generate(PROMPTS, 8, ignore_eos=True)]
    done = world.run(tmp_path, "-c", ASK, world.address)
    assert done.returncode == 0, done.stderr
    assert [tuple(ids) for ids in json.loads(done.stdout.splitlines()[-1])] == expected
    assert TOKEN not in done.stdout + done.stderr
    for name, value in world.environment.items():
        monkeypatch.setenv(name, value)
    options = "--prefill-tp 1 --decode-tp 2 --http uvicorn --address"
    with serving(NAME, *options.split(), world.address) as server:
        assert server.model_id == NAME
        fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        asked = requests.post(f"{server.url}/v1/completions", json=fields | {"prompt": PROMPTS}, timeout=60)
        assert [tuple(choice["token_ids"]) for choice in asked.json()["choices"]] == expected
        assert TOKEN not in requests.get(f"{server.url}/metrics", timeout=60).text
        server.process.terminate()
        assert server.ends() == 0
    assert TOKEN not in "".join(server.errors)


def tells_no_token(folder: Path, said: str) -> list[str]:
    """Look through everything a run wrote; returns the files' names."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert not [p for p in files if TOKEN.encode() in p.read_bytes()]
    assert TOKEN not in said
    return [p.name for p in files]
