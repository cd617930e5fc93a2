"""Judge drafters on ranks: what their layers keep of a prompt, and what they propose after a hand-over.

What is proposed is compared with what one engine that does all of it proposes: the decode engine's own
settings, in a run of its own on the same cluster, kept. Drafts of the two begin at other tokens, so places in
the output are compared: what a smaller model proposes for one depends on the tokens before it alone. What a
head or an MTP layer proposes depends also on where its draft began, since it goes on from hidden states of
its own: of these, drafts that began at the same place are compared.

A smaller model's proposals may part where two tokens are as good as each other by transformers' logits of
that model. Of heads and MTP layers nobody else has the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rayk.experiments.references import References
from rayk.kv.groups import KVCacheGroup
from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import DrafterConfig, find_drafter
from rayk.oracle.cache import AnswerStore
from rayk.types.config import EngineConfig
from rayk.types.errors import KVMismatch
from rayk.types.rows import RequestRow

if TYPE_CHECKING:  # torch is imported when there is something to judge
    from rayk.handover.commands import CapturedRows

NEAR_TIE_LOGITS = 1e-3
"""Two tokens whose logits of the drafter are this close may swap."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two runs proposed unlike tokens after the same ones."""

    index: int  # of the output token that was to be foreseen
    found: int
    expected: int


@dataclass(frozen=True, slots=True)
class ProposalComparison:
    num_compared: int  # tokens
    partings: tuple[Parting, ...] = ()


def compare_proposals(row: RequestRow, other: RequestRow, *, from_tokens: bool) -> ProposalComparison:
    """Compare what two runs of a prompt proposed after the same output tokens. `from_tokens`: it depends on
    these alone, wherever a draft began."""
    pairs = zip(row.output_token_ids, other.output_token_ids, strict=False)
    shorter = min(len(row.output_token_ids), len(other.output_token_ids))
    num_alike = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    found, expected = _foreseen(row, from_tokens), _foreseen(other, from_tokens)
    both = sorted(place for place in found if place in expected and place[0] <= num_alike)
    partings = [Parting(at[0], found[at], expected[at]) for at in both if found[at] != expected[at]]
    return ProposalComparison(len(both), tuple(partings))


def _foreseen(row: RequestRow, from_tokens: bool) -> dict[tuple[int, int], int]:
    """Return what was proposed where all proposed before it in its draft was right: (index of the output
    token, that of the one at which its draft began; 0 if it does not matter) -> token."""
    found = {}
    for begin, tokens in row.proposals:
        said = row.output_token_ids[begin:]
        for place, token in enumerate(tokens):
            found[begin + place, 0 if from_tokens else begin] = token
            if list(said[place : place + 1]) != [token]:
                break
    return found


class DraftReferences:
    """Asks transformers about smaller models that draft."""

    def __init__(self, answers: AnswerStore) -> None:
        self._answers = answers
        self._known: dict[tuple[str, str], References] = {}

    def of(self, engine: EngineConfig, target: DecoderConfig) -> tuple[DrafterConfig, References] | None:
        """Return the drafter of an engine and what knows it; None where transformers knows no such model."""
        drafter = find_drafter(engine, target)
        if drafter is None or drafter.method != "draft":
            return None
        key = str(drafter.path), engine.dtype
        if key not in self._known:
            routed = drafter.decoder.is_routed
            self._known[key] = References(key[0], self._answers, engine.dtype, routed=routed)
        return drafter, self._known[key]


def is_near_tie(row: RequestRow, parting: Parting, references: References | None) -> bool:
    """Tell whether the drafter's own logits leave it open which of two tokens it proposes."""
    if references is None:
        return False
    prompt = [*row.prompt_token_ids, *row.output_token_ids[: parting.index]]
    gaps = [references.forced(prompt, [token])[0].gap for token in (parting.found, parting.expected)]
    return all(gap <= NEAR_TIE_LOGITS for gap in gaps)


def parting_in_words(row: RequestRow, parting: Parting, num_partings: int, num_compared: int) -> str:
    """Say what was proposed, in place of what, and where the drafter had its KV from."""
    whose = {
        "moved": "its KV of the prompt came over",
        "recomputed": "it computed its KV of the prompt again",
        "own": "its KV of the prompt was computed here",
    }
    had = whose.get(row.draft_kv or "", "its KV of the prompt was not there")
    return (
        f"request {row.prompt_index}: for output token {parting.index} the drafter proposed {parting.found}, "
        f"in the aggregated run {parting.expected} ({num_partings} of {num_compared} proposals differ; {had})"
    )


def own_layers(
    captured: Sequence[CapturedRows], groups: Sequence[KVCacheGroup]
) -> tuple[list[CapturedRows], list[KVCacheGroup]]:
    """Return a drafter's rows and groups, layers numbered as in its own checkpoint."""
    riders = [g for g in groups if g.rides is not None]
    first = {layer: g.first_draft for g in riders for layer in g.layers}
    rows = [{layer - first[layer]: per[layer] for layer in per if layer in first} for per in captured]
    own = [replace(g, layers=tuple(n - g.first_draft for n in g.layers), first_draft=0) for g in riders]
    return rows, own


def in_engine(mismatch: KVMismatch, first_layer: int) -> KVMismatch:
    """Return a mismatch of a drafter's own layers with the number that the layer has in the engine."""
    return replace(mismatch, layer=first_layer + mismatch.layer)
