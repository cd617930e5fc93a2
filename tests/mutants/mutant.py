"""What a bug to plant is."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Twin = Callable[..., Any]
_NOTHING: Any = object()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong twin, or one wrong value of a constant."""

    name: str
    """What it does wrong."""
    target: str
    """module:name or module:Class.name of what it takes the place of."""
    tests: tuple[str, ...]
    """pytest ids; at least one of these tests must fail."""
    twin: Twin | None = None
    """Called with the original function before all arguments; on the class of a class method's, too."""
    value: Any = None
    """What a constant is instead, where there is no twin."""

    @property
    def module(self) -> str:
        """Name of the module in which the target is."""
        return self.target.partition(":")[0]


class Catalog:
    """Mutants of one part of rayk, in the order in which they are written down."""

    def __init__(self, tests: str) -> None:
        self.mutants: list[Mutant] = []
        self._tests = tests

    def twin(self, name: str, target: str, *tests: str) -> Callable[[Twin], Twin]:
        """Decorate the wrong twin of a target; the tests stand below the catalog's folder of tests."""

        def keep(twin: Twin) -> Twin:
            self.mutants.append(Mutant(name, target, self._ids(tests), twin=twin))
            return twin

        return keep

    def constant(self, name: str, target: str, value: Any, *tests: str) -> None:
        """Give a constant a wrong value."""
        self.mutants.append(Mutant(name, target, self._ids(tests), value=value))

    def _ids(self, tests: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{self._tests}/{test}" for test in tests)


def find_target(mutant: Mutant) -> tuple[Any, str, Any]:
    """(what holds the target, the target's name there, the target as it stands there).

    Raises:
        AttributeError: the module has no such name.
    """
    owner: Any = importlib.import_module(mutant.module)
    *path, name = mutant.target.partition(":")[2].split(".")
    for part in path:
        owner = getattr(owner, part)
    if name not in vars(owner):
        raise AttributeError(f"{mutant.target} is gone: {owner!r} has no {name}")
    return owner, name, inspect.getattr_static(owner, name)
