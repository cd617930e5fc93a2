"""An engine's start launches every form of every kernel that its transfers do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from rayk.parallel.shard import EngineShape
from rayk.transfer.local_agent import LocalNetwork
from rayk.transfer.warm_up import transfer_launches
from tests.conftest import CHECKPOINTS, ROOT
from tests.markers import thorough
from tests.transfer.cluster import Shape, local_pair
from tests.transfer.test_convert import Side


@thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "formats", "kernels"),
    [
        (None, ["bfloat16", "fp8_e4m3", "nvfp4", "float32"], {"dequantise_rows_kernel"}),
        (None, ["nvfp4", "fp8_e4m3_token_head"], {"quantise_rows_kernel", "dequantise_rows_kernel"}),
        ("everything", [], {"dequantise_rows_kernel"}),
    ],
    ids=["bfloat16", "nvfp4", "hybrid"],
)
def test_no_transfer_compiles_after_it(family: str | None, formats: list[str], kernels: set[str]) -> None:
    """In a process of its own: Triton decides at import whether it interprets or compiles."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.transfer.kernel_forms", json.dumps([family, formats])],
        cwd=ROOT,
        env=environ | {"TRITON_CACHE_DIR": str(CHECKPOINTS / "triton-cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["late"] == []
    assert found["early"].count("copy_runs_kernel") == 12
    assert {"digest_kernel", *kernels} <= set(found["early"])
    told = re.findall(r"^rank 0 of 1: (.*)", done.stderr, re.MULTILINE)
    assert told[0].startswith("compiling kernels, digests (0 so far")
    assert re.fullmatch(rf"{len(found['early'])} kernels ready in [\d.]+ s", told[-1])


@pytest.mark.parametrize("family", [None, "everything"])
def test_it_writes_to_nobodys_block_alone(family: str | None) -> None:
    rank = (
        Side("bfloat16", 1, EngineShape(), LocalNetwork()).ranks[0]
        if family is None
        else local_pair(Shape(family=family)).consumer.ranks[0]
    )
    views = rank._views
    others = [field.view[1:].clone() for view in views for field in view.fields]
    names = []
    for name, launch in transfer_launches(views, rank._caches, rank.description.rows_per_group):
        names.append(name)
        launch()
    assert names[0] == "digests"
    assert "conversion from float32" in names
    after = [field.view[1:] for view in views for field in view.fields]
    for there, was in zip(after, others, strict=True):
        assert torch.equal(there.view(torch.uint8), was.view(torch.uint8))
