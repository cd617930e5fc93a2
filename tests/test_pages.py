"""README.md and docs: commands and their options exist, examples are right, and the quick commands run.

tests/test_house.py checks that links, files, keys of specs and the tests of commands are there.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from jobs.gpu.rows import Rows
from rayk.cli.main import app
from rayk.costs.roofline import Hardware
from rayk.costs.stored import read
from rayk.specs import load_spec
from rayk.specs.plan import load_plan
from tests import house, pages
from tests.markers import thorough
from tests.pages import ROOT, Command
from tests.reports.synthetic import write_run

RAYK: Any = typer.main.get_command(app)
COMMANDS = [command for page in pages.pages() for command in pages.commands(page)]


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8192


def test_pages_say_first_what_they_are_for_and_the_readme_links_them() -> None:
    readme, *others = pages.pages()
    linked = readme.read_text(encoding="utf-8")
    for page in others:
        assert re.match(r"This page [^\n]+\.\n\n# ", page.read_text(encoding="utf-8")), page.name
        assert f"(docs/{page.name})" in linked, page.name


@cache
def targets() -> frozenset[str]:
    lines = re.findall(r"^([a-z][\w -]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(name for line in lines for name in line.split())


def options(command: Any) -> set[str]:
    """Those of a command of click's, and of those above it."""
    return {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}


def problem(command: Command) -> str | None:
    """What of a command is not there."""
    program, *words = command.words
    flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    if program == "make":
        names = [word for word in words if "=" not in word]
        return next((f"no target {name}" for name in names if name not in targets()), None)
    if program == "rayk":
        known = RAYK.commands.get(words[0])
        return f"no command {words[0]}" if known is None else missing(flags, options(known))
    if program == "ray":
        return missing_of_ray(words)
    if program == "python" and words[0].startswith("jobs/"):
        source = (ROOT / words[0]).read_text(encoding="utf-8")
        known = {flag for flag in flags if flag in source or flag[2:].replace("-", "_") in source}
        if "benchmarks.harness import" in source:  # which has options of its own
            harness = (ROOT / "jobs/benchmarks/harness.py").read_text(encoding="utf-8")
            known |= {flag for flag in flags if f'"{flag}"' in harness}
        return missing(flags, known)
    return None


def missing(flags: list[str], known: set[str]) -> str | None:
    return next((f"no option {flag}" for flag in flags if flag not in known), None)


def missing_of_ray(words: list[str]) -> str | None:
    command = importlib.import_module("ray.scripts.scripts").cli
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if hasattr(command, "commands"):
        return f"no command of Ray's {words}"
    own = words[: words.index("--")] if "--" in words else words
    return missing([word.partition("=")[0] for word in own if word.startswith("--")], options(command))


def test_commands_and_their_options_exist() -> None:
    assert {str(command): found for command in COMMANDS if (found := problem(command))} == {}


def test_a_command_that_is_not_there_is_found() -> None:
    for words, told in {
        "make sing": "no target sing",
        "rayk sing": "no command sing",
        "rayk run a.yaml --sing": "no option --sing",
        "ray sing": "no command of Ray's ['sing']",
        "ray job submit --sing -- a --b": "no option --sing",
        "python jobs/benchmarks/conv_state.py --sing": "no option --sing",
    }.items():
        assert problem(Command("a page", tuple(words.split()))) == told


def test_results_of_benchmarks_end_with_the_commands_that_make_them() -> None:
    for page in sorted((ROOT / "jobs/benchmarks/results").glob("*.md")):
        _, found, lines = page.read_text(encoding="utf-8").rpartition("\nReproduce:\n\n")
        assert found, f"{page.name} does not say how to make it again"
        for line in lines.splitlines():
            assert line.startswith("    "), f"{page.name} does not end with its commands: {line}"
            words = shlex.split(line)
            if words[0] != "git":
                assert problem(Command(page.name, tuple(words[words.index("python") :]))) is None, line


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = next(re.finditer(r"^\.PHONY: (.*)$", makefile, re.MULTILINE))[1].split()
    assert set(phony) == targets()
    assert set(re.findall(r'@echo "make ([\w-]+) ', makefile)) == targets() - {"help", "venv"}


def test_architecture_names_every_package_and_where_each_type_is() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(house.IMPORTS)
    types = re.findall(r"`([A-Z]\w+)` \(`([\w/.]+)`\)", text)
    assert len(types) >= 8
    for name, file in types:
        assert f"\nclass {name}" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


def unknown_names(text: str) -> list[str]:
    """Classes and methods in backticks that the file behind them in backticks lacks."""
    found = []
    for name, method, file in re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`[^`(]*\(`([\w/]+\.py)`", text):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        members = {getattr(node, "name", "") for body in bodies for node in body}
        if not bodies or (method and method not in members):
            found.append(f"{file} has no {name}{'.' if method else ''}{method}")
    return found


def test_architecture_names_classes_and_methods_that_are_there() -> None:
    steps, _, behind = pages.section("docs/architecture.md", "## The life of a request").partition(
        "```mermaid"
    )
    drawn = set(re.findall(r"\w+\.py", behind.partition("```")[0]))
    assert len(drawn) >= 10
    assert drawn <= {file.name for file in (ROOT / "rayk").rglob("*.py")}
    names = re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", steps)
    assert len(names) >= 10
    assert unknown_names(steps) == []
    for name in names:
        assert re.search(rf"`{re.escape(name)}`[^`(]*\(`", steps), f"{name} has no file behind it"
        wrong = unknown_names(steps.replace(f"`{name}`", f"`{name}X`"))
        assert wrong, name
        assert all(f"{name}X" in line for line in wrong), wrong


def test_specs_of_pages_are_specs() -> None:
    """Whole ones as they stand, parts of one on top of a small one, or of the plan before; data sheets."""
    small = {"name": "a", "model": "m", "prompts": {"random": {"count": 1, "input_tokens": [5]}}}
    small |= {"checks": ["kv_values"]}
    num, plan = 0, {}
    for page in pages.pages():
        for block in pages.blocks(page.read_text(encoding="utf-8"), "yaml"):
            part = yaml.safe_load(block)
            num += 1
            if "tflops" in part:
                read(Hardware, part, str(page))
            elif "slo" in part or "search" in part:
                plan = part if "slo" in part else plan | part
                load_plan(plan)
            else:
                load_spec(part if "model" in part else small | part)
    assert num >= 8


def test_python_of_pages_imports_what_is_there() -> None:
    for page in pages.pages():
        for block in pages.blocks(page.read_text(encoding="utf-8"), "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom):
                    module = importlib.import_module(str(node.module))
                    assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@thorough
@pytest.mark.timeout(600)
def test_quick_commands_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a", "runs/b", "runs/job"):
        write_run(tmp_path / name)
    Rows(tmp_path / "runs/gpu-day").write_tables({})
    CliRunner().invoke(app, ["checkpoint", "qwen3", "checkpoints/qwen3-tiny"])
    quick = list(dict.fromkeys(c.words for c in COMMANDS if c.fenced and c.is_quick and not c.needs))
    assert len(quick) > 20
    for _, *arguments in quick:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (arguments, result.output, result.exception)
