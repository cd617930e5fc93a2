"""YAML read with marks: plain data, and the line on which each key or item stands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from rayk.types.errors import SpecError

Path = tuple[str | int, ...]
"""Keys and list indexes from the document's root."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads `1e-3` as a float, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """Where each path of a document comes from: `file:line`, or an override's own text."""

    source: str
    lines: dict[Path, int] = field(default_factory=dict)
    overrides: dict[Path, str] = field(default_factory=dict)

    def where(self, path: Path) -> str:
        """The place of the longest known prefix of `path`; an override replaces all below it."""
        prefixes = [path[:end] for end in range(len(path), -1, -1)]
        override = next((self.overrides[p] for p in prefixes if p in self.overrides), None)
        line = next((f"{self.source}:{self.lines[p]}" for p in prefixes if p in self.lines), self.source)
        return override or line


def parse_yaml(text: str, source: str) -> tuple[dict[str, Any], Marks]:
    """Data and marks of a YAML mapping. Raises SpecError with the line on bad YAML."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        marks = Marks(source=source)
        if node is None:
            raise SpecError(problem="the file is empty", where=source, mend="write at least `model:`")
        data = _build(loader, node, (), marks)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise SpecError(problem=f"not valid YAML: {error.problem}", where=where) from error
    except yaml.YAMLError as error:
        raise SpecError(problem=f"not valid YAML: {error}", where=source) from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise SpecError(problem="the file must be a mapping of keys to values", where=f"{source}:1")
    return data, marks


def parse_scalar(text: str) -> Any:
    """The value part of a `--set KEY=VALUE`, read as YAML. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _build(loader: _Loader, node: yaml.Node, path: Path, marks: Marks) -> Any:
    marks.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(loader, node, path, marks)
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, item, (*path, i), marks) for i, item in enumerate(node.value)]
    return loader.construct_object(node, deep=True)


def _build_mapping(loader: _Loader, node: yaml.MappingNode, path: Path, marks: Marks) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        where = f"{marks.source}:{key_node.start_mark.line + 1}"
        if type(key) is int:
            key = str(key)  # the number of a layer
        if not isinstance(key, str):
            raise SpecError(problem=f"key {key!r} is not a text", where=where)
        if key in result:
            raise SpecError(problem=f"key {key!r} is given twice", where=where)
        marks.lines[(*path, key)] = key_node.start_mark.line + 1
        result[key] = _build(loader, value_node, (*path, key), marks)
    return result
