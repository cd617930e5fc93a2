"""Bytes that arrived in another order are not taken for another request's, nor the other way round."""

from __future__ import annotations

import pytest
import torch

from rayk.kv.caches import FieldView
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import FullAttentionSpec
from rayk.transfer.diagnose import first_difference
from rayk.transfer.layer_view import make_layer_view
from rayk.transfer.verify import fetch_rows

BLOCK, HEADS, SIZE = 16, 2, 8
TOKENS = 2 * BLOCK + 5
SPEC = FullAttentionSpec(BLOCK, HEADS, SIZE, SIZE, "float32", HEADS)


def content(seed: int = 0) -> dict[str, torch.Tensor]:
    """[blocks, heads, rows of a block, elements] of each field."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, HEADS, BLOCK, SIZE, generator=generator) for name in ("k", "v")}


def as_two_pages(right: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put two blocks of half the size one behind the other, and read them as a kernel that keeps all keys of
    a head transposed, then its values: vLLM's on CPUs, as tests/vllm/unlike_blocks.py predicts it."""
    half = BLOCK // 2
    pages = [
        torch.cat([right["k"][:, :, part].transpose(2, 3).flatten(2), right["v"][:, :, part].flatten(2)], 2)
        for part in (slice(0, half), slice(half, BLOCK))
    ]
    keys = pages[0].view(3, HEADS, SIZE, BLOCK).transpose(2, 3)
    return {"k": keys.contiguous(), "v": pages[1].view(3, HEADS, BLOCK, SIZE).contiguous()}


def said(found: dict[str, torch.Tensor], num_tokens: int = TOKENS, first_row: int = 0, right=None) -> str:
    views = [
        make_layer_view(
            0, KVCacheGroup(0, SPEC, (0,), 1), [FieldView(n, v, tuple(range(HEADS))) for n, v in of.items()]
        )
        for of in (right or content(), found)
    ]
    theirs, ours = (fetch_rows(view, [0, 1, 2], num_tokens, first_row) for view in views)
    difference = first_difference("r", views[1], num_tokens, theirs, ours, first_row)
    assert difference is not None
    return difference.classification


REST = "other wrong tokens are of blocks that are not full"


@pytest.mark.parametrize(
    ("num_tokens", "first_row", "words"),
    [
        (TOKENS, 0, f"tokens 0 to 31 hold K and V of their blocks rearranged; {REST}"),
        (TOKENS, 4, f"tokens 16 to 31 hold K and V of their blocks rearranged; {REST}"),
        (2 * BLOCK, BLOCK, "tokens 16 to 31 hold K and V of their blocks rearranged"),
    ],
)
def test_pages_put_together_as_no_kernel_reads_them(num_tokens: int, first_row: int, words: str) -> None:
    classification = said(as_two_pages(content()), num_tokens, first_row)
    assert classification == f"same bytes in another order: {words}"


def test_one_field_alone() -> None:
    found = content()
    found["k"][1] = found["k"][1][:, torch.randperm(BLOCK, generator=torch.Generator().manual_seed(0))]
    assert said(found) == "same bytes in another order: tokens 16 to 31 hold K of their blocks rearranged"


def _one_bit(found: dict[str, torch.Tensor]) -> None:
    found["v"].view(torch.int32)[1, 0, 3, 3] ^= 1


def _another_request(found: dict[str, torch.Tensor]) -> None:
    found |= as_two_pages(content(seed=1))


def _other_block(found: dict[str, torch.Tensor]) -> None:
    found["k"], found["v"] = found["k"].roll(1, 0), found["v"].roll(1, 0)


def _one_value(found: dict[str, torch.Tensor]) -> None:
    found["k"].fill_(1.5)


@pytest.mark.parametrize("change", [_one_bit, _another_request, _other_block, _one_value])
def test_other_bytes_are_not_the_same_ones(change) -> None:
    found = as_two_pages(content())
    change(found)
    assert "another order" not in said(found)


def test_few_values_prove_no_order() -> None:
    """A block of few values has them all in many a place."""
    right = {name: values.sign() for name, values in content().items()}
    found = {name: values.flip(2) for name, values in right.items()}
    assert "another order" not in said(found, right=right)


def test_a_prompt_that_fills_no_block_is_not_judged() -> None:
    assert "stale or foreign content" in said(as_two_pages(content()), BLOCK - 1)
