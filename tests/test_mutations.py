"""The list of mutations fits the tree: each text stands exactly once, each named test exists."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache

import pytest
import yaml

from tests.mutants import ROOT, Result, count_old_text
from tests.mutation import Mutation
from tests.mutations import MUTATIONS


@cache
def names_in(file: str) -> set[str]:
    """Functions, classes and assigned names at a test module's top level."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_mutation_fits_the_tree(mutation: Mutation):
    assert count_old_text(ROOT, mutation) == 1
    assert mutation.old != mutation.new
    mutant = (ROOT / mutation.file).read_text().replace(mutation.old, mutation.new)
    if mutation.file.endswith(".yml"):
        yaml.safe_load(mutant)
    else:
        ast.parse(mutant)
    file, _, name = mutation.test.partition("::")
    assert name.split("[")[0].split("::")[0] in names_in(file)


def test_both_packages_are_mutated_enough():
    per_package = Counter("/".join(m.file.split("/")[:2]) for m in MUTATIONS)
    assert len(MUTATIONS) >= 20
    assert per_package["rayk/kv"] >= 10
    assert per_package["rayk/transfer"] >= 10
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
    assert len({(m.file, m.old, m.new, m.test) for m in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize(
    ("status", "verdict"), [(0, "survived"), (1, "killed"), (2, "broken"), (5, "broken")]
)
def test_only_failed_tests_kill(status: int, verdict: str):
    """pytest: 0 all passed, 1 some failed, 2 interrupted or not importable, 5 nothing collected."""
    assert Result(MUTATIONS[0], status, 0.1, "").verdict == verdict
