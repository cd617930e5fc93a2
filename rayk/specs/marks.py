"""YAML read with marks: plain data, and the line on which each key or item stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from rayk.types.errors import SpecError

Path = tuple[str | int, ...]
"""Keys and list indexes from the document's root."""


MAX_DEPTH = 32
MAX_NODES = 50_000
"""Most nodes of a document, with its aliases written out."""
_MERGE = "tag:yaml.org,2002:merge"
_NOT_OF_ITS_TAG = (LookupError, AttributeError, ArithmeticError)
"""What PyYAML raises for `!!bool x` and its like, besides ValueError."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads `1e-3` as a float, as YAML 1.2 does, and within bounds."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0
        self.num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, one level deeper."""
        self.depth += 1
        self.count(self.peek_event())  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def count(self, place: Any) -> None:
        """One more node, at this depth. Raises MarkedYAMLError where that is too many or too deep."""
        self.num_nodes += 1
        if self.depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels"
        elif self.num_nodes > MAX_NODES:
            problem = f"more than {MAX_NODES:,} items, aliases written out"
        else:
            return
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


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
        """Return the place of the longest known prefix of `path`; an override replaces all below it."""
        prefixes = [path[:end] for end in range(len(path), -1, -1)]
        override = next((self.overrides[p] for p in prefixes if p in self.overrides), None)
        line = next((f"{self.source}:{self.lines[p]}" for p in prefixes if p in self.lines), self.source)
        return override or line


def parse_yaml(text: str, source: str) -> tuple[dict[str, Any], Marks]:
    """Read data and marks of a YAML mapping. Raises SpecError with the line on bad YAML."""
    marks = Marks(source=source)
    data = _parse(text, marks)
    if data is None:
        raise SpecError(problem="the file is empty", where=source, mend="write at least `model:`")
    if not isinstance(data, dict):
        raise SpecError(problem="the file must be a mapping of keys to values", where=f"{source}:1")
    return data, marks


def parse_scalar(text: str) -> Any:
    """Read the value part of a `--set KEY=VALUE`, read as YAML. Raises ValueError."""
    try:
        return _parse(text, Marks(source="value"))
    except SpecError as error:
        raise ValueError(error.problem) from error


def _parse(text: str, marks: Marks) -> Any:
    """Parse the document's data, None where there is none. Raises SpecError with the line."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        loader.depth = loader.num_nodes = 0
        return None if node is None else _build(loader, node, (), marks)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{marks.source}:{mark.line + 1}" if mark else marks.source
        raise SpecError(problem=f"not valid YAML: {error.problem}", where=where) from error
    except yaml.YAMLError as error:
        raise SpecError(problem=f"not valid YAML: {error}", where=marks.source) from error
    finally:
        if loader is not None:
            loader.dispose()


def _build(loader: _Loader, node: yaml.Node, path: Path, marks: Marks) -> Any:
    marks.lines.setdefault(path, node.start_mark.line + 1)
    loader.depth += 1
    loader.count(node)
    found: Any
    if isinstance(node, yaml.MappingNode):
        found = _build_mapping(loader, node, path, marks)
    elif isinstance(node, yaml.SequenceNode):
        found = [_build(loader, item, (*path, i), marks) for i, item in enumerate(node.value)]
    else:
        found = _scalar(loader, node, marks)
    loader.depth -= 1
    return found


def _scalar(loader: _Loader, node: yaml.Node, marks: Marks) -> Any:
    try:
        return loader.construct_object(node, deep=True)
    except (ValueError, *_NOT_OF_ITS_TAG) as error:  # a date that no calendar has, a number of 9,999 digits
        said = error if isinstance(error, ValueError) else f"this is no {node.tag.rpartition(':')[2]}"
        where = f"{marks.source}:{node.start_mark.line + 1}"
        raise SpecError(problem=f"not valid YAML: {said}", where=where) from error


def _build_mapping(loader: _Loader, node: yaml.MappingNode, path: Path, marks: Marks) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag == _MERGE:
            continue
        where = f"{marks.source}:{key_node.start_mark.line + 1}"
        key = _scalar(loader, key_node, marks) if isinstance(key_node, yaml.ScalarNode) else None
        if type(key) is int:
            key = str(key)  # the number of a layer
        if not isinstance(key, str):
            said = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "of several parts"
            raise SpecError(problem=f"key {said} is not a text", where=where)
        if key in result:
            raise SpecError(problem=f"key {key!r} is given twice", where=where)
        marks.lines[(*path, key)] = key_node.start_mark.line + 1
        result[key] = _build(loader, value_node, (*path, key), marks)
    merged: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag == _MERGE:
            for more, lines in _merged(loader, value_node, path, marks.source):
                # What is there already counts, and so do its lines.
                new = {key for key in more if key not in merged and key not in result}
                marks.lines.update(
                    (p, n) for p, n in lines.items() if len(p) > len(path) and p[len(path)] in new
                )
                merged = more | merged
    return merged | result


def _merged(
    loader: _Loader, node: yaml.Node, path: Path, source: str
) -> Iterator[tuple[dict[str, Any], dict[Path, int]]]:
    """Return what `<<` brings: a mapping, or several of which the first that has a key counts; each with its
    lines. Raises SpecError."""
    for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        own = Marks(source=source)
        found = _build(loader, one, path, own)
        if not isinstance(found, dict):
            where = f"{source}:{node.start_mark.line + 1}"
            raise SpecError(problem="`<<` merges mappings, and this is none", where=where, mend="<<: *anchor")
        yield found, own.lines
