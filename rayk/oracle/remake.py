"""The command that wrote a tiny checkpoint, reconstructed from its folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from rayk.oracle.checkpoint import SUPPORTED, changed_files, changed_keys, read_marker


def checkpoint_commands(models: Iterable[str]) -> dict[str, list[str]]:
    """Folder -> the words of the `rayk checkpoint ...` that writes it again, if one wrote it."""
    commands = {model: checkpoint_command(model) for model in models}
    return {model: command for model, command in commands.items() if command}


def changed_checkpoints(models: Iterable[str]) -> dict[str, list[str]]:
    """Folder -> files that differ from what `rayk checkpoint` wrote, for folders with such files."""
    changed = {model: changed_files(model) for model in models}
    return {model: names for model, names in changed.items() if names}


def checkpoint_command(folder: str) -> list[str]:
    """Empty if `rayk checkpoint` did not write the folder's contents, or this rayk lacks the family."""
    parameters = read_marker(folder).get("parameters", {})
    if parameters.get("family") not in SUPPORTED or changed_files(folder):
        return []
    family = parameters["family"]
    values = parameters["config"]
    options = [
        word for key in changed_keys(family, values) for word in ("--set", f"{key}={_yaml(values[key])}")
    ]
    if parameters["seed"]:
        options += ["--seed", str(parameters["seed"])]
    if parameters.get("max_shard_size") is not None:
        options += ["--max-shard-size", parameters["max_shard_size"]]
    if parameters["dtype"] != "float32":
        options += ["--dtype", parameters["dtype"]]
    if "quantise" in parameters:
        options += ["--quantise", parameters["quantise"]]
    return ["rayk", "checkpoint", family, folder, *options]


def _yaml(value: Any) -> str:
    """Return the value on one line, as --set reads it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=100_000)
    return text.removesuffix("\n").removesuffix("\n...")
