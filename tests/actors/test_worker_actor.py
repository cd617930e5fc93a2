"""What owners of workers call is what workers do, and neither needs torch to ask for it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable

from rayk.actors.worker import Worker
from rayk.actors.worker_actor import WorkerActor


def _public(cls: type) -> dict[str, list[str]]:
    functions = inspect.getmembers(cls, inspect.isfunction)
    return {name: _parameters(f) for name, f in functions if not name.startswith("_")}


def _parameters(function: Callable[..., object]) -> list[str]:
    # Ray adds one to a class that it made remote in this process.
    return [str(p) for p in inspect.signature(function).parameters.values() if not p.name.startswith("_")]


def test_an_actor_has_every_method_of_a_worker() -> None:
    assert _public(WorkerActor) == _public(Worker)
    # Of a class with one, Ray would run all methods on event loops.
    assert not [f for _, f in inspect.getmembers(WorkerActor) if inspect.iscoroutinefunction(f)]


def test_workers_are_asked_for_without_torch() -> None:
    loaded = "import rayk.actors.launch, rayk.actors.pool, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
