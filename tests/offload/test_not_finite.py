"""A host tier keeps no KV that is not finite, nor what was still to be stored of a request that failed so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rayk.types.errors import NotFiniteError
from tests.offload.node import Node
from tests.pd import make_request
from tests.weights import spoil

BAD_TOKEN, BLOCK = 300, 16
FINE = [5, 9, 11, 200, 3, 77, 21, 8] * 4


@pytest.mark.parametrize("chunk", [16, 512])
def test_blocks_that_are_not_finite_are_not_stored(
    checkpoint: Callable[..., Path], tmp_path: Path, chunk: int
) -> None:
    """In chunks: blocks are stored before any logits are sampled; whole: none is yet."""
    model = spoil(
        checkpoint("llama"), tmp_path, {"model.embed_tokens.weight": (BAD_TOKEN, 3)}, value=float("nan")
    )
    engine = {"prefix_caching": True, "max_batch_tokens": chunk}
    with Node.open(model, [engine], store_tokens=BLOCK) as node:
        (only,) = node.engines
        bad = [*FINE, BAD_TOKEN, *FINE]
        with pytest.raises(NotFiniteError):
            only.complete([make_request("bad", bad, 2)])
        node.settle()
        assert node.status()["num_cached_blocks"] <= (len(FINE) // BLOCK if chunk == 16 else 0)
        assert only.complete([make_request("good", [*FINE, *FINE], 2)])[0].error is None
        node.settle()
        assert node.status()["num_cached_blocks"] == len(FINE) * 2 // BLOCK
