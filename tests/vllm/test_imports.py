"""In vLLM's environment nothing of rayk may need more than numpy and torch."""

from __future__ import annotations

import subprocess
import sys

from tests.house import ROOT

NEED_VLLM = {"proving", "proving_stats", "driver", "extension"}
"""Modules of rayk.vllm that are written against vLLM's classes."""

SCRIPT = f"""
NEED_VLLM = {NEED_VLLM}
import importlib.abc, sys
import numpy, torch

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top not in ("rayk", "tests", *loaded):
            raise ImportError(name + " is blocked")

loaded = set(name.split(".")[0] for name in sys.modules) - set(["rayk"])
sys.meta_path.insert(0, Blocked())

import pkgutil, rayk.vllm
for module in pkgutil.iter_modules(rayk.vllm.__path__):
    if module.name not in NEED_VLLM:
        importlib.import_module("rayk.vllm." + module.name)

from tests.vllm.standins import Model, Worker
model = Model(mamba_groups=2)
worker = Worker(model)
ids = worker.block_ids(40)
worker.write(model.values(40), ids)
caches = worker.prove()
print(len(caches.digests(ids, 40)), len(caches.rows(ids, 40)))
"""


def test_caches_are_proven_with_numpy_and_torch_alone() -> None:
    """What importing torch brings may be there. A digest is computed, so late imports count as well."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "48 5\n"
