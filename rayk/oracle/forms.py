"""Forms of outputs: what a form leaves of transformers' logits.

The masks are the grammar library's, as in the engines. What is compared is what engines make of them: over
hand-overs, preemptions, steps ahead and ranks that die. Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rayk.grammars import Grammars
from rayk.types.errors import UserError
from rayk.types.structured import StructuredOutputs

if TYPE_CHECKING:
    from rayk.grammars import OutputGrammar


class FormedOutput:
    """The form of one output, which grows. Made without one, it allows everything."""

    def __init__(self, grammar: OutputGrammar | None = None) -> None:
        self._grammar = grammar

    def within(self, logits_V: torch.Tensor) -> torch.Tensor:
        """Return logits [V] that are -inf where a token cannot come next."""
        if self._grammar is None:
            return logits_V
        bits = np.unpackbits(self._grammar.mask().view(np.uint8), bitorder="little")[: len(logits_V)]
        return logits_V.masked_fill(~torch.from_numpy(bits).bool().to(logits_V.device), -torch.inf)

    def feed(self, token_id: int) -> bool:
        """Take the next token; tells whether nothing may follow it."""
        return self._grammar is not None and self._grammar.feed(token_id)

    def within_all(self, logits_TV: torch.Tensor, output_ids: Sequence[int]) -> torch.Tensor:
        """Return logits [T, V] from which `output_ids` were chosen, each row as `within`."""
        if self._grammar is None or not output_ids:
            return logits_TV
        rows = []
        for row, token_id in zip(logits_TV, output_ids, strict=True):
            rows.append(self.within(row))
            self.feed(token_id)
        return torch.stack(rows)


class ModelForms:
    """The forms of one model's outputs, compiled once each."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._grammars = Grammars(partial(_vocabulary, folder), vocab_size, eos_token_ids)

    def begin(self, form: StructuredOutputs | None) -> FormedOutput:
        """Raises UserError."""
        return FormedOutput() if form is None else FormedOutput(self._grammars.begin(form))


def _vocabulary(folder: Path) -> str:
    """Read the tokenizer in the form of tokenizer.json. Raises UserError."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.is_fast:
        raise UserError("the tokenizer has no form of tokenizer.json", where=str(folder))
    return str(tokenizer.backend_tokenizer.to_str())
