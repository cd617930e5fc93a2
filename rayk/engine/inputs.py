"""From a scheduled batch to the tensors of a forward pass. Block tables persist between steps.

Legend: R requests of the batch, T packed tokens, B kernel blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rayk.attention.metadata import CommonAttentionMetadata
from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.types.batch import ScheduledBatch


@dataclass(frozen=True)
class ModelInputs:
    """One step's tensors. Filled by InputBuilder."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    logits_index: torch.Tensor
    """int64 [requests that need logits]: packed index of their last token"""
    metadata: tuple[CommonAttentionMetadata, ...]
    """Per KV group."""
    prompt_index: torch.Tensor | None = None
    """int64: packed index of every token of the batch's `prompt_logits`; None where there is none"""


class InputBuilder:
    """Keeps the block tables of every row and builds a step's inputs from the scheduler's deltas."""

    def __init__(
        self, geometry: RankGeometry, *, max_seqs: int, max_positions: int, device: torch.device
    ) -> None:
        self._groups = geometry.groups
        self._device = device
        self._tables = [
            np.zeros(
                (max_seqs, -(-max_positions // g.kernel_block_size) + g.kernel_blocks_per_block), np.int32
            )
            for g in self._groups
        ]

    @property
    def table_widths(self) -> tuple[int, ...]:
        """Columns of each KV group's block table, in kernel blocks."""
        return tuple(table.shape[1] for table in self._tables)

    def build(self, batch: ScheduledBatch) -> ModelInputs:
        """Apply the batch's table updates and return its tensors."""
        self._update_tables(batch)
        counts = np.array([len(r.token_ids) for r in batch.requests], dtype=np.int32)
        computed = np.array([r.num_computed_tokens for r in batch.requests], dtype=np.int32)
        rows = np.array([r.row for r in batch.requests], dtype=np.int64)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        token_ids = np.fromiter((t for r in batch.requests for t in r.token_ids), dtype=np.int64)
        request_of = np.repeat(np.arange(len(counts)), counts)
        positions = computed[request_of].astype(np.int64) + np.arange(len(token_ids)) - starts[request_of]
        wanted = np.array([r.needs_logits for r in batch.requests], dtype=bool)
        metadata = tuple(
            self._metadata(g, table, rows, starts, computed + counts, request_of, positions)
            for g, table in zip(self._groups, self._tables, strict=True)
        )
        return ModelInputs(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            logits_index=self._tensor((starts[1:] - 1)[wanted].astype(np.int64)),
            prompt_index=self._prompt_index(batch, starts),
            metadata=metadata,
        )

    def _prompt_index(self, batch: ScheduledBatch, starts: np.ndarray) -> torch.Tensor | None:
        ranges = [
            np.arange(begin + r.prompt_logits[0], begin + r.prompt_logits[1])
            for r, begin in zip(batch.requests, starts.tolist(), strict=False)
            if r.prompt_logits[1]
        ]
        return self._tensor(np.concatenate(ranges)) if ranges else None

    def _update_tables(self, batch: ScheduledBatch) -> None:
        for request in batch.requests:
            for g, table, (start, ids) in zip(self._groups, self._tables, request.new_block_ids, strict=True):
                if ids:
                    kernel_ids = to_kernel_blocks(ids, g.kernel_blocks_per_block)
                    at = start * g.kernel_blocks_per_block
                    table[request.row, at : at + len(kernel_ids)] = kernel_ids

    def _metadata(
        self,
        group: GroupGeometry,
        table: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        request_of: np.ndarray,
        positions: np.ndarray,
    ) -> CommonAttentionMetadata:
        size = group.kernel_block_size
        width = -(-int(seq_lens.max()) // size)
        block_table = table[rows, :width]
        slots = block_table[request_of, positions // size].astype(np.int64) * size + positions % size
        return CommonAttentionMetadata(
            query_start_loc=self._tensor(starts),
            seq_lens=self._tensor(seq_lens),
            block_table=self._tensor(block_table),
            slot_mapping=self._tensor(slots),
            num_tokens=len(positions),
            max_query_len=int(np.diff(starts).max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc_cpu=tuple(starts.tolist()),
            seq_lens_cpu=tuple(seq_lens.tolist()),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def to_kernel_blocks(block_ids: tuple[int, ...] | list[int], ratio: int) -> np.ndarray:
    """Kernel block ids of manager block ids: id b becomes b * ratio .. b * ratio + ratio - 1.

    The null block's kernel blocks are null too: kernel block 0 .. ratio - 1 are never handed out.
    """
    ids = np.asarray(block_ids, dtype=np.int32)
    return (ids[:, None] * ratio + np.arange(ratio, dtype=np.int32)).reshape(-1)
