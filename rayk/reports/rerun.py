"""Give the commands that repeat a run or a bench in a work tree of rayk on any machine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayk.reports.files import parse_spec

if TYPE_CHECKING:
    from rayk.reports.result import Result

DROPPED = ("--out", "--resume", "--address")  # options of the machine or the folder; --resume takes no value


def run_commands(result: Result) -> str:
    """Write shell lines: the commit, the checkpoints that `rayk checkpoint` wrote, the run. Paths are
    relative to the work tree; a checkpoint that lay elsewhere goes to checkpoints/, and --set names it."""
    if not result.spec_yaml:
        return ""
    spec = parse_spec(result.spec_yaml)
    name = str(spec.get("name", "run"))
    lines = _checkout(result.environment)
    run = ["rayk", "run", "spec.yaml", "--out", f"runs/{name}-again"]
    made = _mapping(result.environment, "checkpoints")
    model = spec.get("model")
    # Only `model` can be given another place; what a matrix names is written where it lay.
    for folder, command in made.items():
        lines.append(shlex.join(_relative(word) if word == folder == model else word for word in command))
    if isinstance(model, str) and Path(model).is_absolute() and model in made:
        run += ["--set", f"model={_relative(model)}"]
    return "\n".join([*lines, shlex.join(run)])


def run_needs(result: Result) -> str:
    """Say what the commands need and do not bring."""
    texts = [
        "In a work tree of rayk, with spec.yaml from beside this report (its text is the report's last "
        "card): every default and override is in it."
        if result.spec_yaml
        else "The run's folder has no spec.yaml any more: its matrix, settings and prompts are lost."
    ]
    if "predicted" in result.environment:
        texts.insert(0, "This measures what is predicted here.")
    if str(result.environment.get("git_commit") or "").endswith("+changes"):
        texts.append("The run's work tree had changes that no commit has.")
    made = _mapping(result.environment, "checkpoints")
    lacking = [name for name in _mapping(result.environment, "inputs") if name not in made]
    if lacking:
        texts.append(
            f"It reads what no command here makes: {', '.join(lacking)} (hashes are under `inputs` in the "
            "environment)."
        )
    for folder, names in _mapping(result.environment, "changed_checkpoints").items():
        texts.append(
            f"{folder} was not as `rayk checkpoint` had written it: {', '.join(map(str, names))} had been "
            "changed."
        )
    return " ".join(texts)


def bench_commands(environment: Mapping[str, Any]) -> str:
    """Write shell lines: the commit, and the command line without its folder."""
    command = [str(word) for word in environment.get("command") or []]
    if not command:
        return ""
    program = Path(command[0]).name
    words = [program] if program == "rayk" else ["python", _in_tree(command[0])]
    return "\n".join([*_checkout(environment), shlex.join(words + _without_places(command[1:]))])


def _without_places(words: list[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        option, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif option in DROPPED:
            skip = not equals and option != "--resume"
        else:
            kept.append(word)
    return kept


def _in_tree(path: str) -> str:
    """Shorten a script's path as far as can be told: jobs/x.py of /a/b/jobs/x.py."""
    parts = Path(path).parts
    return str(Path(*parts[parts.index("jobs") :])) if "jobs" in parts else path


def _checkout(environment: Mapping[str, Any]) -> list[str]:
    commit = environment.get("git_commit")
    return [f"git checkout {str(commit).removesuffix('+changes')}"] if commit else []


def _mapping(environment: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of environment.json; empty where an older rayk, or somebody's edit, left no mapping."""
    found = environment.get(name)
    return found if isinstance(found, Mapping) else {}


def _relative(model: str) -> str:
    return f"checkpoints/{Path(model).name}" if Path(model).is_absolute() else model
