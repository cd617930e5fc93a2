"""Pages are shared, in memory and on disk, by engines whose KV means the same, and by no others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.actors.tier_actor import TierHost, disk_identity, tier_groups, tier_identity
from rayk.actors.tiers import HostTiers
from rayk.models import fingerprint
from rayk.types.config import EngineConfig
from rayk.types.errors import HandshakeMismatch
from rayk.types.offload import OffloadSettings
from tests.markers import thorough
from tests.offload.disk import finish
from tests.offload.faults import Case
from tests.offload.node import Node, describe

SETTINGS = OffloadSettings(host_bytes=16 << 20)
LENGTHS = (150, 220)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "nvfp4"])
def test_engines_of_another_dtype_find_nothing_in_a_folder(
    checkpoint: Callable[..., Path], reference: Callable[..., Any], tmp_path: Path, kv_dtype: str
) -> None:
    """Quantised, their pages are alike in size and fields."""
    path = checkpoint("qwen3")
    case = Case.make(path, reference(path), LENGTHS, 4)
    found: list[tuple[str, int]] = []
    for dtype in ("float32", "bfloat16", "float32", "bfloat16"):
        own = {"dtype": dtype, "kv_dtype": kv_dtype}
        with Node.open(path, [own], disk_folder=str(tmp_path)) as node:
            (engine,) = node.engines
            done = engine.complete([case.request(f"a{i}", i) for i in range(len(LENGTHS))])
            found.append((dtype, sum(d.info.get("num_disk_tokens", 0) for d in done)))
            node.settle()
            node.thread.ask(lambda tier: finish(tier.pages._disk))
    assert found == [("float32", 0), ("bfloat16", 0), ("float32", 352), ("bfloat16", 352)]


def test_no_tier_answers_for_another_salt(
    checkpoint: Callable[..., Path], reference: Callable[..., Any], tmp_path: Path
) -> None:
    """Not the host's, nor the disk's after a restart."""
    path = checkpoint("qwen3")
    case = Case.make(path, reference(path), LENGTHS[:1], 4)

    def cached(node: Node, name: str, salt: str | None) -> int:
        (done,) = node.engines[0].complete([replace(case.request(name, 0), cache_salt=salt)])
        assert done.token_ids == case.expected[0]
        node.settle()
        return int(done.info["num_cached_tokens"])

    with Node.open(path, [{}], disk_folder=str(tmp_path)) as node:
        assert [cached(node, f"a{salt}", salt) for salt in (None, "a", "b")] == [0, 0, 0]
        assert [cached(node, f"b{salt}", salt) for salt in ("a", "b", None)] == [144] * 3
        node.thread.ask(lambda tier: finish(tier.pages._disk))
    with Node.open(path, [{}], disk_folder=str(tmp_path)) as node:
        assert [cached(node, f"c{salt}", salt) for salt in ("c", "a", "b", None)] == [0, 144, 144, 144]


COMMON: dict[str, Any] = {"num_blocks": 64}
ALIKE: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"tp": 4, "layout": "LBHNC"},
    {"pp": 2},
    {"tp": 2, "pp": 3, "layout": "LBNHC"},
    {"layout": "BLHNC", "block_size": 32},
    {"tp": 2, "layout": "LBNHC", "block_size": 64, "num_blocks": 128, "kernel_block_size": 16},
    {"prefix_caching": True, "max_batch_tokens": 64, "max_seqs": 2},
]
"""What engines that share pages may differ in."""
FORMATS: list[dict[str, Any]] = [
    *({"dtype": dtype} for dtype in ("float32", "bfloat16", "float16")),
    *({"dtype": dtype, "kv_dtype": "fp8_e4m3"} for dtype in ("float32", "bfloat16", "float16")),
    *({"dtype": dtype, "kv_dtype": "nvfp4"} for dtype in ("float32", "bfloat16", "float16")),
    {"kv_dtype": "fp8_e4m3", "kv_scales": "token_head"},
    {"dtype": "bfloat16", "kv_dtype": "fp8_e4m3", "kv_scales": "token_head"},
]
"""What pages of which are not one another's."""


def kinds_of(path: Path, changes: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Of each engine, formed in earnest: its kind in memory, and its subfolder."""
    tiers = HostTiers("t", SETTINGS)
    found = []
    for own in changes:
        config = EngineConfig(model=str(path), **{**COMMON, **own})
        like = describe(config)
        engine = SimpleNamespace(config=config, descriptions=(like,))
        assert tiers._identity_of(engine) == tier_identity(config, SETTINGS, like)
        kind = tiers._kind_of(engine, "node")  # type: ignore[arg-type]
        found.append((repr(kind), tier_identity(config, SETTINGS, like).folder_name))
    return found


@thorough
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [("qwen3", "auto"), ("qwen3", "nvfp4"), ("gemma3", "fp8_e4m3"), ("jamba", "auto"), ("jamba", "fp8_e4m3")],
)
def test_engines_of_any_tp_stages_layout_and_block_size_share_pages(
    checkpoint: Callable[..., Path], family: str, kv_dtype: str
) -> None:
    kept = {"kv_dtype": kv_dtype, "dtype": "bfloat16"}
    kinds = kinds_of(checkpoint(family), [{**kept, **own} for own in ALIKE])
    assert len(set(kinds)) == 1


def test_engines_of_unlike_formats_share_nothing(checkpoint: Callable[..., Path]) -> None:
    kinds = kinds_of(checkpoint("qwen3"), FORMATS)
    assert len({in_memory for in_memory, _ in kinds}) == len(FORMATS)
    assert len({on_disk for _, on_disk in kinds}) == len(FORMATS)


def test_pages_on_disk_are_of_all_bytes_of_the_weights(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fingerprint that samples none of a large tensor takes the other revision for the same."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 64)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 0)
    path, other = checkpoint("qwen3"), tmp_path / "revision"
    shutil.copytree(path, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-100_000] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    found = []
    for folder in (path, other):
        config = EngineConfig(model=str(folder), **COMMON)
        like = describe(config)
        kept = disk_identity(tier_groups(config, SETTINGS), config, like)
        found.append((tier_identity(config, SETTINGS, like).text, kept.folder_name))
    (in_memory, on_disk), (same, another) = found
    assert in_memory == same
    assert on_disk != another


def test_scales_of_a_layer_tell_pages_apart(checkpoint: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(checkpoint("qwen3")), kv_dtype="fp8_e4m3", **COMMON)
    like = describe(config)
    assert like.kv_scales, "the format has scales beside its pages"
    first = min(like.kv_scales)
    k, v = like.kv_scales[first]
    for scales in ({first: (2 * k, v)}, {first: (k, 2 * v)}):
        other = replace(like, kv_scales={**like.kv_scales, **scales})
        assert tier_identity(config, SETTINGS, other) != tier_identity(config, SETTINGS, like)


def test_a_tier_takes_no_engine_of_another_kind(checkpoint: Callable[..., Path]) -> None:
    """However it came to be asked."""
    host = TierHost("t")
    ours, theirs = (
        EngineConfig(model=str(checkpoint("qwen3")), kv_dtype="fp8_e4m3", dtype=dtype, **COMMON)
        for dtype in ("float32", "bfloat16")
    )
    host._identities = (tier_identity(ours, SETTINGS, describe(ours)),)
    like = describe(theirs)
    with pytest.raises(HandshakeMismatch) as caught:
        asyncio.run(host.attach([like], tier_identity(theirs, SETTINGS, like), 1.0))
    assert caught.value.fields == (("dtype", "float32", "bfloat16"),)
