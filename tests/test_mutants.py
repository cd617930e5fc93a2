"""What plants bugs plants them, and does not take a twin that fails by itself for a bug that was found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.__main__ import Result
from tests.mutants.mutant import Mutant
from tests.mutants.plant import CALLED, Planter, note_once, plant

TOY = """
LIMIT = 3
def double(x): return 2 * x
async def wait(x): return x
class Toy:
    def method(self, x): return x + LIMIT
    @property
    def size(self): return 4
    @staticmethod
    def free(x): return x
    @classmethod
    def make(cls, x): return cls.__name__, x
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that is not imported yet."""
    (tmp_path / "toy_of_mutants.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    yield "toy_of_mutants"
    sys.modules.pop("toy_of_mutants", None)


def mutant(target: str, twin: Callable[..., Any] | None = None, value: Any = None) -> Mutant:
    return Mutant("a bug", target, ("tests/test_x.py",), twin, value)


def test_twins_take_the_place_of_whatever_has_a_name(toy: str) -> None:
    module, notes = importlib.import_module(toy), []
    plant(mutant(f"{toy}:double", lambda original, x: original(x) + 1), notes.append)
    assert module.double(2) == 5
    assert notes == [CALLED]
    plant(mutant(f"{toy}:Toy.method", lambda original, self, x: original(self, 10 * x)), notes.append)
    assert module.Toy().method(1) == 13
    plant(mutant(f"{toy}:Toy.size", lambda original, self: -original(self)), notes.append)
    assert module.Toy().size == -4
    plant(mutant(f"{toy}:Toy.free", lambda original, x: [original(x)]), notes.append)
    assert module.Toy.free(1) == [1]
    plant(mutant(f"{toy}:Toy.make", lambda original, cls, x: original(cls, x)[::-1]), notes.append)
    assert module.Toy.make(1) == (1, "Toy")
    take_back = plant(mutant(f"{toy}:LIMIT", value=5), notes.append)
    assert module.Toy().method(1) == 15
    take_back()
    assert module.LIMIT == 3


def test_a_bug_is_planted_before_anybody_has_the_name(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planter = Planter(mutant(f"{toy}:double", lambda original, x: -original(x)), lambda line: None)
    monkeypatch.setattr(sys, "meta_path", [planter, *sys.meta_path])
    names: dict[str, Any] = {}
    exec(f"from {toy} import double", names)
    assert names["double"](1) == -2


def test_a_name_that_is_gone_is_told(toy: str, tmp_path: Path) -> None:
    note = note_once(tmp_path / "notes")
    with pytest.raises(AttributeError, match="is gone"):
        plant(mutant(f"{toy}:Toy.old_name", lambda original: None), note)
    assert Result("a bug", 1, (tmp_path / "notes").read_text(), 0.1, "").verdict == "target gone"


def test_a_twin_that_fails_by_itself_is_told_apart(toy: str, tmp_path: Path) -> None:
    module, note = importlib.import_module(toy), note_once(tmp_path / "notes")
    plant(mutant(f"{toy}:double", lambda original, old, arguments: original(old)), note)
    with pytest.raises(TypeError):
        module.double(1)
    assert Result("a bug", 1, (tmp_path / "notes").read_text(), 0.1, "").verdict == "twin broken"


@pytest.mark.parametrize(
    ("status", "notes", "verdict"),
    [
        (1, CALLED, "killed"),
        (0, CALLED, "survived"),
        (1, "", "never called"),
        (2, CALLED, "tests did not run"),
        (5, CALLED, "tests did not run"),
    ],
)
def test_only_failed_tests_that_called_the_twin_kill(status: int, notes: str, verdict: str) -> None:
    """pytest: 0 all passed, 1 some failed, 2 interrupted or not importable, 5 nothing collected."""
    assert Result("a bug", status, notes, 0.1, "").verdict == verdict
