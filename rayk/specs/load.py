"""Reading a spec: YAML or a mapping, overrides, validation. Every error names its place."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rayk.models.hub import pinned
from rayk.specs.experiment import AXES, MAX_CELLS, ExperimentSpec, dotted_keys
from rayk.specs.marks import Marks, parse_scalar, parse_yaml
from rayk.specs.marks import Path as KeyPath
from rayk.specs.refusals import first_refusal, refusal, section_keys, shown, unknown_key
from rayk.specs.speculative import SECTION, SIDES
from rayk.types.errors import SpecError
from rayk.types.files import read_text

SPEC_BYTES = 1 << 20
LIST_KEYS = (
    *("checks", "faults", "prompts.random.input_tokens", "sampling.stop_token_ids", "sampling.stop"),
    *(f"{section}.pp_layers" for section in ("engine", "prefill", "decode")),
)
"""Keys whose value is itself a list: `--set KEY=[..]` sets them, and does not make an axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSpec:
    """A checked spec and the places of its keys."""

    spec: ExperimentSpec
    marks: Marks

    def default_folder(self) -> Path:
        """Tell where results go when nobody says: runs/<name>-<time>."""
        return Path("runs") / f"{self.spec.name}-{time.strftime('%Y%m%d-%H%M%S')}"

    def where(self, key: str) -> str:
        """Return the place of a dotted key: its axis if it is one, else where the base says it."""
        paths = [p for p in (*self.marks.lines, *self.marks.overrides) if p and p[-1] == key]
        axes = [p for p in paths if p[0] == "matrix"]
        return self.marks.where(axes[0] if axes else tuple(key.split(".")))


def load_spec(
    spec: str | Path | Mapping[str, Any] | ExperimentSpec,
    overrides: Sequence[str] = (),
    *,
    source: str = "spec",
) -> LoadedSpec:
    """Read a file or a mapping, override (`KEY=VALUE`) and validate.

    `source` names a mapping in messages. Raises SpecError naming file:line.
    """
    data, marks = _read(spec, source)
    for text in overrides:
        _override(data, marks, text)
    for key in ("matrix", "exclude"):
        data.setdefault(key, [])
    _normalise_matrix(data, marks)
    spec = _validate(data, marks)
    _check_number_of_cells(spec, marks)
    _validate_axis_values(spec, data, marks)
    _validate_exclude(spec, data, marks)
    return LoadedSpec(spec=spec, marks=marks)


def with_models(loaded: LoadedSpec, names: Mapping[str, str]) -> LoadedSpec:
    """Return the spec with its models, and those of drafters, by other names, wherever it says them."""

    def new(given: Any) -> Any:
        return [names.get(m, m) for m in given] if isinstance(given, list) else names.get(given, given)

    def renamed(point: dict[str, Any]) -> dict[str, Any]:
        return {key: new(given) if key in _MODELS else given for key, given in point.items()}

    def drafting(section: Any) -> Any:
        return None if section is None else section.model_copy(update={"model": new(section.model)})

    spec = loaded.spec
    changed: dict[str, Any] = {
        "model": new(spec.model),
        "matrix": [renamed(matrix) for matrix in spec.matrix],
        "exclude": [renamed(rule) for rule in spec.exclude],
        SECTION: drafting(spec.speculative),
    }
    for side in SIDES:
        own = getattr(spec, side)
        changed[side] = own.model_copy(update={SECTION: drafting(own.speculative)})
    return replace(loaded, spec=spec.model_copy(update=changed))


def with_pinned_drafters(loaded: LoadedSpec) -> LoadedSpec:
    """Return the spec with the hub's names of drafters as they mean the same everywhere from now on, fetched.
    Raises CheckpointError."""
    return with_models(loaded, {name: pinned(name) for name in loaded.spec.drafters()})


_MODELS = ("model", *(f"{side}{SECTION}.model" for side in ("", *(f"{name}." for name in SIDES))))
"""Keys that name models."""


def dump_spec(spec: ExperimentSpec) -> str:
    """Return the resolved spec as YAML that `load_spec` reads back to an equal spec."""
    data = spec.model_dump(mode="json")
    data["prompts"] = {k: v for k, v in data["prompts"].items() if v is not None}
    return yaml.safe_dump(data, sort_keys=False, width=100)


def renew_spec(text: str) -> str:
    """Return a spec that `dump_spec` once wrote, as it would be written now: keys added since have their
    defaults.

    Text that is no valid spec any more stays as it is.
    """
    try:
        return dump_spec(load_spec(parse_yaml(text, "spec")[0]).spec)
    except (SpecError, AttributeError, TypeError, ValueError):
        return text


def _read(spec: str | Path | Mapping[str, Any] | ExperimentSpec, source: str) -> tuple[dict[str, Any], Marks]:
    if isinstance(spec, ExperimentSpec):
        return spec.model_dump(), Marks(source=source)
    return read_spec_data(spec, source)


def read_spec_data(spec: str | Path | Mapping[str, Any], source: str) -> tuple[dict[str, Any], Marks]:
    """Read a file, which names what has no name, or copy a mapping. Raises SpecError."""
    if isinstance(spec, Mapping):
        return copy.deepcopy(dict(spec)), Marks(source=source)
    path = Path(spec)
    try:
        text = read_text(path, SPEC_BYTES)
    except FileNotFoundError as error:
        raise SpecError(problem="no such spec file", where=str(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(problem=f"cannot read the spec file: {error}", where=str(path)) from error
    data, marks = parse_yaml(text, str(path))
    data.setdefault("name", path.stem)
    return data, marks


# --- overrides ------------------------------------------------------------------------------------


def parse_override(text: str) -> tuple[str, Any, str]:
    """Parse KEY=VALUE: the key, its value, and the place that messages name. Raises SpecError."""
    key, equals, raw = text.partition("=")
    key, where = key.strip(), f"--set {text}"
    if not equals or not key:
        raise SpecError(problem="not of the form KEY=VALUE", where=where)
    try:
        return key, parse_scalar(raw), where
    except ValueError as error:
        raise SpecError(problem=f"the value is {error}", where=where) from error


def _override(data: dict[str, Any], marks: Marks, text: str) -> None:
    key, value, where = parse_override(text)
    if key.startswith("matrix."):
        key = key.removeprefix("matrix.")
        _set_axis(data, marks, key, value, where)
    elif _is_axis(data, key) or (key in AXES and isinstance(value, list) and key not in LIST_KEYS):
        _set_axis(data, marks, key, value, where)
    else:
        _set_base(data, marks, key, value, where)


def _matrices(data: dict[str, Any]) -> list[tuple[KeyPath, Any]]:
    matrix = data.get("matrix") or []
    if isinstance(matrix, list):
        return [(("matrix", i), m) for i, m in enumerate(matrix)]
    return [(("matrix",), matrix)]


def _is_axis(data: dict[str, Any], key: str) -> bool:
    return any(isinstance(m, dict) and key in m for _, m in _matrices(data))


def _set_axis(data: dict[str, Any], marks: Marks, key: str, value: Any, where: str) -> None:
    if not data.get("matrix"):
        data["matrix"] = {}
    for path, matrix in [(("matrix",), data["matrix"])] if not data["matrix"] else _matrices(data):
        if isinstance(matrix, dict):
            matrix[key] = value
            marks.overrides[(*path, key)] = where


def _set_base(data: dict[str, Any], marks: Marks, key: str, value: Any, where: str) -> None:
    if key == "prompts.file" and isinstance(data.get("prompts"), dict):
        data["prompts"].pop("random", None)  # one source of prompts replaces the other
    set_key(data, marks, key, value, where)


def set_key(
    data: dict[str, Any],
    marks: Marks,
    key: str,
    value: Any,
    where: str,
    grammar: type[BaseModel] = ExperimentSpec,
) -> None:
    """Set a dotted key of a file's data. Raises SpecError where the file has no such key."""
    if key not in set(dotted_keys(grammar)) and key not in section_keys(grammar):
        raise unknown_key(key, sorted(dotted_keys(grammar)), where, grammar=grammar)
    *sections, leaf = key.split(".")
    target = data
    for name in sections:
        if not isinstance(target.get(name), dict):
            target[name] = {}
        target = target[name]
    target[leaf] = value
    marks.overrides[tuple(key.split("."))] = where


# --- matrix and exclude ---------------------------------------------------------------------------


def _normalise_matrix(data: dict[str, Any], marks: Marks) -> None:
    """Make `matrix` a list of {axis: list of values}; unknown and empty axes are errors."""
    matrices: list[dict[str, list[Any]]] = []
    for path, matrix in _matrices(data):
        if not isinstance(matrix, dict):
            raise SpecError(
                problem=f"matrix must map axes to values, got {shown(matrix)}", where=marks.where(path)
            )
        axes: dict[str, list[Any]] = {}
        for key, value in matrix.items():
            where = marks.where((*path, key))
            _check_axis(key, value, where)
            axes[key] = value if isinstance(value, list) else [value]
        matrices.append(axes)
    data["matrix"] = matrices


def _check_axis(key: str, value: Any, where: str) -> None:
    if key in AXES:
        if value in ([], None):
            raise SpecError(problem=f"axis {key} is empty", where=where, mend="give it a value")
        return
    if key in section_keys() and isinstance(value, dict):
        names = ", ".join(f"{key}.{name}" for name in value)
        raise SpecError(
            problem=f"matrix key {key!r} is a section, not an axis", where=where, mend=f"write {names}"
        )
    raise _unknown_axis(key, where)


def _check_number_of_cells(spec: ExperimentSpec, marks: Marks) -> None:
    """Before any is built."""
    count = sum(math.prod(map(len, matrix.values())) for matrix in spec.matrix)
    if count > MAX_CELLS:
        raise SpecError(
            problem=f"the matrix has {count:,} cells, and at most {MAX_CELLS:,} are run at once",
            where=marks.where(("matrix",)),
            mend="fewer axes, fewer values, or several experiments",
        )


def _validate_axis_values(spec: ExperimentSpec, data: dict[str, Any], marks: Marks) -> None:
    flat = not isinstance(data.get("matrix"), list) or ("matrix", 0) not in marks.lines
    for m, matrix in enumerate(spec.matrix):
        for key, values in matrix.items():
            for i, value in enumerate(values):
                path: KeyPath = ("matrix", key, i) if flat else ("matrix", m, key, i)
                _validate_value(spec, key, value, marks.where(path))


def _validate_exclude(spec: ExperimentSpec, data: dict[str, Any], marks: Marks) -> None:
    del data
    for i, point in enumerate(spec.exclude):
        for key, value in point.items():
            where = marks.where(("exclude", i, key))
            if key not in AXES:
                raise _unknown_axis(key, where)
            for item in value if isinstance(value, list) and key not in LIST_KEYS else [value]:
                _validate_value(spec, key, item, where)


def _validate_value(spec: ExperimentSpec, key: str, value: Any, where: str) -> None:
    try:
        apply_point(spec, {key: value})
    except ValidationError as error:
        first = error.errors()[0]
        loc = ".".join(str(p) for p in first["loc"]) or key
        raise refusal(first, loc, where) from error


def apply_point(spec: ExperimentSpec, point: Mapping[str, Any]) -> ExperimentSpec:
    """Lay `point` over the base: the spec of one cell. Raises pydantic's ValidationError."""
    data = spec.model_dump(exclude={"matrix", "exclude", "checkpoints"})
    for key, value in point.items():
        *sections, leaf = key.split(".")
        target = data
        for name in sections:
            if target[name] is None:
                target[name] = {}
            target = target[name]
        target[leaf] = value
    return ExperimentSpec.model_validate(data)


# --- errors ---------------------------------------------------------------------------------------


def _validate(data: dict[str, Any], marks: Marks) -> ExperimentSpec:
    try:
        return ExperimentSpec.model_validate(data)
    except ValidationError as error:
        raise first_refusal(error, marks) from error


def _unknown_axis(key: str, where: str) -> SpecError:
    if key in set(dotted_keys()):
        return SpecError(problem=f"{key} cannot be an axis", where=where, mend=f"write `{key}:` at the top")
    return unknown_key(key, AXES, where, what="axis")
