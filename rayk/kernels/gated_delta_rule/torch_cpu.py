"""The gated delta rule for CPUs: requests that go token by token run together, others by chunks.

Within a chunk of C tokens the C updates of the state are one linear system (the UT transform,
arXiv:2412.06464 section 3.3). With cumulative decay G_i = exp(g_1 + .. + g_i) and token i's change u_i:

     u_i = beta_i (v_i - G_i S^T k_i - sum over j < i of G_i / G_j (k_i . k_j) u_j)

so (I + A) u = beta v - (beta G k) S with A strictly lower triangular. It is solved for both right sides
before S is known, for many chunks at once; the state then goes through the chunks by products alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from rayk.kernels.gated_delta_rule.reference import unit_length
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.states import Tokens, Walk, read_states, split_stepwise

CHUNK_TOKENS = 64
_CHUNKS_AT_ONCE = 16
"""Chunks solved together; bounds the memory of a long prompt."""


def gated_delta_rule_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    key_index: torch.Tensor,
    state: torch.Tensor,
    segments: Segments,
    *,
    scale: float,
) -> torch.Tensor:
    """Compute in float32."""
    batch = _Batch(unit_length(q.float()).mul_(scale), unit_length(k.float()), v, g, beta, key_index)
    out = torch.empty(v.shape, dtype=v.dtype)
    stepwise, longer = split_stepwise(segments)
    if stepwise is not None:
        stepwise.run(state, partial(_step, batch, out))
    for walk in longer:
        _scan(batch, state, walk, out)
    return out


@dataclass(frozen=True)
class _Batch:
    """A step's inputs."""

    q: torch.Tensor
    """[T, Hk, Dk] float32, of unit length times the scale; k likewise, without the scale."""
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    key_index: torch.Tensor


def _step(batch: _Batch, out: torch.Tensor, tokens: Tokens, memory: torch.Tensor) -> torch.Tensor:
    """Run one token of each request, filling its row of out; return memory [R, Hv, Dk, Dv] after them."""
    q, k = (x[tokens][:, batch.key_index].unsqueeze(-2) for x in (batch.q, batch.k))  # [R, Hv, 1, Dk]
    v, beta = batch.v[tokens].float().unsqueeze(-2), batch.beta[tokens, :, None, None]
    memory.mul_(batch.g[tokens, :, None, None].exp())
    change = beta * (v - k @ memory)
    torch.baddbmm(
        memory.flatten(0, 1), k.mT.flatten(0, 1), change.flatten(0, 1), out=memory.view(-1, *memory.shape[2:])
    )
    out[tokens] = (q @ memory).squeeze(-2).to(out.dtype)
    return memory


def _scan(batch: _Batch, state: torch.Tensor, walk: Walk, out: torch.Tensor) -> None:
    """Run all tokens of a request, filling its rows of out and its slots."""
    memory = read_states(state, torch.tensor([walk.read_slot]))[0]
    all_chunks = list(walk.chunks(CHUNK_TOKENS))
    for first in range(0, len(all_chunks), _CHUNKS_AT_ONCE):
        chunks = all_chunks[first : first + _CHUNKS_AT_ONCE]
        solved = _solve(batch, [(start, end) for start, end, _ in chunks])
        for i, (start, end, slot) in enumerate(chunks):
            n = end - start
            change = solved.from_values[:, i] - solved.from_state[:, i] @ memory
            attended = solved.q[:, i] @ memory + solved.attention[:, i] @ change
            out[start:end] = attended[:, :n].transpose(0, 1).to(out.dtype)
            memory = torch.baddbmm(memory * solved.decay[:, i], solved.k[:, i].mT, change)
            if slot != NO_SLOT:
                state[slot] = memory


@dataclass(frozen=True)
class _Solved:
    """The effect of M chunks of C tokens on a state that is not yet known, float32; padding has no effect."""

    from_values: torch.Tensor
    """[Hv, M, C, Dv]: the tokens' changes if the state before them is zero."""
    from_state: torch.Tensor
    """[Hv, M, C, Dk]: the part of the changes that the state takes back."""
    attention: torch.Tensor
    """[Hv, M, C, C]: how much each token's query reads of each token's change."""
    q: torch.Tensor
    """[Hv, M, C, Dk]: queries to the state before the chunk."""
    k: torch.Tensor
    """[Hv, M, C, Dk]: keys of the changes, decayed to the chunk's end."""
    decay: torch.Tensor
    """[Hv, M, 1, 1]: what remains of the state before the chunk."""


def _solve(batch: _Batch, chunks: list[tuple[int, int]]) -> _Solved:
    """Solve these chunks (first token, end), padded to the longest, for all value heads."""
    size = max(end - start for start, end in chunks)

    def padded(x: torch.Tensor) -> torch.Tensor:
        """Pad [T, H, ...] and cut it into chunks: [H, M, size, ...]."""
        parts = [x[start:end] for start, end in chunks]
        pads = [F.pad(part, (0, 0) * (x.dim() - 1) + (0, size - len(part))) for part in parts]
        return torch.stack(pads, 1).movedim(2, 0).transpose(1, 2)

    keys, queries = padded(batch.k), padded(batch.q)  # [Hk, M, C, Dk]
    v, beta = padded(batch.v.float()), padded(batch.beta).unsqueeze(-1)
    # The difference of two long sums is what counts: in float64, so that strong decays cancel.
    total = padded(batch.g).double().cumsum(-1)  # [Hv, M, C]
    kept = total.float().exp().unsqueeze(-1)
    future = torch.ones(size, size, dtype=torch.bool).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill_(future, float("-inf")).exp_()
    system = (keys @ keys.mT)[batch.key_index] * between * beta
    k, q = keys[batch.key_index], queries[batch.key_index]
    sides = torch.cat([v * beta, k * (beta * kept)], -1)
    # The diagonal is not looked at.
    solution = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    from_values, from_state = solution.split([v.shape[-1], k.shape[-1]], -1)
    return _Solved(
        from_values=from_values,
        from_state=from_state,
        attention=(queries @ keys.mT)[batch.key_index] * between,
        q=q * kept,
        k=k * (total[..., -1:] - total).float().exp().unsqueeze(-1),
        decay=kept[:, :, -1:],
    )
