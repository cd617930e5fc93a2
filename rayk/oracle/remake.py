"""The command that wrote a tiny checkpoint, from what its folder says of itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from rayk.oracle.checkpoint import SUPPORTED, changed_files, read_marker
from rayk.oracle.tiny import FAMILIES


def checkpoint_commands(models: Iterable[str]) -> dict[str, list[str]]:
    """Folder -> the words of `rayk checkpoint ...` that write it again, of those it wrote."""
    commands = {model: checkpoint_command(model) for model in models}
    return {model: command for model, command in commands.items() if command}


def changed_checkpoints(models: Iterable[str]) -> dict[str, list[str]]:
    """Folder -> its files that are not as `rayk checkpoint` wrote them, of folders with such files."""
    changed = {model: changed_files(model) for model in models}
    return {model: names for model, names in changed.items() if names}


def checkpoint_command(folder: str) -> list[str]:
    """Empty where `rayk checkpoint` did not write what is in the folder, or this rayk has no such family."""
    parameters = read_marker(Path(folder)).get("parameters")
    if not _is_known(parameters) or changed_files(folder):
        return []
    family = parameters["family"]
    own = FAMILIES[family]
    options = [
        word
        for key, value in parameters["config"].items()
        if key not in own or own[key] != value
        for word in ("--set", f"{key}={_yaml(value)}")
    ]
    if parameters["seed"]:
        options += ["--seed", str(parameters["seed"])]
    if parameters["max_shard_size"] is not None:
        options += ["--max-shard-size", parameters["max_shard_size"]]
    if parameters["dtype"] != "float32":
        options += ["--dtype", parameters["dtype"]]
    return ["rayk", "checkpoint", family, folder, *options]


def _is_known(parameters: Any) -> TypeGuard[dict[str, Any]]:
    """Whether these are parameters of a checkpoint: anybody can write a marker."""
    if not isinstance(parameters, dict) or parameters.get("family") not in SUPPORTED:
        return False
    kinds = {"config": dict, "seed": int, "dtype": str, "max_shard_size": str | None}
    return all(name in parameters and isinstance(parameters[name], kind) for name, kind in kinds.items())


def _yaml(value: Any) -> str:
    """On one line, as --set reads it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=100_000)
    return text.removesuffix("\n").removesuffix("\n...")
