"""The gated delta rule for CPUs: requests with one token together in one step, longer ones by chunks.

Within a chunk of C tokens the C updates of the state are one linear system (the UT transform,
arXiv:2412.06464 section 3.3). With cumulative decay G_i = exp(g_1 + .. + g_i) and what token i changes, u_i:

    u_i = beta_i (v_i - G_i S^T k_i - sum over j < i of G_i / G_j (k_i . k_j) u_j)

so (I + A) u = beta v - (beta G k) S with A strictly lower triangular. It is solved for both right sides
before S is known, for many chunks at once; the state then goes through the chunks by products alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rayk.kernels.gated_delta_rule.reference import LENGTH_EPSILON
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kernels.states import read_states, write_states

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
    """Arguments and result as `gated_delta_rule`. Computes in float32."""
    batch = _Batch(_unit_length(q).mul_(scale), _unit_length(k), v, g, beta, key_index)
    out = torch.empty(v.shape, dtype=v.dtype)
    starts = segments.query_start_loc_cpu
    lens = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    before = read_states(state, segments.read_slots)
    single = [r for r, n in enumerate(lens) if n == 1]
    if single:
        tokens = torch.tensor([starts[r] for r in single])
        memory = before if len(single) == len(lens) else before[single]
        out[tokens] = _step(batch, tokens, memory).to(v.dtype)
        slots = segments.write_slots[[segments.segment_start_loc_cpu[r] for r in single]]
        write_states(state, slots, memory)
    for r, n in enumerate(lens):
        if n > 1:
            _scan(batch, before[r], state, segments, r, out)
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


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LENGTH_EPSILON)


def _step(batch: _Batch, tokens: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """One token of each request; memory [R, Hv, Dk, Dv] is updated in place. Returns [R, Hv, Dv] float32."""
    q, k = (x[tokens][:, batch.key_index].unsqueeze(-2) for x in (batch.q, batch.k))  # [R, Hv, 1, Dk]
    v, beta = batch.v[tokens].float().unsqueeze(-2), batch.beta[tokens, :, None, None]
    memory.mul_(batch.g[tokens, :, None, None].exp())
    change = beta * (v - k @ memory)
    torch.baddbmm(
        memory.flatten(0, 1), k.mT.flatten(0, 1), change.flatten(0, 1), out=memory.view(-1, *memory.shape[2:])
    )
    return (q @ memory).squeeze(-2)


def _scan(
    batch: _Batch, memory: torch.Tensor, state: torch.Tensor, segments: Segments, r: int, out: torch.Tensor
) -> None:
    """All tokens of request r from `memory` [Hv, Dk, Dv]; fills its rows of out, writes its slots."""
    writes = dict(zip(segments.segment_ends_cpu, segments.write_slots.tolist(), strict=True))
    for chunks in _chunks(segments, r):
        size = max(end - start for start, end in chunks)
        solved = _solve(batch, chunks, size)
        for i, (start, end) in enumerate(chunks):
            n = end - start
            change = solved.from_values[:, i] - solved.from_state[:, i] @ memory
            attended = solved.q[:, i] @ memory + solved.attention[:, i] @ change
            out[start:end] = attended[:, :n].transpose(0, 1).to(out.dtype)
            memory = torch.baddbmm(memory * solved.decay[:, i], solved.k[:, i].mT, change)
            if writes.get(end, NO_SLOT) != NO_SLOT:
                state[writes[end]] = memory


def _chunks(segments: Segments, r: int) -> Iterator[list[tuple[int, int]]]:
    """Request r's packed tokens as chunks (first, end), some at a time. None reaches over a segment's end."""
    start = segments.query_start_loc_cpu[r]
    first, last = segments.segment_start_loc_cpu[r : r + 2]
    chunks: list[tuple[int, int]] = []
    for end in segments.segment_ends_cpu[first:last]:
        chunks += [(at, min(at + CHUNK_TOKENS, end)) for at in range(start, end, CHUNK_TOKENS)]
        start = end
    for at in range(0, len(chunks), _CHUNKS_AT_ONCE):
        yield chunks[at : at + _CHUNKS_AT_ONCE]


@dataclass(frozen=True)
class _Solved:
    """What chunks do to a state not known yet. M chunks of C tokens, float32; padding does nothing."""

    from_values: torch.Tensor
    """[Hv, M, C, Dv], what the tokens change if the state before them is zero."""
    from_state: torch.Tensor
    """[Hv, M, C, Dk], what of their change the state takes back."""
    attention: torch.Tensor
    """[Hv, M, C, C], what each token's query reads of each token's change."""
    q: torch.Tensor
    """[Hv, M, C, Dk], queries to the state before the chunk."""
    k: torch.Tensor
    """[Hv, M, C, Dk], keys of the changes as they are after the chunk."""
    decay: torch.Tensor
    """[Hv, M, 1, 1], what remains of the state before the chunk."""


def _solve(batch: _Batch, chunks: list[tuple[int, int]], size: int) -> _Solved:
    """For all value heads and these chunks, padded to `size` tokens."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        """[T, H, ...] as [H, M, size, ...]."""
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
