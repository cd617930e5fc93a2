"""The GPU tests where torch and Triton are, and no Ray, NIXL or pydantic: `make test-gpu PY=python3`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import ROOT, find_imports, module_name, python_files
from tests.markers import thorough

LACKING = (
    *("ray", "nixl", "nixl_cu12", "nixl_cu13", "pydantic", "fastapi", "uvicorn", "prometheus_client"),
    *("pandas", "pyarrow", "plotly", "aiohttp", "hypothesis", "llguidance"),
)
GPU_FILES = [
    path
    for path in python_files(ROOT, "tests")
    if re.search(r"tests.markers import .*\bgpu\b", path.read_text(encoding="utf-8"))
]

BLOCK = """
import sys
from importlib.machinery import PathFinder
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in str(getattr(f, "__module__", ""))]
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.split(".")[0] in {lacking} else find(name, *rest)
)
"""


def executed_imports(start: Path) -> Iterator[tuple[str, str]]:
    """(module, what it imports) of everything that runs when a file is imported."""
    files = {module_name(ROOT, path): path for path in python_files(ROOT, "rayk", "tests", "jobs")}
    left, seen = [module_name(ROOT, start)], set()
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        # Importing a.b.c runs a/__init__ and a.b/__init__ first.
        targets = [module.rpartition(".")[0]]
        for item in find_imports(files[module], module):
            if item.executed:
                yield module, item.name
                targets += [item.name, item.name.rpartition(".")[0]]
        left += [name for name in targets if name in files]


@pytest.mark.parametrize("path", GPU_FILES, ids=lambda path: path.stem)
def test_importing_gpu_tests_needs_nothing_that_may_lack(path: Path) -> None:
    found = [(module, name) for module, name in executed_imports(path) if name.split(".")[0] in LACKING]
    assert found == []


def test_every_gpu_test_is_found() -> None:
    """By the Makefile's words: nobody takes the marker in another way."""
    assert {"test_gpu", "test_gpu_nixl", "test_gpu_on_ray", "test_on_gpu", "test_on_devices"} <= {
        p.stem for p in GPU_FILES
    }
    for path in python_files(ROOT, "tests"):
        assert "pytest.mark.gpu" not in path.read_text(encoding="utf-8") or path.name in (
            "markers.py",
            Path(__file__).name,
        )


def bare_environment(folder: Path, *also_lacking: str) -> dict[str, str]:
    """Environment of a machine without these packages and rayk's install; a module in `folder` hides them,
    from children too."""
    (folder / "sitecustomize.py").write_text(BLOCK.format(lacking={*LACKING, *also_lacking}))
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    return kept | {
        "PYTHONPATH": str(folder),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


@thorough
def test_they_run_where_it_lacks(tmp_path: Path) -> None:
    """Without a GPU each is skipped, for that reason."""
    environ = bare_environment(tmp_path, "pytest_timeout", "xdist") | {"CUDA_VISIBLE_DEVICES": ""}
    command = ["make", "test-gpu", f"PY={sys.executable}", "ARGS=-rs -p no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout
    assert re.search(r"\d{3} skipped, \d+ deselected", done.stdout)


@thorough
@pytest.mark.parametrize("script", ["attention_gpu", "device_reads", "kernels"])
def test_benchmarks_for_gpus_start_without_an_install(tmp_path: Path, script: str) -> None:
    """On an H100 the processes that a stage of the first day starts could not import rayk."""
    command = [sys.executable, f"jobs/benchmarks/{script}.py", "--help"]
    environ = bare_environment(tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_first_day_needs_nothing_that_may_lack() -> None:
    """transfers.py alone imports what needs NIXL, where it is there."""
    found = executed_imports(ROOT / "jobs" / "gpu_day.py")
    assert [(module, name) for module, name in found if name.split(".")[0] in LACKING] == []
