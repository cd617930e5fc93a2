"""Hold a layer whose rows differ from the reference's: what was found, and what should be there. Legend: H KV
heads, T live rows, D head size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rayk.kv.fields import PageField
from rayk.kv.specs import KVCacheSpec
from rayk.models.config import DecoderConfig

Head = tuple[str, int]  # (field, global unit): k or v of a KV head, or what else a layer keeps

SLACK = 1.5  # a hypothesis adds noise of its own (the row it is compared with is rounded too)


@dataclass(frozen=True, eq=False)
class WrongLayer:
    """A layer whose rows differ from the reference's. Filled by `compare`."""

    layer: int
    first_token: int  # position of row 0
    found: Mapping[Head, torch.Tensor]  # float64 [T, D], of every head that some rank holds
    truth: Mapping[str, torch.Tensor]  # by field, float64 [U, T, D]: of k and v, U are KV heads
    wrong: Mapping[Head, torch.Tensor]  # bool [T]
    limit: Mapping[str, float]  # largest error of a right value of each field
    model: DecoderConfig | None = None  # None: keys' rotation is not known
    spec: KVCacheSpec | None = None  # None: some keys and values
    e4m3_scales: Mapping[str, float] = field(default_factory=dict)  # by field; empty: not stored in fp8

    @property
    def fields(self) -> Mapping[str, PageField]:
        return {} if self.spec is None else {of.name: of for of in self.spec.fields()}

    @property
    def first(self) -> Head:
        """Return the first wrong head, keys before values."""
        return min(head for head, wrong in self.wrong.items() if bool(wrong.any()))

    def rows(self, head: Head) -> torch.Tensor:
        """List a head's wrong rows, int64."""
        return self.wrong[head].nonzero()[:, 0]

    def fits(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Tell whether each row of `found` is that of `expected`, [..., D] -> bool [...]."""
        return ((found - expected).abs() <= SLACK * self.limit[name]).all(-1)
