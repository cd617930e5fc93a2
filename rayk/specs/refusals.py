"""Tell what pydantic refuses of a file as sentences that name the place, the nearest key and the mend."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from rayk.specs.experiment import AXES, ExperimentSpec, dotted_keys, section_model
from rayk.specs.marks import Marks
from rayk.types.errors import SpecError, shortened

SHOWN_CHARACTERS = 200  # of a value that is refused
Grammar = type[BaseModel]


def first_refusal(error: ValidationError, marks: Marks, grammar: Grammar = ExperimentSpec) -> SpecError:
    """Tell the first error of a whole file, with its line; `grammar` is the file's model."""
    # Unknown keys first: a misspelt key also makes a required one look missing.
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    return refusal(first, ".".join(map(str, first["loc"])), marks.where(first["loc"]), grammar)


def refusal(error: Any, key: str, where: str, grammar: Grammar = ExperimentSpec) -> SpecError:
    """Tell one pydantic error as a sentence."""
    if error["type"] == "extra_forbidden":
        *sections, name = map(str, error["loc"])
        if not sections and name in AXES and grammar is ExperimentSpec:
            return SpecError(problem=f"dotted key {name!r} outside `matrix`", where=where, mend=_nested(name))
        valid = keys_of(error["loc"][:-1], grammar)
        return unknown_key(name, valid, where, section=".".join(sections), grammar=grammar)
    # pydantic also names the member of a union ("constrained-float"): no key of ours.
    key = ".".join(part for part in key.split(".") if part.isidentifier() or part.isdigit())
    if error["type"] == "missing":
        return SpecError(problem=f"{key} is missing", where=where, mend=f"add `{key}:`")
    if error["type"] == "value_error":
        problem = f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
        return SpecError(problem=problem, where=where)
    message = error["msg"].replace("Input should", "must").replace("List should", "must")
    message = message.replace("Value should", "must").replace("Dictionary should", "must")
    message = message.replace(" after validation, not 0", "")
    message = message.replace("String should", "must").replace(
        "valid dictionary or instance of", "section like"
    )
    mend = ""
    if error["type"] == "literal_error":
        choices = [c.strip(" '") for c in error["ctx"]["expected"].replace(" or ", ",").split(",")]
        close = difflib.get_close_matches(str(error["input"])[:SHOWN_CHARACTERS], choices, n=1)
        mend = f"did you mean {close[0]!r}?" if close else ""
        message = message.replace("must be", "must be one of")
    return SpecError(problem=f"{key} {message}, got {shown(error['input'])}", where=where, mend=mend)


def shown(value: Any) -> str:
    """Return a refused value as a message names it."""
    return shortened(repr(value), SHOWN_CHARACTERS)


def unknown_key(
    key: str,
    valid: Sequence[str],
    where: str,
    *,
    section: str = "",
    what: str = "key",
    grammar: Grammar = ExperimentSpec,
) -> SpecError:
    """Refuse a key, and name the nearest one of `valid`."""
    # First `tp` for `prefill.tp`, or a key put in the wrong section; then misspellings.
    close = [k for k in dotted_keys(grammar) if k.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    close = close or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    mend = f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"
    inside = f" in {section!r}" if section else ""
    return SpecError(problem=f"unknown {what} {key!r}{inside}", where=where, mend=mend)


def keys_of(path: Sequence[str | int], grammar: Grammar = ExperimentSpec) -> list[str]:
    """List the valid keys of the section at `path`."""
    model: Any = grammar
    for name in path:
        if name not in model.model_fields:
            continue  # the place in a list, or the key of a mapping
        model = _model_within(model.model_fields[name].annotation)
        assert model is not None, path
    return list(model.model_fields)


def _model_within(annotation: Any) -> Grammar | None:
    """Find the model of a section, or that of a list's or a mapping's items."""
    found = section_model(annotation)
    inner = (_model_within(part) for part in getattr(annotation, "__args__", ()))
    return found or next((model for model in inner if model is not None), None)


def section_keys(grammar: Grammar = ExperimentSpec) -> set[str]:
    """Return the dotted names of the sections of a file."""
    return {key.rpartition(".")[0] for key in dotted_keys(grammar) if "." in key}


def _nested(key: str) -> str:
    section, _, leaf = key.rpartition(".")
    return f"write `{section}: {{{leaf}: ...}}`, or put it in `matrix`"
