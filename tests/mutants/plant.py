"""Plant one bug in this process: each Python process imports this at its start (startup/, by PYTHONPATH).

RAYK_MUTANT names the bug, RAYK_MUTANT_NOTES a file in which is told that the twin was called, and whether it
failed by itself: a twin that does not fit its target any more must not pass for a bug that was found.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.mutants.mutant import Mutant, Twin, find_target

WHICH, NOTES = "RAYK_MUTANT", "RAYK_MUTANT_NOTES"
CALLED, BROKE, GONE = "called", "broke", "gone"
Note = Callable[[str], None]


class Planter(MetaPathFinder):
    """Waits until the target's module is imported, and plants there before anybody has its names."""

    def __init__(self, mutant: Mutant, note: Note) -> None:
        self.mutant = mutant
        self._note = note

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own, with a loader that plants when it has loaded."""
        if fullname != self.mutant.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_plant(module: ModuleType) -> None:
            load(module)
            plant(self.mutant, self._note)

        spec.loader.exec_module = load_and_plant  # type: ignore[method-assign]
        return spec


def plant(mutant: Mutant, note: Note) -> Callable[[], None]:
    """Replace the target; returns what takes it back."""
    try:
        owner, name, original = find_target(mutant)
    except AttributeError as error:
        note(f"{GONE}: {error}")
        raise
    setattr(owner, name, mutant.value if mutant.twin is None else _wrong(original, mutant.twin, note))
    return lambda: setattr(owner, name, original)


def _wrong(original: Any, twin: Twin, note: Note) -> Any:
    """The twin in the form of the original."""
    if isinstance(original, staticmethod | classmethod):
        return type(original)(_noting(original.__func__, twin, note))
    if isinstance(original, property):
        assert original.fget is not None
        return property(_noting(original.fget, twin, note))
    return _noting(original, twin, note)


def _noting(original: Callable[..., Any], twin: Twin, note: Note) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrong(*args: Any, **options: Any) -> Any:
        note(CALLED)
        try:
            return twin(original, *args, **options)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[1:]  # Behind this function's own frame.
            if not where or where[-1].filename == twin.__code__.co_filename:
                note(f"{BROKE}: {error!r}")
            raise

    if inspect.iscoroutinefunction(twin):
        # Whoever looks must see a coroutine function.
        async def wrong_coroutine(*args: Any, **options: Any) -> Any:
            return await wrong(*args, **options)

        return functools.wraps(original)(wrong_coroutine)
    return wrong


def note_once(path: Path) -> Note:
    """Append lines to a file that several processes share, each line once a process."""
    noted: set[str] = set()

    def note(line: str) -> None:
        if line not in noted:
            noted.add(line)
            with path.open("a") as notes:
                notes.write(f"{line}\n")

    return note


def plant_here() -> None:
    """Plant the bug that the environment names, if it names one."""
    name = os.environ.get(WHICH)
    if name is None:
        return
    from tests.mutants.catalog import MUTANTS

    sys.meta_path.insert(0, Planter(MUTANTS[name], note_once(Path(os.environ[NOTES]))))
