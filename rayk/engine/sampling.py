"""From logits to tokens, and to what is told about them.

A drawn token is argmax(filtered scores + Gumbel noise), and the noise is a function of (seed, index of the
output token, token id) alone: see engine.noise. So equal seeds give equal tokens in any batch, after a
preemption, at any TP and on either side of a hand-over, as long as the logits are equal. Logits computed
another way differ by rounding; then tokens differ where two candidates are that close, as when decoding
greedily. R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rayk.engine.filters import NEVER, DrawNumbers, Row, candidates, forbid, penalise, scaled
from rayk.engine.noise import draw_key, gumbel, near_gumbel
from rayk.engine.rejecting import verify
from rayk.engine.verifying import DraftRows
from rayk.grammars import OutputGrammar
from rayk.kernels.best_tokens import NO_TOKEN, are_finite, best_tokens
from rayk.kernels.uploads import uploaded
from rayk.types.batch import UNKNOWN_TOKEN, StepTokens
from rayk.types.request import TokenLogprobs

if TYPE_CHECKING:
    from rayk.sched.request_state import RequestState
    from rayk.types.batch import ScheduledBatch

NARROW_TOP_K = 1024  # up to this top_k only the best tokens are looked at, not the whole vocabulary
NUM_CONTENDERS = 8  # best of a row in float32 that are compared in float64: so many never tie within 1e-5
MAX_ELEMENTS = 1 << 22  # scores worked on at once: each takes some 60 bytes on the way to a token


def sample(rows: Sequence[Row], logits: torch.Tensor) -> list[int]:
    """Choose a token per row of float32 logits [R, V]; the lowest id wins a tie of greedy rows."""
    tokens: list[int] = _sample(rows, logits).tolist()
    return tokens


def _sample(rows: Sequence[Row], logits: torch.Tensor) -> torch.Tensor:
    chosen = logits.argmax(dim=-1)
    others = [i for i, row in enumerate(rows) if not row.params.is_plain]
    step = max(1, MAX_ELEMENTS // logits.shape[1])
    for start in range(0, len(others), step):
        part = others[start : start + step]
        places = uploaded(part, torch.int64, logits.device)
        chosen.index_copy_(0, places, _choose([rows[i] for i in part], logits.index_select(0, places)))
    return chosen


def _choose(rows: Sequence[Row], logits: torch.Tensor) -> torch.Tensor:
    """Choose int64 [R], given logits [R, V] of its own."""
    scores = logits.float()
    penalise(scores, rows)
    chosen = scores.argmax(-1)
    # Looking at few tokens means waiting to know how many tie with the last of them.
    limit = NARROW_TOP_K if logits.is_cpu else 0
    for narrow in (True, False):
        drawn = [i for i, r in enumerate(rows) if r.params.temperature > 0 and is_narrow(r, limit) == narrow]
        if len(drawn) == len(rows):
            return draw(rows, scores, narrow=narrow)
        if drawn:
            places = uploaded(drawn, torch.int64, logits.device)
            some = draw([rows[i] for i in drawn], scores.index_select(0, places), narrow=narrow)
            chosen.index_copy_(0, places, some)
    return chosen


def is_narrow(row: Row, limit: int) -> bool:
    """Tell whether only the row's best tokens need to be looked at, which depends on the request alone."""
    return row.params.top_k is not None and row.params.top_k <= limit


def draw(rows: Sequence[Row], scores: torch.Tensor, *, narrow: bool) -> torch.Tensor:
    """Draw a token per row, int64 [R], given penalised float32 scores [R, V]."""
    params = [row.params for row in rows]
    keys = []
    for row in rows:
        assert row.params.seed is not None, "the leader gives every drawn request a seed"
        keys.append(draw_key(row.params.seed, len(row.output_token_ids)))
    numbers = DrawNumbers.sent(params, keys, scores.shape[1], scores.device)
    left, ids = candidates(scores, params, numbers, narrow=narrow)
    # In float32 only to find the few that can win.
    near = scaled(left, numbers).add_(near_gumbel(numbers.keys.squeeze(1), ids))
    places = near.topk(min(NUM_CONTENDERS, near.shape[1])).indices.sort(-1).values
    contenders = ids.expand_as(left).gather(1, places)
    exact = left.gather(1, places).double() - left.amax(-1, keepdim=True)
    exact /= numbers.temperatures
    best = exact.add_(gumbel(numbers.keys.squeeze(1), contenders)).argmax(-1)
    chosen = contenders.gather(1, best.unsqueeze(1)).squeeze(1)
    return chosen if all(row.drafted is None for row in rows) else verify(rows, left, ids, numbers, chosen)


def score_tokens(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Score each row's token under float32 logits [R, V], and its `num_top` best tokens, those left out whose
    logits are -inf."""
    step = max(1, MAX_ELEMENTS // logits.shape[1])
    parts = (slice(at, at + step) for at in range(0, len(token_ids), step))
    return [scored for p in parts for scored in _score(logits[p], token_ids[p], num_top[p])]


def _score(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, uploaded(token_ids, torch.int64, logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
    # One more than is told of, to see ties with the last.
    top = logprobs.topk(min(max(num_top, default=0) + 1, logits.shape[1]))
    told = []
    # One wait for the device: float64 has every one of these numbers.
    rows = torch.cat([chosen.double(), ranks, top.indices, top.values], 1).tolist()
    num_found = top.values.shape[1]
    for i, (token, k, (logprob, rank, *found)) in enumerate(zip(token_ids, num_top, rows, strict=True)):
        ids, values = [int(x) for x in found[:num_found]], found[num_found:]
        best = list(zip(ids, values, strict=True))
        if 0 < k < len(values) and values[k] == values[k - 1] > NEVER:
            # Of equal ones the lowest ids; which of them topk finds is open.
            ids = (logprobs[i] >= values[k]).nonzero()[:, 0].tolist()
            best = list(zip(ids, logprobs[i, ids].tolist(), strict=True))
        best = sorted((t for t in best if t[1] > NEVER), key=lambda t: (-t[1], t[0]))
        told.append(TokenLogprobs(token_id=token, logprob=logprob, rank=int(rank), top=tuple(best[:k])))
    return told


@dataclass(frozen=True, kw_only=True)
class PendingTokens:
    """What a step sampled, on its device."""

    tokens: torch.Tensor  # int64, one per request that needs logits; NO_TOKEN where these are not finite
    finish: Callable[[list[int]], StepTokens]
    """Takes `tokens`, on the host. Log-probabilities are scored then: before the logits are overwritten."""


def sample_step(
    batch: ScheduledBatch,
    states: Sequence[RequestState],
    logits: torch.Tensor,
    prompt_logits: Iterable[torch.Tensor],
    *,
    rejects: bool = False,
) -> PendingTokens:
    """Sample a step, without waiting for the device. `states` are in the batch's order. `logits` is float32,
    a row per token whose logits are sampled; what a request's structured outputs forbid becomes -inf in it,
    which the host works out while the device computes them. `prompt_logits` has the rows of the batch's
    `prompt_logits`, in any number of pieces, and is used up; these are waited for. `rejects`: drafts
    are verified by rejection."""
    prompt_logprobs, not_finite = _score_prompts(batch, states, prompt_logits)
    sampling = [s for s, share in zip(states, batch.requests, strict=True) if share.needs_logits]
    drafted = None
    if logits.shape[0] != len(sampling):
        drafted = DraftRows.of(batch, states)
        sampling = drafted.states
    assert logits.shape[0] == len(sampling), (logits.shape, len(sampling))
    # One wait for the device tells both tokens and rows that are not finite.
    forms = {i: s.form for i, s in enumerate(sampling) if isinstance(s.form, OutputGrammar)}
    if not forms and all(s.request.sampling.is_plain for s in sampling):
        chosen = best_tokens(logits)
    else:
        finite = are_finite(logits)
        if forms:
            masks = [form.mask() for form in forms.values()] if drafted is None else drafted.masks()
            forbid(logits, list(forms), masks)
        rows = _rows(sampling) if drafted is None else drafted.rows(rejects=rejects)
        chosen = torch.where(finite, _sample(rows, logits), NO_TOKEN)

    def finish(tokens: list[int]) -> StepTokens:
        return _finish(sampling, drafted, logits, tokens, prompt_logprobs, not_finite)

    return PendingTokens(tokens=chosen, finish=finish)


def _rows(sampling: Sequence[RequestState]) -> list[Row]:
    return [Row(s.request.sampling, s.request.prompt_token_ids, _output_tokens(s)) for s in sampling]


def _output_tokens(state: RequestState) -> list[int]:
    """List the tokens before the one that is sampled now; a step in flight may still sample the last."""
    return [*state.output_token_ids, *[UNKNOWN_TOKEN] * (state.num_sampled_ahead - 1)]


def _finish(
    sampling: Sequence[RequestState],
    drafted: DraftRows | None,
    logits: torch.Tensor,
    tokens: list[int],
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]],
    not_finite: Collection[str],
) -> StepTokens:
    """Say what came of a step. `sampling`: the request of each row."""
    kept = range(len(sampling)) if drafted is None else drafted.kept(tokens)
    accepted = {} if drafted is None else drafted.accepted(tokens, kept)
    names = [s.request_id for s in sampling]
    # Behind accepted tokens a bad row is left for the next step, which comes to it if they do not end the
    # request.
    bad = {*not_finite, *(names[i] for i in kept if tokens[i] == NO_TOKEN and not accepted.get(names[i]))}
    asked = [i for i in kept if sampling[i].request.sampling.logprobs is not None]
    reported = [i for i in asked if tokens[i] != NO_TOKEN and names[i] not in bad]
    logprobs: dict[str, list[TokenLogprobs]] = {}
    if reported:
        num_top = [sampling[i].request.sampling.logprobs or 0 for i in reported]
        rows = logits.index_select(0, uploaded(reported, torch.int64, logits.device))
        scored = score_tokens(rows, [tokens[i] for i in reported], num_top)
        for i, told in zip(reported, scored, strict=True):
            logprobs.setdefault(names[i], []).append(told)
    return StepTokens(
        token_ids={names[i]: tokens[i] for i in kept if names[i] not in bad and names[i] not in accepted},
        accepted=accepted,
        not_finite=frozenset(bad),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _score_prompts(
    batch: ScheduledBatch, states: Sequence[RequestState], prompt_logits: Iterable[torch.Tensor]
) -> tuple[dict[str, list[TokenLogprobs]], set[str]]:
    """Score by request, and find requests with rows that are not finite."""
    tokens: list[tuple[str, int, int]] = []
    for share, state in zip(batch.requests, states, strict=True):
        start, stop = share.prompt_logits
        num_top = state.request.sampling.prompt_logprobs or 0
        # The logits of one token are about the next.
        first = share.num_computed_tokens + 1
        tokens += [(state.request_id, t, num_top) for t in state.tokens[first + start : first + stop]]
    scored: dict[str, list[TokenLogprobs]] = {}
    not_finite: set[str] = set()
    at = 0
    for logits in prompt_logits:
        part = tokens[at : at + len(logits)]
        finite = are_finite(logits)
        logprobs = score_tokens(logits, [target for _, target, _ in part], [n for _, _, n in part])
        for (name, _, _), logprob in zip(part, logprobs, strict=True):
            scored.setdefault(name, []).append(logprob)
        not_finite |= {name for (name, _, _), ok in zip(part, finite.tolist(), strict=True) if not ok}
        at += len(logits)
    assert at == len(tokens), (at, len(tokens))
    return scored, not_finite
