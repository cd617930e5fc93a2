"""In vLLM's environment nothing of rayk may need more than numpy and torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.house import ROOT, find_imports, module_name, python_files

SCRIPT = """
import importlib.abc, sys
import numpy, torch

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top not in ("rayk", "tests", *loaded):
            raise ImportError(name + " is blocked")

loaded = set(name.split(".")[0] for name in sys.modules) - set(["rayk"])
sys.meta_path.insert(0, Blocked())

for name in MODULES:
    importlib.import_module(name)

from tests.vllm.standins import Model, Worker
model = Model(mamba_groups=2)
worker = Worker(model)
ids = worker.block_ids(40)
worker.write(model.values(40), ids)
caches = worker.prove()
print(len(caches.digests(ids, 40)), len(caches.rows(ids, 40)))
"""


FILES = python_files(ROOT, "rayk/vllm")


def test_caches_are_proven_with_numpy_and_torch_alone() -> None:
    """What importing torch brings may be there. A digest is computed, so late imports count as well."""
    needs = {module_name(ROOT, path): _executed(path) for path in FILES}
    with_vllm = {"vllm"}
    while more := {m for m, names in needs.items() if m not in with_vllm and names & with_vllm}:
        with_vllm |= more
    free = sorted(needs.keys() - with_vllm)
    assert "rayk.vllm.caches" in free
    done = subprocess.run(
        [sys.executable, "-c", f"MODULES = {free}{SCRIPT}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "48 5\n"


def _executed(path: Path) -> set[str]:
    """Modules that importing a file imports, and the top packages of all."""
    names = [item.name for item in find_imports(path, module_name(ROOT, path)) if item.executed]
    return {part for name in names for part in (name, name.rpartition(".")[0], name.partition(".")[0])}
