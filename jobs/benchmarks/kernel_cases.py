"""The kernels that `kernels.py` compiles: which, and for which GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
VARIANTS = ("plain", "window", "sinks+cap", "window+sinks+cap")
QUANTISED = ("fp8_e4m3", "fp8_e4m3_token_head", "nvfp4")


@dataclass(frozen=True)
class Case:
    target: str
    phase: str
    """prefill, decode (one program a sequence), split (several), store; of state kernels, and of parts of
    attention, `op` for a mixed batch and `op-step` for one token a request."""
    dtype: str
    head: tuple[int, int]
    """Head sizes of keys and values; of a state, its two."""
    group: int = 4
    """Query heads a KV head; odd ones come with a smaller second group."""
    variant: str = "window+sinks+cap"
    slots: int = 16
    """Of a kernel block of keys and values."""
    kv: str = "auto"
    """Format of the cache: auto (the dtype), or a quantised one."""


def all_cases() -> Iterator[Case]:
    everything = VARIANTS[-1]
    yield from production_cases()
    for target in TARGETS:
        for phase in ("prefill", "split"):
            for head, group in ((64, 4), (80, 3), (128, 8), (192, 1), (256, 7)):
                for variant in VARIANTS:
                    yield Case(target, phase, "bfloat16", (head, head), group, variant)
            for head in (64, 128, 256):
                yield Case(target, phase, "float16", (head, head))
                for variant in ("plain", everything):
                    yield Case(target, phase, "float32", (head, head), 4, variant)
            yield Case(target, phase, "bfloat16", (192, 128), 16, everything)
            # What divides the runs of chunked local attention need not be a power of two.
            for slots in (1, 4, 12, 100):
                yield Case(target, phase, "bfloat16", (128, 128), 5, "plain", slots)
        for head in (64, 128, 256):
            yield Case(target, "decode", "bfloat16", (head, head))
            yield from _row_cases(target, head)
        yield from _copy_cases(target)
        yield from _layer_cases(target, ("float32", "float16", "bfloat16"))
        yield from _state_cases(target)
        yield from _latent_and_delta_cases(target)
        yield from _all_part_cases(target)
        # Tiles of those are chosen for NVIDIA's registers; on AMD they run, and spill.
        if not target.startswith("gfx"):
            yield from _quantised_cases(target, (64, 128, 256), ("bfloat16", "float32"))
            yield from _quantised_latent_cases(target, ("bfloat16", "float16", "float32"), (2, 16, 24, 128))
        yield from _scaled_cases(target, ("bfloat16", "float16"))
    yield from _scaled_cases("sm_89", ("bfloat16", "float16"))


def production_cases() -> Iterator[Case]:
    """What a large model's layers launch most, on GPUs with asynchronous copies."""
    for target in ("sm_80", "sm_90", "sm_100"):
        for head, group in ((64, 8), (128, 8), (256, 4)):
            for phase in ("split", "prefill"):
                yield Case(target, phase, "bfloat16", (head, head), group, "plain")
        for kv in QUANTISED:
            for phase in ("split", "prefill"):
                yield Case(target, phase, "bfloat16", (128, 128), 8, "plain", kv=kv)
            for phase, heads in (("mla-step", 16), ("mla", 128)):
                yield Case(target, phase, "bfloat16", (512, 64), heads, "plain", kv=kv)
        for phase, heads in (("mla-step", 16), ("mla-step", 128), ("mla", 128)):
            yield Case(target, phase, "bfloat16", (512, 64), heads, "plain")
        yield from _part_cases(target, "bfloat16", 128, 8)
        for phase, head, group in (("mamba1", (16, 16), 1), ("ssd", (64, 128), 64), ("delta", (128, 128), 2)):
            yield Case(target, phase, "bfloat16", head, group, "plain")
    for target in ("sm_89", "sm_90", "sm_100"):
        yield from _scaled_cases(target, ("bfloat16",), (1, 1024))


def _copy_cases(target: str) -> Iterator[Case]:
    for unit in (16, 8, 4, 2, 1):
        for num_units in (1, 15, 1023):
            yield Case(target, "copy", f"{unit} bytes", (unit, num_units), 1, "plain")


def _layer_cases(target: str, dtypes: Sequence[str], *, quick: bool = False) -> Iterator[Case]:
    """What stands between matrix products, and the products of experts with few rows and with many."""
    heads = ((128, 64),) if quick else ((128, 64), (64, 64), (128, 128), (256, 256), (80, 20))
    for dtype in dtypes:
        for width in (2880,) if quick else (64, 2880, 8192, 16384):
            yield Case(target, "norm", dtype, (width, width), 1, "plain")
            yield Case(target, "gate", dtype, (width, width), 1, "plain")
        for head in heads:
            yield Case(target, "rotate", dtype, head, 1, "plain")
        yield Case(target, "choose", dtype, (128, 4), 1, "plain")
        yield Case(target, "rows", dtype, (2880, 4), 1, "plain")
        yield Case(target, "altup", dtype, (2048, 4), 1, "plain")
        for rows in (1, 256) if quick else (1, 32, 64, 256):
            yield Case(target, "experts", dtype, (rows, 2880), 1, "plain")


def _scaled_cases(
    target: str, dtypes: Sequence[str], rows: Sequence[int] = (1, 32, 64, 1024)
) -> Iterator[Case]:
    """Products with matrices kept in e4m3, scaled by blocks and by rows, and those of experts."""
    for dtype, num_rows in product(dtypes, rows):
        for variant in ("blocks", "rows"):
            yield Case(target, "scaled", dtype, (num_rows, 2048), 1, variant)
        yield Case(target, "scaled-experts", dtype, (num_rows, 2048), 1, "blocks")


def _quantised_cases(target: str, heads: Sequence[int], dtypes: Sequence[str]) -> Iterator[Case]:
    for kv, head, dtype in product(QUANTISED, heads, dtypes):
        for phase in ("prefill", "split"):
            yield Case(target, phase, dtype, (head, head), kv=kv)
        yield Case(target, "store", dtype, (head, head), 1, "plain", kv=kv)


def _quantised_latent_cases(target: str, dtypes: Sequence[str], heads: Sequence[int]) -> Iterator[Case]:
    for kv, dtype, group in product(QUANTISED, dtypes, heads):
        for phase in ("mla", "mla-step"):
            yield Case(target, phase, dtype, (512, 64), group, "plain", kv=kv)


def _part_cases(target: str, dtype: str, head: int, group: int = 4, variant: str = "plain") -> Iterator[Case]:
    """Attention to the keys that a rank holds of them, and to latents, with the query heads of all ranks."""
    for phase in ("parts", "parts-step"):
        yield Case(target, phase, dtype, (head, head), group, variant)
        if head == 128:
            yield Case(target, f"mla-{phase}", dtype, (512, 64), 128, "plain")


def _all_part_cases(target: str) -> Iterator[Case]:
    for head, group in ((64, 4), (80, 3), (128, 8), (256, 7)):
        yield from _part_cases(target, "bfloat16", head, group, "cap")
    for head, dtype in product((64, 128, 256), ("float16", "float32")):
        yield from _part_cases(target, dtype, head)
    # As of all quantised caches, tiles on AMD spill.
    for kv, step in product(() if target.startswith("gfx") else QUANTISED, ("", "-step")):
        for head in (128, 256):
            yield Case(target, f"parts{step}", "bfloat16", (head, head), variant="cap", kv=kv)
        for heads in (16, 128):
            yield Case(target, f"mla-parts{step}", "bfloat16", (512, 64), heads, "plain", kv=kv)


def _row_cases(target: str, head: int) -> Iterator[Case]:
    """What writes a token's row, and what proves it."""
    for dtype in ("float32", "float16", "bfloat16"):
        yield Case(target, "store", dtype, (head, head), 1, "plain")
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        yield Case(target, "digest", dtype, (head, head), 1, "plain")


def _state_cases(target: str) -> Iterator[Case]:
    for dtype in ("float32", "float16", "bfloat16"):
        for phase in ("conv", "conv-step"):
            yield Case(target, phase, dtype, (128, 3), 1, "plain")
        for phase in ("mamba1", "mamba1-step"):
            yield Case(target, phase, dtype, (16, 16), 1, "plain")
        # Many heads have large tiles.
        yield Case(target, "ssd", dtype, (64, 128), 64, "plain")
        for head in ((64, 128), (128, 64), (64, 256), (16, 16), (16, 24)):
            for phase in ("ssd", "ssd-step"):
                yield Case(target, phase, dtype, head, 8, "plain")


def _latent_and_delta_cases(target: str) -> Iterator[Case]:
    """DeepSeek's latents with the query heads of several ranks; Qwen3-Next's heads and smaller ones."""
    for dtype in ("float32", "float16", "bfloat16"):
        for phase in ("mla", "mla-step"):
            for heads in (2, 16, 24, 128):
                yield Case(target, phase, dtype, (512, 64), heads, "plain")
            yield Case(target, phase, dtype, (256, 32), 16, "plain")
        for phase in ("delta", "delta-step"):
            for size in (16, 32, 64, 128, 256):
                yield Case(target, phase, dtype, (size, size), 2, "plain")
        # Many heads have large tiles.
        yield Case(target, "delta", dtype, (128, 128), 32, "plain")


def quick_cases() -> Iterator[Case]:
    for target in TARGETS:
        for head in (64, 128, 256):
            yield Case(target, "prefill", "bfloat16", (head, head))
        yield Case(target, "prefill", "bfloat16", (128, 128), 8, "plain")
        yield Case(target, "prefill", "float16", (80, 80), 3)
        yield Case(target, "prefill", "float32", (256, 256))
        yield Case(target, "split", "bfloat16", (128, 128))
        yield Case(target, "split", "float32", (256, 256), 4, "plain")
        yield Case(target, "decode", "float16", (256, 256), 7)
        yield Case(target, "store", "bfloat16", (128, 128), 1, "plain")
        yield Case(target, "digest", "bfloat16", (128, 128), 1, "plain")
        # Fields that start in the middle of a word.
        yield Case(target, "digest", "bfloat16", (6, 20), 1, "plain")
        yield Case(target, "copy", "16 bytes", (16, 16), 1, "plain")
        yield Case(target, "copy", "2 bytes", (2, 3), 1, "plain")
    for target in ("sm_90", "gfx942"):
        yield from _layer_cases(target, ("bfloat16",), quick=True)
    for phase in ("prefill", "split"):
        yield Case("sm_90", phase, "bfloat16", (128, 128), 5, "plain", slots=12)
    yield Case("sm_100", "rotate", "bfloat16", (64, 64), 1, "plain")
    yield Case("sm_100", "norm", "float16", (8192, 8192), 1, "plain")
    yield from _quantised_cases("sm_90", (128,), ("bfloat16",))
    yield from _quantised_latent_cases("sm_90", ("bfloat16",), (16, 128))
    for target in ("sm_90", "gfx942"):
        yield from _scaled_cases(target, ("bfloat16",), (1,))
        for phase in ("conv", "conv-step"):
            yield Case(target, phase, "bfloat16", (128, 3), 1, "plain")
        for phase in ("mamba1", "mamba1-step"):
            yield Case(target, phase, "bfloat16", (16, 16), 1, "plain")
        for group in (8, 64):
            yield Case(target, "ssd", "bfloat16", (64, 128), group, "plain")
        yield Case(target, "ssd", "bfloat16", (16, 24), 8, "plain")
        yield Case(target, "ssd-step", "bfloat16", (64, 128), 8, "plain")
        yield Case(target, "mla", "bfloat16", (512, 64), 16, "plain")
        yield Case(target, "mla", "float32", (512, 64), 16, "plain")
        yield Case(target, "mla-step", "bfloat16", (512, 64), 128, "plain")
        for group in (2, 32):
            yield Case(target, "delta", "bfloat16", (128, 128), group, "plain")
        yield Case(target, "delta-step", "bfloat16", (128, 128), 2, "plain")
