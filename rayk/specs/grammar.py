"""What the models of all files are made with: strict, unknown keys forbidden, bounds as types.bounds marks
them."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from rayk.types.bounds import Between, OneOf

ModelPath = Annotated[str, Field(min_length=1, max_length=4096)]


class StrictModel(BaseModel):
    """Base of every spec model: unknown keys and wrong types are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def checked(hint: Any) -> Any:
    """Return a type whose bounds, which are marks of types.bounds, pydantic checks."""
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(map(checked, get_args(hint)))]  # noqa: UP007 - of a tuple
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, OneOf):
            return Literal[mark.names]
        if isinstance(mark, Between):
            return Annotated[get_args(hint)[0], Field(ge=mark.least, le=mark.most)]
    return hint
