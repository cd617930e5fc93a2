"""Tiny random models with a drafter on the ranks, each beside what says in float64, of a whole text, what the
drafter is to propose."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from rayk.oracle.drafting import WholeDrafter, model_hidden, proposals
from rayk.oracle.eagle3 import Eagle3Head, write_eagle3
from rayk.oracle.mtp import TransformersMtp, add_mtp
from rayk.sched.drafting import Drafting
from rayk.types.speculative import SpeculativeConfig
from tests.models.drafting import find, reloaded
from tests.models.tiny import Checkpoint, reference_logits, wide_scans, write_checkpoint

Noted = list[tuple[list[int], list[int]]]
"""What was proposed: the tokens of a request, and those after them."""

_LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6},
    "deepseek_v3": {"num_hidden_layers": 5},
    "gpt_oss": {"num_hidden_layers": 5},
    "falcon_h1": {"num_hidden_layers": 4},
    "qwen3_next": {},
}
"""As many as give a head three layers to take hidden states before."""
_MTP: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_nextn_predict_layers": 1},
    "qwen3_next": {
        "num_nextn_predict_layers": 1,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_only_layers": [],
    },
}
"""What a model with MTP layers has beyond its family's dimensions."""
FAMILIES = tuple(_LAYERS)
APPLIES = tuple(
    (method, family)
    for method in ("draft", "eagle3", "mtp")
    for family in FAMILIES
    if method != "mtp" or family in _MTP
)
"""(method, family) of the models that each kind of drafter is for."""


class Drafted(NamedTuple):
    """A model, its drafter, and what this one is to propose."""

    saved: Checkpoint
    speculative: SpeculativeConfig
    propose: Callable[[Sequence[int], int], list[int]]
    """(all tokens of a request, how many to propose) -> the tokens after them."""

    def of_tp(self, tp: int | None) -> SpeculativeConfig:
        """These drafts of an engine whose drafter is divided so."""
        return replace(self.speculative, tp=tp)

    def says(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What transformers' model says greedily after a prompt."""
        said = list(prompt)
        for _ in range(num_tokens):
            said.append(int(reference_logits(self.saved.exact, said)[-1].argmax()))
        return said[len(prompt) :]

    def check(self, found: Noted) -> None:
        """Assert that all that was noted is what is to be proposed."""
        for tokens, proposed in found:
            assert proposed == self.propose(tokens, len(proposed)), f"after {len(tokens)} tokens"


def make_drafted(
    folder: Path, method: str, family: str, *, num_tokens: int = 3, tp: int | None = None
) -> Drafted:
    """Write a model of `family` and its drafter into `folder`. `tp`: of the drafter."""
    settings: dict[str, Any] = {"method": method, "num_tokens": num_tokens, "tp": tp}
    if method == "draft":
        saved = write_checkpoint(folder / "model", family, **_LAYERS[family])
        small = write_checkpoint(
            folder / "draft", "llama", num_hidden_layers=2, vocab_size=saved.config.vocab_size
        )
        settings["model"] = str(small.path)
        propose = _of_model(small)
    elif method == "eagle3":
        saved = write_checkpoint(folder / "model", family, **_LAYERS[family])
        head = write_eagle3(folder / "head", saved.path, seed=3)
        settings["model"] = str(head)
        exact = copy.deepcopy(Eagle3Head.read(head, saved.model.get_input_embeddings().weight)).double()
        taps = find(saved, method="eagle3", model=str(head)).taps
        propose = _of_hidden(saved, exact, lambda tokens: exact.fc(model_hidden(saved.exact, tokens, taps)))
    else:
        saved = write_checkpoint(folder / "model", family, **_MTP[family])
        add_mtp(saved.path, saved.model, 1, seed=4, dtype=torch.float32)
        layers = copy.deepcopy(TransformersMtp(reloaded(saved.path)))
        layers.model.double()
        propose = _of_hidden(saved, layers, lambda tokens: model_hidden(saved.exact, tokens))
    return Drafted(saved, SpeculativeConfig(**settings), propose)


def _of_model(small: Checkpoint) -> Callable[[Sequence[int], int], list[int]]:
    def propose(tokens: Sequence[int], num_tokens: int) -> list[int]:
        said = list(tokens)
        for _ in range(num_tokens):
            said.append(int(reference_logits(small.exact, said)[-1].argmax()))
        return said[len(tokens) :]

    return propose


def _of_hidden(
    saved: Checkpoint, exact: WholeDrafter, hidden: Callable[[Sequence[int]], torch.Tensor]
) -> Callable[[Sequence[int], int], list[int]]:
    def propose(tokens: Sequence[int], num_tokens: int) -> list[int]:
        with wide_scans(saved.exact), torch.inference_mode():
            return proposals(exact, tokens, hidden(tokens), num_tokens)[0]

    return propose


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """All that ranks propose meanwhile."""
    found: Noted = []
    take = Drafting.take

    def taken(self: Drafting, *proposed: Any) -> None:
        asked = list(self._asked)
        take(self, *proposed)
        found.extend((list(state.tokens), list(state.proposals[1])) for state, _ in asked)

    with monkeypatch.context() as patch:
        patch.setattr(Drafting, "take", taken)
        yield found
