"""Settings every test process needs before torch, triton or ray are imported, and shared fixtures."""

from __future__ import annotations

import os

# The size of OpenMP's pool is read once, at import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's workers are 15 by default: beside the other process of tests they would wait for a core.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import atexit
import fcntl
import gc
import hashlib
import importlib.util
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch

from tests.clusters import cluster
from tests.helpers import poison
from tests.quick_triton import quicken

# Tiny models run several times faster on one thread than on two.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ROOT / "checkpoints"
"""Git-ignored: what the fixtures write here is kept, so that a second run costs nothing."""
REAL_MODEL = CHECKPOINTS / "smollm2-135m"
"""Written by `make real`."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let `make test-gpu PY=...` run where pytest-timeout is not installed, and name vLLM's interpreter."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds for one test (without effect: no pytest-timeout here)")
    parser.addoption(
        "--vllm-python",
        default=str(ROOT / ".venv-vllm" / "bin" / "python"),
        help="interpreter of vLLM's environment, for tests with the marker needs_vllm",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Turn Triton's interpreter on, unless this run compiles kernels for the GPU at hand.

    Triton reads the variable when it is imported, which test modules do after this hook.
    """
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: without effect (no pytest-timeout here)")
    assert "triton" not in sys.modules, "triton was imported before TRITON_INTERPRET was decided"
    expression = config.option.markexpr
    compiles = torch.cuda.is_available() and "gpu" in expression and "not gpu" not in expression
    if not compiles:
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what the machine cannot run, with the reason; tests of the marker `ray` come first, as one group.

    They take longest, and one process has the one cluster.
    """
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)
    _thin_sweeps(items)
    _mark_others(items)
    vllm_python = Path(config.getoption("vllm_python"))
    missing = {
        "gpu": None if torch.cuda.is_available() else "no CUDA device",
        "nixl": None if _installed("nixl", "nixl_cu13", "nixl_cu12") else "NIXL is not installed",
        "needs_vllm": None if vllm_python.is_file() else f"no {vllm_python}: `make vllm` installs it",
        "ray": None if _installed("ray") else "Ray is not installed",
        "real": None if (REAL_MODEL / "config.json").is_file() else f"no {REAL_MODEL}: `make real` writes it",
    }
    for item in items:
        if item.get_closest_marker("needs_vllm") is not None:  # `make test` is the same with and without vLLM
            item.add_marker(pytest.mark.thorough)
        for marker, reason in missing.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
        # One at a time: each of these engines takes both cores of a small machine.
        starts_engines = any(item.get_closest_marker(name) for name in ("ray", "needs_vllm"))
        if config.pluginmanager.hasplugin("xdist") and starts_engines:
            item.add_marker(pytest.mark.xdist_group("ray"))


def _thin_sweeps(items: list[pytest.Item]) -> None:
    """Of tests with the marker `sweep`, all cases get the marker `slow` but every nth, and the first with a
    value that several cases share, or that the marker names."""
    swept = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is not None and item.get_closest_marker("slow") is None:
            swept[item.nodeid.partition("[")[0]].append(item)
    for cases in swept.values():
        every, *names = cases[0].get_closest_marker("sweep").args  # type: ignore[union-attr]
        values = [_values(case, [*_params(case), *names]) for case in cases]
        num_cases = Counter(value for of in values for value in of.items())
        seen: set[tuple[str, str]] = set()
        for number, (case, of) in enumerate(zip(cases, values, strict=True)):
            wanted = {value for value in of.items() if num_cases[value] > 1 or value[0] in names}
            if number % every and wanted <= seen:
                case.add_marker(pytest.mark.slow)
            else:
                seen |= wanted


def _mark_others(items: list[pytest.Item]) -> None:
    """Of tests with the marker `one_per`, all cases but the first of each value get the marker `thorough`."""
    seen = set()
    for item in items:
        marker = item.get_closest_marker("one_per")
        if marker is None or item.get_closest_marker("slow") is not None:
            continue
        key = item.nodeid.partition("[")[0], *_values(item, marker.args).items()
        if key in seen:
            item.add_marker(pytest.mark.thorough)
        seen.add(key)


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params  # type: ignore[attr-defined]


def _values(item: pytest.Item, names: Sequence[str]) -> dict[str, str]:
    """What a case has for these parameters, or attributes of parameters, as text."""
    case = SimpleNamespace(**_params(item))
    return {name: repr(attrgetter(name)(case)) for name in names}


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Leave out of tests' names what is no name; pytest numbers those alike."""
    return argname if isinstance(val, str | bytes) and len(val) > 80 else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, tests in no group run file by file, so that what a module makes is made once.

    Groups are begun in the order of collection, not the largest first: the last ones are to be short.
    """
    if config.getvalue("dist") != "loadgroup":
        return None  # as it is: the GPU tests, of which one file has most
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).split("::")[0]

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage meanwhile: nothing of it is, and that takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests stay: no later collection of garbage need look at them, which takes long."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Whatever has imported Triton's interpreter by now, which few tests need."""
    quicken()


def _installed(*names: str) -> bool:
    return any(importlib.util.find_spec(name) is not None for name in names)


class CheckpointFactory(Protocol):
    """`checkpoint(family, **options)`: see rayk.oracle.checkpoint.write_checkpoint for options."""

    def __call__(self, family: str, **options: Any) -> Path:
        """The folder of a tiny checkpoint, written at first use."""


@pytest.fixture(scope="session")
def checkpoint() -> CheckpointFactory:
    """Factory of tiny checkpoints: one folder per (family, options), kept between runs."""

    def make(family: str, **options: Any) -> Path:
        # Here, so that tests without a model do not need the packages of the oracle.
        from rayk.oracle.checkpoint import write_checkpoint

        suffix = ""
        if options:
            text = json.dumps(options, sort_keys=True)
            suffix = "-" + hashlib.sha256(text.encode()).hexdigest()[:8]
        with _alone(f"{family}{suffix}"):
            return write_checkpoint(family, CHECKPOINTS / f"test-{family}{suffix}", **options)

    return make


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """While another test process writes a checkpoint, wait for it (`make test` has two)."""
    CHECKPOINTS.mkdir(exist_ok=True)
    with (CHECKPOINTS / f".test-{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def reference() -> Callable[..., Any]:
    """Factory `reference(path, **options) -> Reference`: one per checkpoint, answers kept on disk."""
    made: dict[str, Any] = {}

    def make(path: Path, **options: Any) -> Any:
        from rayk.oracle.cache import AnswerStore
        from rayk.oracle.reference import Reference

        key = json.dumps([str(path), options], sort_keys=True)
        if key not in made:
            made[key] = Reference(path, answers=AnswerStore(CHECKPOINTS / "reference-cache"), **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct; tests that ask for it have the marker real."""
    return REAL_MODEL


_HEAD: dict[str, Any] = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 150 << 20}


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Address of a cluster of this test session: two logical GPUs, no dashboard, no metrics."""
    with cluster(**_HEAD) as found:
        yield found.address


@pytest.fixture(scope="module")
def metered_address() -> Iterator[str]:
    """Address of a cluster of this module that tells metrics."""
    with cluster(has_metrics=True, **_HEAD) as found:
        yield found.address


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> Path:
    """Interpreter that imports vLLM; tests that ask for it have the marker needs_vllm."""
    return Path(request.config.getoption("vllm_python"))


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uninitialised tensors hold NaN or an out-of-range integer instead of what memory had."""
    with poison(monkeypatch):
        yield


_EXIT_STATUS = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember what the tests came to, and have what they left behind told before plugins parse modules here:
    a traceback that is printed in the midst of that breaks the parser of Python 3.11."""
    session.config.stash[_EXIT_STATUS] = int(exitstatus)
    gc.collect()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process with the tests' own status.

    Threads of native libraries (gRPC's of Ray, UCX's) may outlive what they use while the interpreter ends:
    a run of all tests once crashed there, after its summary. Exit handlers run first (Ray's among them).
    """
    status = config.stash.get(_EXIT_STATUS, None)
    if status is None or "ray" not in sys.modules:
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
