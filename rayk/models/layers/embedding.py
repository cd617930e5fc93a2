"""Token embedding and output head, both split by vocabulary rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from rayk.models.layers.linear import packed, product
from rayk.parallel import shard
from rayk.parallel.comm import Comm


def rounded_scale(scale: float, dtype: torch.dtype) -> float:
    """`scale` rounded to `dtype`: sqrt(3072) = 55.4256 becomes 55.5 in bfloat16."""
    return float(torch.tensor(scale, dtype=torch.float32).to(dtype))


class VocabEmbedding:
    """The rank's `rows` of the embedding, weight [rows, hidden], scaled by `scale`."""

    def __init__(self, weight: torch.Tensor, rows: range, comm: Comm, *, scale: float = 1.0) -> None:
        assert weight.shape[0] == len(rows), (weight.shape, rows)
        self.weight = weight
        self.rows = rows
        self._comm = comm
        self._scale = scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden], the same on every rank: one rank has an id's row, the others add zeros."""
        found = self.look_up(token_ids)
        return found if self._scale == 1.0 else found * self._scale

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, hidden] as stored, without the scale; otherwise like `forward`."""
        if self._comm.size == 1:
            return self.weight.index_select(0, token_ids)
        local = token_ids - self.rows.start
        absent = (local < 0) | (local >= len(self.rows))
        found = self.weight.index_select(0, local.masked_fill(absent, 0))
        return self._comm.all_reduce(found.masked_fill(absent[:, None], 0))


class LmHead:
    """The rank's vocabulary rows of the output matrix, weight [rows, hidden]."""

    def __init__(
        self,
        weight: torch.Tensor,
        vocab_size: int,
        comm: Comm,
        *,
        tied: bool = False,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        """Logits are multiplied by `scale`, then become soft_cap * tanh(logit / soft_cap). `tied`: the
        embedding holds the same tensor, so the weight is not packed into a copy."""
        self.weight = weight if tied else packed(weight)
        self._comm = comm
        sizes = [len(shard.shard_range(vocab_size, comm.size, r)) for r in range(comm.size)]
        assert weight.shape[0] == sizes[comm.rank], (weight.shape, sizes)
        self._sizes = sizes
        self._scale = scale
        self._soft_cap = soft_cap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits [R, vocab] on every rank; NaN where the soft cap met an infinity."""
        logits = self._gathered(product(hidden, self.weight, None)).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._soft_cap is not None:
            capped = (logits / self._soft_cap).tanh_().mul_(self._soft_cap)
            # The cap hides infinities: infinity * 0 is NaN and adds it back, other logits add 0.
            logits = capped.add_(logits * 0)
        return logits

    def _gathered(self, local: torch.Tensor) -> torch.Tensor:
        if self._comm.size == 1:
            return local
        # all_gather needs equal shapes; shares differ by at most one row.
        padded = F.pad(local, (0, max(self._sizes) - local.shape[1]))
        shares = self._comm.all_gather(padded)
        kept = [share[:, :size] for share, size in zip(shares, self._sizes, strict=True)]
        return torch.cat(kept, dim=1)
