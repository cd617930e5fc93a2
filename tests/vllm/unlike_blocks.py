"""Run by vLLM's interpreter: what its NixlConnector makes of KV on CPUs where P has blocks of 64 tokens and D
of 128. Nothing is transferred: D's block gets the bytes of two of P's, as its descriptors have them, and
vLLM's own function puts them in order.

Prints as JSON whether D's kernel reads what P's stored, whether it reads what is predicted here, and what
rayk says of it.
"""

from __future__ import annotations

import json

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import kv_postprocess_blksize_on_receive

from rayk.kv.caches import FieldView
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import FullAttentionSpec
from rayk.transfer.diagnose import first_difference
from rayk.transfer.layer_view import make_layer_view
from rayk.transfer.verify import fetch_rows
from rayk.vllm.store_map import learn_block_map, store_of
from tests.vllm.cpu_store import cpu_layer

HEADS, SIZE = 2, 32
OURS, THEIRS = 128, 64


def stored(block_size: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A cache of two blocks, as the CPU's kernel stores these."""
    cache = torch.zeros(2, HEADS, block_size, 2 * SIZE)
    layer = cpu_layer(torch.float32, block_size, SIZE, "auto")
    layer.impl.do_kv_cache_update(layer, keys, values, cache, torch.arange(len(keys)))
    return cache


def read(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [head, token, size] of D's first block, where its kernel has them."""
    layer = cpu_layer(torch.float32, OURS, SIZE, "auto")
    found = learn_block_map(store_of(layer), torch.zeros_like(cache), HEADS, (SIZE, SIZE), torch.float32)
    keys, values = (field.read(cache[:1].flatten(1))[0] for field in (found.keys, found.values))
    return keys.reshape(HEADS, OURS, SIZE), values.reshape(HEADS, OURS, SIZE)


def said(found: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> str:
    """What rayk says of D's first block."""
    spec = FullAttentionSpec(OURS, HEADS, SIZE, SIZE, "float32", HEADS)
    units = tuple(range(HEADS))
    views = [
        make_layer_view(
            0,
            KVCacheGroup(0, spec, (0,), 1),
            [
                FieldView(name, values[None].contiguous(), units)
                for name, values in zip("kv", of, strict=True)
            ],
        )
        for of in (right, found)
    ]
    theirs, ours = (fetch_rows(view, [0], OURS) for view in views)
    return str(first_difference("r", views[1], OURS, theirs, ours))


def predicted(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A page of the kernel's is, head by head, all keys transposed, then all values. Two of them one behind
    the other are no page of twice the tokens: D takes the first half of each head for its keys, the second
    for its values."""
    halves = [
        torch.cat([keys[part].permute(1, 2, 0).flatten(1), values[part].permute(1, 0, 2).flatten(1)], 1)
        for part in (slice(0, THEIRS), slice(THEIRS, OURS))
    ]
    return halves[0].view(HEADS, SIZE, OURS).transpose(1, 2), halves[1].view(HEADS, OURS, SIZE)


if __name__ == "__main__":
    keys, values = torch.randn(2, OURS, HEADS, SIZE, generator=torch.Generator().manual_seed(0))
    received = stored(THEIRS, keys, values).reshape(1, HEADS, OURS, 2 * SIZE).clone()
    kv_postprocess_blksize_on_receive(received, torch.tensor([0]), OURS // THEIRS)
    found, right = read(received), read(stored(OURS, keys, values))
    wrong = predicted(keys, values)
    told = {
        "kernel_reads_itself": all(map(torch.equal, right, (keys.transpose(0, 1), values.transpose(0, 1)))),
        "as_stored": all(map(torch.equal, found, right)),
        "as_predicted": all(map(torch.equal, found, wrong)),
        "said": said(found, right),
        "wrong": [int((a != b).sum()) for a, b in zip(found, right, strict=True)],
    }
    print(json.dumps(told))
