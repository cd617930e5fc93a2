"""Which format each tensor of a release has. Free of torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from rayk.models.formats.format import WeightFormat


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format of the modules whose names match one of the regular expressions `targets`."""

    format: WeightFormat
    targets: tuple[str, ...] = (r".*",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantisation:
    """config.json's `quantization_config`, as it concerns weights.

    Names are those by which the model asks for plain tensors. What the files hold decides whether a tensor is
    quantised; `format_of` says how. `kept` only serves to tell sizes without files.
    """

    method: str
    """config.json's `quant_method`."""
    schemes: tuple[Scheme, ...]
    """The first that matches a tensor's module counts."""
    kept: tuple[str, ...] = ()
    """Regular expressions of modules that are stored plain; each matches from the start of a name."""

    @property
    def text(self) -> str:
        """Say the formats in a few words."""
        return "; ".join(dict.fromkeys(scheme.format.text for scheme in self.schemes))

    def format_of(self, name: str) -> WeightFormat | None:
        """Return the format of the tensor `name`, if it is quantised at all."""
        module = _module(name)
        return next((s.format for s in self.schemes if _match_any(s.targets, module)), None)

    def stored_bytes(self, name: str, shape: tuple[int, ...], itemsize: int) -> int:
        """Count the bytes of a piece of `shape` of the tensor `name`, of `itemsize` where it is plain."""
        found = self.format_of(name)
        if found is not None and not _match_any(self.kept, _module(name)):
            num_bytes = found.stored_bytes(name, shape)
            if num_bytes is not None:
                return num_bytes
        return math.prod(shape) * itemsize


def _module(name: str) -> str:
    return name.rpartition(".")[0]


@lru_cache(1 << 16)
def _match_any(patterns: tuple[str, ...], module: str) -> bool:
    return any(pattern.match(module) for pattern in _compiled(patterns))


@lru_cache
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    """Compile each on its own: joined, their flags and the numbers of their groups would change."""
    return tuple(re.compile(pattern) for pattern in patterns)
