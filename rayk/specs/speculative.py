"""The section `speculative` of a spec: whether engines draft, how, and what of it a cell heeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_type_hints

from pydantic import create_model

from rayk.specs.grammar import ModelPath, StrictModel, checked
from rayk.types.speculative import HEEDED, HEEDED_BY_ALL, METHODS, SpeculativeConfig

SECTION = "speculative"
SIDES = ("prefill", "decode")
NONE = "none"
"""Method of engines that draft nothing: what no method is, and how a side says so where the spec has one."""


def _fields(*, of_side: bool) -> dict[str, Any]:
    """Name -> (type, default) of what a section has: the fields of SpeculativeConfig. `of_side`: of a side's
    own, where None is what the spec's section says."""
    hints = get_type_hints(SpeculativeConfig, include_extras=True)
    found: dict[str, Any] = {"method": (Literal[(NONE, *METHODS)] | None, None)}
    for option in fields(SpeculativeConfig):
        if option.name == "method":
            continue
        kind = ModelPath | None if option.name == "model" else checked(hints[option.name]) | None
        found[option.name] = kind, None if of_side else option.default
    return found


if TYPE_CHECKING:

    class SpeculativeSpec(StrictModel):
        """How engines of both sides draft. Without a method, or with num_tokens null, they do not."""

        def __getattr__(self, name: str) -> Any: ...

    class SideSpeculative(StrictModel):
        """How one side's engines draft. None means: as the spec's section says."""

        def __getattr__(self, name: str) -> Any: ...

else:
    SpeculativeSpec = create_model(
        "SpeculativeSpec", __base__=StrictModel, __module__=__name__, **_fields(of_side=False)
    )
    SideSpeculative = create_model(
        "SideSpeculative", __base__=StrictModel, __module__=__name__, **_fields(of_side=True)
    )

KEYS = tuple(SpeculativeSpec.model_fields)


class DraftingSpec(Protocol):
    """A spec, as far as this module reads it."""

    speculative: Any
    mode: Any
    prefill: Any
    decode: Any


def sides_of(spec: DraftingSpec) -> tuple[str, ...]:
    """Name the sides whose engines a cell of this spec has."""
    return ("prefill",) if spec.mode == "aggregated" else ("prefill", "decode")


def drafts_of(spec: DraftingSpec, side: str) -> SpeculativeConfig | None:
    """Make the settings of a side's engines; None: they draft nothing. A side that names another method has
    of the spec's section only what all methods heed."""
    values = _values(spec, side)
    method = values.pop("method")
    if method == NONE or values["num_tokens"] is None:
        return None
    return SpeculativeConfig(
        method=method, **{key: value for key, value in values.items() if key in HEEDED[method]}
    )


def _values(spec: DraftingSpec, side: str) -> dict[str, Any]:
    shared: dict[str, Any] = spec.speculative.model_dump()
    own = _own(spec, side)
    method = own.get("method") or shared["method"] or NONE
    if method != (shared["method"] or NONE):
        defaults = SpeculativeSpec().model_dump()
        shared = {key: shared[key] if key in HEEDED_BY_ALL else defaults[key] for key in KEYS}
    return shared | {key: value for key, value in own.items() if value is not None} | {"method": method}


def _own(spec: DraftingSpec, side: str) -> dict[str, Any]:
    own = getattr(spec, side).speculative
    return {} if own is None else dict(own.model_dump())


def is_key(name: str) -> bool:
    """Tell whether a dotted key is one of a section `speculative`, the spec's or a side's."""
    return SECTION in name.split(".")[:-1]


def axis_value(spec: DraftingSpec, name: str) -> Any:
    """Return what a cell of this spec has of a key of such a section; None: nothing heeds it. Of a method it
    is `none` where nothing is drafted."""
    *side, _, leaf = name.split(".")
    if side:
        return _value(drafts_of(spec, side[0]), leaf) if side[0] in sides_of(spec) else None
    heeding = [drafts_of(spec, s) for s in sides_of(spec) if _own(spec, s).get(leaf) is None]
    if leaf == "method":
        return next((drafts.method for drafts in heeding if drafts is not None), NONE)
    return next((_value(d, leaf) for d in heeding if d is not None and leaf in HEEDED[d.method]), None)


def _value(drafts: SpeculativeConfig | None, leaf: str) -> Any:
    if drafts is None:
        return NONE if leaf == "method" else None
    return getattr(drafts, leaf) if leaf == "method" or leaf in HEEDED[drafts.method] else None


def drafter_models(spec: Any) -> list[str]:
    """List what a spec's sections, or axes in their place, name as `model`."""
    found = []
    for side in ("", *SIDES):
        section = getattr(spec, side).speculative if side else spec.speculative
        own = None if section is None else section.model
        key = f"{side}.{SECTION}.model".lstrip(".")
        found += [name for matrix in spec.matrix or [{}] for name in matrix.get(key, [own])]
    return list(dict.fromkeys(name for name in found if name is not None))


def axes_given(spec: DraftingSpec) -> Iterator[str]:
    """Yield the keys by which cells are told apart that a spec gives outside its matrix: who drafts, and how
    much."""
    for side in ("", *SIDES):
        section = getattr(spec, side).speculative if side else spec.speculative
        is_given = section is not None and (section.method is not None or (side and section.num_tokens))
        if is_given:
            yield from (f"{side}.{SECTION}.{leaf}".lstrip(".") for leaf in ("method", "num_tokens"))
