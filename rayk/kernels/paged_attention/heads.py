"""Which query heads read the same KV head, from the explicit KV index."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadGroups:
    """Query heads grouped by the KV head slot they read: G groups of at most S query heads.

    Only KV heads that some query head reads have a group. Groups may differ in size.
    """

    kv_heads: tuple[int, ...]
    """[G] KV head slot of each group, ascending."""
    query_heads: tuple[tuple[int, ...], ...]
    """[G] query heads of each group, ascending."""
    kv_heads_tensor: torch.Tensor
    """[G] int32, on the KV index's device."""
    query_heads_tensor: torch.Tensor
    """[G, S] int32, short groups padded with -1."""

    @property
    def group_size(self) -> int:
        """S, the size of the largest group."""
        return self.query_heads_tensor.shape[1]

    @property
    def uniform(self) -> bool:
        """Whether all groups have the same size."""
        return all(len(heads) == self.group_size for heads in self.query_heads)


def head_groups(kv_index: torch.Tensor) -> HeadGroups:
    """Group query heads by kv_index [Q]. Copies the index to the host: do it once per layer, not per step."""
    members: dict[int, list[int]] = {}
    for query_head, kv_head in enumerate(kv_index.tolist()):
        members.setdefault(kv_head, []).append(query_head)
    kv_heads = tuple(sorted(members))
    query_heads = tuple(tuple(members[h]) for h in kv_heads)
    size = max(map(len, query_heads))
    padded = [[*heads, *[-1] * (size - len(heads))] for heads in query_heads]
    return HeadGroups(
        kv_heads,
        query_heads,
        torch.tensor(kv_heads, dtype=torch.int32, device=kv_index.device),
        torch.tensor(padded, dtype=torch.int32, device=kv_index.device),
    )
