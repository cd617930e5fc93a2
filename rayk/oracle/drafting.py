"""What a drafter proposes, computed over the whole text for every proposal, without a cache.

Shapes: T tokens of a text, V the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class WholeDrafter(Protocol):
    """A drafter that reads a whole text at once."""

    depths: int
    """Layers used in turn, one per proposal; of a single one each proposal is a further row."""

    def rows(self, token_ids: torch.Tensor, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Row i takes token_ids [T] and hidden [T, ...] at i and sees the rows before: [T, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, V]; minus infinity for what the drafter cannot propose."""
        ...


def model_hidden(model: Any, token_ids: Sequence[int], layers: Sequence[int] = ()) -> torch.Tensor:
    """Return what a transformers model computes of a text: [T, hidden] of its final norm, or the hidden
    states before `layers`, side by side."""
    with torch.inference_mode():
        found = model(
            torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False
        ).hidden_states
    if not layers:
        final: torch.Tensor = found[-1][0]
        return final
    assert max(layers) < len(found) - 1, "transformers norms the last one"
    return torch.cat([found[layer][0] for layer in layers], dim=-1)


def proposals(
    drafter: WholeDrafter, token_ids: Sequence[int], hidden: torch.Tensor, num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Propose greedily what follows a text. `hidden` [T, ...]: of its tokens, the last one's unused. Also
    returns the logits [num_tokens, V] of each proposal."""
    ids, rows = torch.tensor(list(token_ids[1:])), hidden[: len(token_ids) - 1]
    proposed: list[int] = []
    logits = []
    with torch.inference_mode():
        for number in range(num_tokens):
            depth = number if drafter.depths > 1 else 0
            found = drafter.rows(ids, rows, depth)
            logits.append(drafter.logits(found[-1:])[0])
            proposed.append(int(logits[-1].argmax()))
            after = torch.tensor(proposed[-1:])
            if drafter.depths > 1:
                ids, rows = torch.cat([ids[1:], after]), found
            else:
                ids, rows = torch.cat([ids, after]), torch.cat([rows, found[-1:]])
    return proposed, torch.stack(logits)
