"""The drafts that a plan tries, beside none."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from rayk.specs.experiment import PositiveInt, as_list
from rayk.specs.grammar import ModelPath, StrictModel
from rayk.types.bounds import MAX_DRAFTS
from rayk.types.speculative import METHODS

Method = Literal["ngram", "draft", "eagle3", "mtp"]
assert get_args(Method) == METHODS
Share = Annotated[float, Field(ge=0, le=1)]
NumTokens = Annotated[int, Field(ge=1, le=MAX_DRAFTS)]


class DraftSearch(StrictModel):
    """A drafter, how many tokens it proposes at once, and how many of them are right: which no simulation
    knows."""

    method: Method = "ngram"
    num_tokens: Annotated[
        list[NumTokens], BeforeValidator(as_list), Field(min_length=1, max_length=MAX_DRAFTS)
    ] = Field(default_factory=lambda: [3])
    """Each is tried. Engines without drafts always are, too."""
    acceptance: Share | list[Share] | str
    """A list: of the tokens proposed at each position of a draft, the share that is accepted, as reports and
    vLLM tell it. A number: each token's chance once those before it were accepted. Or a run's folder."""
    proposed: Share | None = None
    """The share of decode steps for which there is a draft; None: all, or as in the run."""
    model: ModelPath | None = None
    tp: PositiveInt | None = None
    prompt_lookup_max: PositiveInt | None = None
    prompt_lookup_min: PositiveInt | None = None

    @model_validator(mode="after")
    def _whole(self) -> DraftSearch:
        if isinstance(self.acceptance, str):
            if self.proposed is not None:
                raise ValueError("`proposed` is given, and the run of `acceptance` tells it: leave it out")
            return self
        if self.method == "ngram" and self.proposed is None:
            raise ValueError(
                "how often do n-grams come again? Give `proposed: 0.5`, the share of decode steps, or a run "
                "as `acceptance`"
            )
        if isinstance(self.acceptance, list):
            self._check_positions(self.acceptance)
        return self

    def _check_positions(self, shares: list[float]) -> None:
        if shares != sorted(shares, reverse=True):
            raise ValueError(
                "`acceptance` grows from one position to the next, and a token is accepted only after those "
                "before it: of all that are proposed there, which share is?"
            )
        if len(shares) < max(self.num_tokens):
            raise ValueError(
                f"`acceptance` has {len(shares)} positions, and num_tokens is up to {max(self.num_tokens)}"
            )
