"""The sum that every CPU comm uses, so that its bits do not depend on the transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Write ((parts[0] + parts[1]) + parts[2]) + ... into `out` and return it.

    Half-precision parts are added in float32 and rounded once. `out` must not overlap the parts.
    """
    if out.dtype in (torch.float16, torch.bfloat16):
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return out.copy_(total)
    if len(parts) == 1:
        return out.copy_(parts[0])
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    return out
