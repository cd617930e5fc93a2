"""Runs that are interrupted and resumed end with the tables of a run that was not."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayk import Experiment, load
from tests.experiments.conftest import wait_until
from tests.experiments.interrupted import (
    Interrupt,
    Interrupted,
    alive,
    assert_same_tables,
    draw_interrupts,
)
from tests.markers import nixl, ray, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(600), thorough]

SHORT: dict[str, Any] = {
    "prompts": {"random": {"count": 2, "input_tokens": [5, 21], "seed": 0}},
    "sampling": {"max_tokens": 4, "ignore_eos": True},
}
LAYOUTS = ["BHLNC", "BLHNC", "BLNHC", "LBHNC", "LBNHC", "LHBNC"]
SEED = 2


def write_spec(folder: Path, spec: dict[str, Any]) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def named_actors(address: str) -> list[Any]:
    """Actors of a cluster that have a name, as coordinators and workers have."""
    from rayk.actors import launch

    with launch.connect(address):
        import ray

        return list(ray.util.list_named_actors(all_namespaces=True))


def test_an_interrupted_run_ends_with_the_tables_of_a_whole_one(
    spec: Callable[..., dict[str, Any]], ray_address: str, tmp_path: Path
) -> None:
    matrix = [
        {"mode": "aggregated", "prefill.layout": ["BHLNC", "LBNHC", "LHBNC"]},
        {"decode.layout": ["BHLNC", "LBNHC"]},
    ]
    whole = spec(matrix, **SHORT)
    path, out = write_spec(tmp_path, whole), tmp_path / "run"
    run = Interrupted(path, out, environment={"RAY_ADDRESS": ray_address})
    early = run.interrupt(Interrupt(signal.SIGINT, 0, 1.0), resume=False)
    assert early.rstrip().endswith("rayk: interrupted")
    printed = run.interrupt(Interrupt(signal.SIGTERM, 2, 0.0), resume=True)
    assert printed.rstrip().endswith("rayk: terminated")
    assert f"of 5 cells are finished: --out {out} --resume continues" in printed
    before = load(out).cells
    assert 1 <= len(before) < 5
    wait_until(lambda: not named_actors(ray_address), "an interrupted run leaves no worker")
    refused = subprocess.run(run.command(resume=False), capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "already holds a run's tables" in refused.stderr
    run.interrupt(Interrupt(signal.SIGKILL, 2, 0.05), resume=True)
    wait_until(lambda: not named_actors(ray_address), "the actors of a killed driver end")
    printed = run.finish()
    assert "of 5 cells are on disk" in printed
    assert run.check(5)["begins"] <= 5 + 3
    after = load(out).cells.set_index("cell_id")
    kept = after.loc[before["cell_id"], "wall_s"].tolist()
    assert kept == before["wall_s"].tolist(), "finished cells were not run again"
    environment = json.loads((out / "environment.json").read_text())
    assert environment["ray_address"] == ray_address
    finished = [session["finished_cells"] for session in environment["sessions"]]
    assert finished == sorted(finished)
    assert finished[:2] == [0, len(before)]
    Experiment(whole).run(tmp_path / "whole", address=ray_address)
    assert_same_tables(tmp_path / "whole", out)
    assert load(out).requests.groupby("cell_id").size().tolist() == [2] * 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_sixty_cells_killed_five_times(spec: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    matrix = [
        {
            "mode": "aggregated",
            "prefill.tp": [1, 2],
            "prefill.block_size": [8, 16, 32],
            "prefill.layout": LAYOUTS,
        },
        {"prefill.tp": [1, 2], "decode.tp": [1, 2], "decode.layout": LAYOUTS},
    ]
    path = write_spec(tmp_path, spec(matrix, **SHORT))
    # A temporary directory of its own, with a short name: Ray's sockets lie in it.
    sessions = Path(tempfile.mkdtemp(dir="/tmp"))
    run = Interrupted(path, tmp_path / "run", environment={"TMPDIR": str(sessions)})
    for number, moment in enumerate(draw_interrupts(SEED, 60, [signal.SIGKILL] * 5)):
        # At once: neither the lock nor the processes of the killed session may stand in the way.
        run.interrupt(moment, resume=number > 0)
        print(moment)
    assert len(run.left_behind) == 5, "every session was killed before it was done"
    assert len(list(sessions.glob("rayk-*"))) == 1, "each session removed what the one before it left"
    run.finish()
    assert not list(sessions.glob("rayk-*"))
    shutil.rmtree(sessions)
    print(run.check(60))
    for family in run.left_behind:
        wait_until(
            lambda family=family: not alive(family), "processes of a killed run end by themselves", 120
        )
    whole = Interrupted(path, tmp_path / "whole")
    whole.finish()
    assert_same_tables(tmp_path / "whole", tmp_path / "run")
    assert set(load(tmp_path / "run").cells["verdict"]) == {"PASS"}
