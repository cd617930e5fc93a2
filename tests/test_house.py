"""The house rules hold, each rule catches a planted violation, and errors survive pickling."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import rayk.types.errors
from rayk.types.errors import RaykError
from tests import house, pages
from tests.each import each

RULES = [
    house.check_import_table,
    house.check_circles,
    house.check_homes,
    house.check_declared,
    house.check_docstrings,
    house.check_sentences,
    house.check_class_names,
    house.check_lengths,
    house.check_torch_free,
    pages.check_links,
    pages.check_files,
    pages.check_tests,
    pages.check_commands,
    pages.check_keys,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_is_in_order(rule: Callable[[Path], list[str]]) -> None:
    assert rule(house.ROOT) == []


def test_torch_free_modules_import_with_torch_blocked() -> None:
    """What the syntax tree promises, asked of Python itself."""
    names = house.torch_free_modules(house.ROOT)
    script = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=house.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def plant(tmp_path: Path) -> Callable[..., Path]:
    """Write files of a small house: `plant(**{"rayk/kv/specs.py": "import torch"})` -> its root."""

    def write(**files: str) -> Path:
        for name in [*files, *(f"{Path(n).parent}/__init__.py" for n in files)]:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files.get(name, '"""A package."""\n'))
        (tmp_path / "rayk").mkdir(exist_ok=True)
        (tmp_path / "rayk" / "__init__.py").touch()
        return tmp_path

    return write


Plant = Callable[..., Path]


@pytest.mark.parametrize(
    ("file", "source", "problem"),
    [
        ("rayk/types/a.py", "import rayk.kv", "types may not import kv"),
        ("rayk/types/a.py", "import numpy", "types imports numpy"),
        ("rayk/kv/a.py", "from rayk.models import config", "kv may not import models"),
        ("rayk/kv/a.py", "from rayk import models", "kv may not import models"),
        ("rayk/kv/a.py", "from ..models import config", "kv may not import models"),
        ("rayk/kv/__init__.py", "from ..models import config", "kv may not import models"),
        ("rayk/kv/deep/a.py", "from ...models import config", "kv may not import models"),
        ("rayk/kv/a.py", "def f():\n    import rayk.engine.loop", ":2: kv may not import engine"),
        ("rayk/kv/a.py", "class A:\n    import rayk.engine", ":2: kv may not import engine"),
        (
            "rayk/kv/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rayk.sched import x",
            ":3: kv may not import sched",
        ),
        ("rayk/kv/a.py", "try:\n    import rayk.sched\nexcept ImportError: ...", ":2: kv may not"),
        ("rayk/kv/a.py", "x = importlib.import_module('rayk.sched')", "kv may not import sched"),
        ("rayk/oracle/a.py", "import rayk.models", "oracle may not import models"),
        ("rayk/experiments/a.py", "import rayk.cli.main", "experiments may not import cli"),
        ("rayk/novel/__init__.py", "", "package novel has no row"),
        ("rayk/loose.py", "", "a module outside the packages"),
        ("rayk/kv/a.py", "from rayk import load", "import from the package that defines it"),
        ("rayk/__init__.py", "from rayk.engine import x", "at once instead of late"),
    ],
)
def test_import_table_catches(plant: Plant, file: str, source: str, problem: str) -> None:
    (violation,) = house.check_import_table(plant(**{file: source}))
    assert violation.startswith(file)
    assert problem in violation


def test_pages_and_their_commands_name_tests_that_are_there(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "`tests/a.py::test_b` `tests/a.py::test_c` `tests/b.py::test_b`"
    root = plant(**{"README.md": page, "tests/a.py": "def test_b(): ..."})
    assert pages.check_tests(root) == [
        "README.md: no test tests/a.py::test_c",
        "README.md: no test tests/b.py::test_b",
    ]
    monkeypatch.setattr(pages, "RUN_BY", {"make": "tests/a.py::test_c", "ray": "tests/a.py::test_b"})
    assert pages.check_commands(root) == ["RUN_BY: no test tests/a.py::test_c"]


def test_import_table_allows(plant: Plant) -> None:
    root = plant(
        **{
            "rayk/types/a.py": "import json\nfrom rayk.types.b import x",
            "rayk/kv/a.py": "import torch, rayk.types.a\nfrom rayk.parallel import shard",
            "rayk/kv/b.py": "from . import a\nfrom .a import x",
            "rayk/kv/deep/a.py": "from ..a import x\nfrom ...types import y",
            "rayk/experiments/a.py": "import rayk.oracle, rayk.actors, rayk.reports",
            "rayk/cli/a.py": "import rayk.experiments, rayk.transfer",
            "rayk/__init__.py": "from rayk.types import x\ndef f():\n    import rayk.engine",
        }
    )
    assert house.check_import_table(root) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("rayk/engine/a.py", "import ray"),
        ("rayk/engine/a.py", "def f():\n    from ray.util import placement_group"),
        ("rayk/actors/a.py", "from ray._private import state"),
        ("rayk/serve/a.py", "from ray.serve._private.constants import X"),
        ("jobs/a.py", "from ray import _raylet"),
        ("rayk/transfer/session.py", "from nixl._api import nixl_agent"),
        ("rayk/transfer/session.py", "import nixl_cu13"),
        ("rayk/attention/a.py", "import triton.language as tl"),
        ("rayk/actors/a.py", "import pandas as pd"),
        ("jobs/a.py", "import pandas as pd"),
        ("rayk/experiments/a.py", "import pyarrow"),
        ("rayk/cli/a.py", "import plotly.graph_objects"),
        ("rayk/models/a.py", "from transformers import AutoConfig"),
        ("rayk/experiments/a.py", "from tokenizers import Tokenizer"),
        ("rayk/engine/a.py", "import pydantic"),
    ],
)
def test_homes_catch(plant: Plant, file: str, source: str) -> None:
    (violation,) = house.check_homes(plant(**{file: source}))
    assert violation.startswith(file)
    assert "home: " in violation


def test_homes_allow(plant: Plant) -> None:
    root = plant(
        **{
            "rayk/actors/a.py": "import ray\nfrom transformers import AutoTokenizer",
            "rayk/actors/ray_private.py": "from ray._private import state",
            "rayk/transfer/nixl_agent.py": "import nixl_cu13",
            "rayk/kernels/op/triton.py": "import triton",
            "rayk/reports/a.py": "import pandas, pyarrow, plotly",
            "rayk/oracle/a.py": "import transformers, tokenizers",
            "jobs/a.py": "import ray",
            "tests/a.py": "import pandas",
            "rayk/engine/a.py": "import rayk.types, raylike",
        }
    )
    assert house.check_homes(root) == []


def test_what_is_not_declared_is_caught(plant: Plant) -> None:
    """Also inside functions; tools of developers do not count, extras of users do."""
    project = """[project]
    dependencies = ["PyYAML>=6", "ray[serve]>=2", "huggingface-hub", 'nixl-cu13; sys_platform == "linux"']
    optional-dependencies = {gguf = ["gguf>=1"], dev = ["hypothesis"]}"""
    right = "import os, yaml, ray.util, nixl_cu13, gguf, vllm\nfrom huggingface_hub.utils import tqdm"
    wrong = "def f():\n    from hypothesis import given\n    import grpc"
    root = plant(**{"pyproject.toml": project, "rayk/cli/a.py": right, "rayk/cli/b.py": wrong})
    assert house.check_declared(root) == [
        "rayk/cli/b.py:2: hypothesis is not in pyproject.toml",
        "rayk/cli/b.py:3: grpcio is not in pyproject.toml",
    ]


def test_circles_catch_imports_for_types_alone(plant: Plant) -> None:
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rayk.kv.a import A"
    files = {"rayk/kv/a.py": "import rayk.kv.b", "rayk/kv/b.py": "import rayk.kv.c", "rayk/kv/c.py": late}
    (violation,) = house.check_circles(plant(**files))
    assert all(f"rayk.kv.{name}" in violation for name in "abc")
    assert house.check_circles(plant(**(files | {"rayk/kv/c.py": "import rayk.types"}))) == []


def test_docstrings_catch(plant: Plant) -> None:
    root = plant(**{"rayk/kv/a.py": "", "rayk/types/__init__.py": "x = 1", "rayk/kv/deep/b.py": ""})
    (root / "rayk" / "kv" / "deep" / "__init__.py").unlink()
    assert house.check_docstrings(root) == [
        "rayk/__init__.py: no docstring",
        "rayk/kv/deep/__init__.py: missing",
        "rayk/types/__init__.py: no docstring",
    ]


def test_sentences_catch(plant: Plant) -> None:
    fine = '"""Seen from here it ends."""\n"""More.\n\nIt goes on."""\n"""Often it does."""\n'
    poor = {"rayk/kv/a.py": 'def f():\n    """See a/b.py:12."""', "rayk/kv/b.py": 'X = 1\n"""Of a block."""'}
    assert house.check_sentences(plant(**poor, **{"rayk/kv/c.py": fine})) == [
        "rayk/kv/a.py:2: no sentence: See a/b.py:12.",
        "rayk/kv/b.py:2: no sentence: Of a block.",
    ]


def test_class_names_catch(plant: Plant) -> None:
    twice = {"rayk/kv/a.py": "class A: ...\n", "rayk/kv/b.py": "\nclass A: ...\n"}
    assert house.check_class_names(plant(**twice)) == ["rayk/kv/a.py:1, rayk/kv/b.py:2: classes called A"]
    private = {"rayk/kv/a.py": "class A: ...\n", "rayk/kv/b.py": "class _A: ...\n"}
    assert house.check_class_names(plant(**private)) == ["rayk/kv/a.py:1, rayk/kv/b.py:1: classes called A"]


def test_lengths_catch(plant: Plant) -> None:
    root = plant(**{"rayk/kv/a.py": "x = 1\n" * 601, "tests/b.py": "x = 1\n" * 600})
    assert house.check_lengths(root) == ["rayk/kv/a.py: 601 lines (limit 600)"]
    assert len(house.check_lengths(root, max_lines=400)) == 2


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"rayk/kv/specs.py": "import torch"}, "rayk.kv.specs -> torch (line 1)"),
        ({"rayk/kv/specs.py": "def f():\n    import torch"}, "rayk.kv.specs:2: imports torch late"),
        (
            {
                "rayk/kv/specs.py": "from rayk.parallel import comm",
                "rayk/parallel/comm.py": "from torch import Tensor",
            },
            "rayk.kv.specs -> rayk.parallel.comm -> torch (line 1)",
        ),
        (
            {
                "rayk/kv/specs.py": "import rayk.parallel.shard",
                "rayk/parallel/shard.py": "",
                "rayk/parallel/__init__.py": "from rayk.parallel.comm import Comm",
                "rayk/parallel/comm.py": "import torch",
            },
            "rayk.kv.specs -> rayk.parallel -> rayk.parallel.comm -> torch (line 1)",
        ),
        (
            {"rayk/kv/specs.py": "", "rayk/kv/__init__.py": "import torch.nn"},
            "rayk.kv.specs -> rayk.kv -> torch (line 1)",
        ),
        ({"rayk/kv/maps.py": ""}, "rayk.kv.specs: listed as free of torch, but does not exist"),
    ],
)
def test_torch_free_catches(plant: Plant, files: dict[str, str], problem: str) -> None:
    (violation,) = house.check_torch_free(plant(**files), ["rayk.kv.specs"])
    assert problem in violation


def test_torch_free_allows_what_does_not_run(plant: Plant) -> None:
    root = plant(
        **{
            "rayk/kv/specs.py": (
                "from typing import TYPE_CHECKING\nimport rayk.parallel.comm\n"
                "if TYPE_CHECKING:\n    from torch import Tensor\n"
            ),
            "rayk/parallel/comm.py": "def f():\n    import torch\n",
        }
    )
    assert house.check_torch_free(root, ["rayk.kv.specs"]) == []


def test_torch_free_covers_whole_packages(plant: Plant) -> None:
    root = plant(**{"rayk/types/a.py": "", "rayk/types/b.py": "import torch"})
    (violation,) = house.check_torch_free(root, ["rayk.types"])
    assert "rayk.types.b" in violation


ERRORS: list[type[RaykError]] = [
    cls for _, cls in inspect.getmembers(rayk.types.errors, inspect.isclass) if issubclass(cls, RaykError)
]

_SAMPLES: dict[str, Any] = {
    "str": "text",
    "int": 7,
    "float": 1.5,
    "bool": True,
    "int | None": 3,
    "tuple[str, ...]": ("a", "b"),
    "tuple[str, ...] | None": ("a", "b"),
    "tuple[bytes, ...]": (b"a", b"b"),
    "tuple[tuple[str, str, str], ...]": (("a", "b", "c"), ("d", "e", "f")),
    "dict[str, str]": {"key": "value"},
}


def sample(cls: type[RaykError]) -> RaykError:
    """An instance whose every field holds something other than its default."""
    get_type_hints(cls)  # a misspelt annotation fails here
    fields = dataclasses.fields(cls)
    return cls(**{field.name: _SAMPLES[str(field.type)] for field in fields})


@each("cls", ERRORS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    "send",
    [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_errors_arrive_whole(cls: type[RaykError], send: Callable[[RaykError], RaykError]) -> None:
    """As themselves, with their fields and message: what a Ray call needs."""
    error = sample(cls)
    arrived = send(error)
    assert type(arrived) is cls
    assert arrived is not error
    assert dataclasses.asdict(arrived) == dataclasses.asdict(error)
    assert str(arrived) == str(error)
    with pytest.raises(cls):
        raise arrived


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    tree = rayk.types.errors.__doc__ or ""
    assert len(ERRORS) >= 14
    assert [cls.__name__ for cls in ERRORS if cls.__name__ not in tree] == []
