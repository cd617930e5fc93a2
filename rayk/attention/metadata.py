"""A step's batch as every attention backend needs it.

R requests, T packed tokens of this step, N token slots in a kernel block. transforms derive the metadata of
layers with local attention, or that compute only some tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayk.parallel.shard import TokenShard


@dataclass(frozen=True, eq=False, kw_only=True)
class CommonAttentionMetadata:
    """One KV group's view of a step, filled once by the engine; immutable, equal only to itself."""

    query_start_loc: torch.Tensor
    """[R + 1] int32: where each request's tokens start among the T packed ones; the last is T."""
    seq_lens: torch.Tensor
    """[R] int32: tokens of each request whose KV exists after this step."""
    block_table: torch.Tensor
    """[R, max_blocks] int32 kernel block ids; 0 (the null block) where no block is needed or kept."""
    slot_mapping: torch.Tensor
    """[T] int64: kernel block id * N + offset of each token; -1: do not store."""
    block_size: int
    """N."""
    query_start_loc_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]
    num_tokens: int
    """T."""
    max_query_len: int
    """Most tokens of one request in this step."""
    max_seq_len: int

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens_cpu)

    @classmethod
    def from_host(
        cls,
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> CommonAttentionMetadata:
        """Build from each request's number of tokens in this step and in total."""
        assert len(query_lens) == len(seq_lens) == len(block_table) > 0
        assert all(0 < n <= total for n, total in zip(query_lens, seq_lens, strict=True))
        starts = [0]
        for n in query_lens:
            starts.append(starts[-1] + n)
        assert starts[-1] == len(slot_mapping)
        return cls(
            query_start_loc=torch.tensor(starts, dtype=torch.int32).to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(device),
            block_table=block_table.to(device, torch.int32),
            slot_mapping=slot_mapping.to(device, torch.int64),
            block_size=block_size,
            query_start_loc_cpu=tuple(starts),
            seq_lens_cpu=tuple(seq_lens),
            num_tokens=starts[-1],
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenShardMetadata(CommonAttentionMetadata):
    """A step on a rank that holds some tokens of each sequence.

    `block_table`, `slot_mapping` and `block_size` are in the rank's own rows; a slot of -1 is another rank's
    token. `seq_lens` are those of whole sequences.
    """

    key_rows: torch.Tensor
    """[T] int32: each token's row of `block_table`."""
    key_starts: torch.Tensor
    """[T] int32: the first of the rank's rows that each token sees."""
    key_ends: torch.Tensor
    """[T] int32: the end of those it sees."""
    tokens: TokenShard
    positions_cpu: np.ndarray
    """[T] int64, absolute."""
