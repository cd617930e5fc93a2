"""At which TP sizes a model runs: what its mixers' heads and channels allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rayk.models.config import (
    PARTS,
    DecoderConfig,
    GdnConfig,
    LayerConfig,
    Mamba1Config,
    Mamba2Config,
    MlaConfig,
    NormConfig,
)
from rayk.models.kv_specs import kv_cache_specs
from rayk.models.layers.mixers import BUILDERS
from rayk.models.tensor_parallel import why_tp_unsupported

MAMBA1 = Mamba1Config(
    num_channels=96,
    state_size=4,
    conv_width=4,
    dt_rank=2,
    conv_bias=True,
    proj_bias=False,
    inner_norm_eps=None,
)
MAMBA2 = Mamba2Config(
    num_heads=10,
    head_size=4,
    num_groups=2,
    state_size=8,
    conv_width=4,
    conv_bias=True,
    proj_bias=False,
    gate="plain",
    norm_eps=1e-5,
)
GDN = GdnConfig(
    num_key_heads=2, key_head_size=8, num_value_heads=8, value_head_size=8, conv_width=4, norm_eps=1e-6
)
MLA = MlaConfig(query_rank=None, latent_size=8, nope_size=8, rope_size=4, value_size=8, scale=1.0)


def model(*mixers: str) -> DecoderConfig:
    """12 query heads, 4 KV heads."""
    layers = tuple(LayerConfig(mixer=mixer, rope=None, mlp=None) for mixer in mixers)
    return DecoderConfig(
        architecture="x",
        family="x",
        hidden_size=48,
        num_layers=len(layers),
        num_query_heads=12,
        num_kv_heads=4,
        head_size=4,
        vocab_size=50,
        max_positions=64,
        norm=NormConfig(eps=1e-6),
        tie_embeddings=False,
        dtype="float32",
        layers=layers,
        mla=MLA,
        mamba1=MAMBA1,
        mamba2=MAMBA2,
        gdn=GDN,
    )


@pytest.mark.parametrize(
    ("mixers", "sizes"),
    [
        (("attention",), {1, 2, 3, 4, 6, 12}),
        (("mla",), {1, 2, 3, 4, 6, 12}),
        # Six runs of 16 channels, each with its taps and states.
        (("mamba1",), {1, 2, 3, 6}),
        (("mamba2",), {1, 2, 5, 10}),
        (("gdn",), {1, 2, 4, 8}),
        (("attention+mamba2",), {1, 2}),
        (("none", "attention", "none", "gdn"), {1, 2, 4}),
        (("none",), set(range(1, 17))),
    ],
    ids=str,
)
def test_every_mixer_is_asked(mixers: tuple[str, ...], sizes: set[int]) -> None:
    config = model(*mixers)
    assert {tp for tp in range(1, 17) if why_tp_unsupported(config, tp) is None} == sizes


@pytest.mark.parametrize(
    ("mixer", "tp", "reason"),
    [
        ("attention", 8, "12 query heads"),
        ("mla", 5, "12 query heads"),
        ("mamba1", 4, "6 runs of 16 channels"),
        ("mamba2", 4, "10 Mamba heads"),
        ("gdn", 3, "8 value heads"),
    ],
)
def test_the_reason_names_what_does_not_divide(mixer: str, tp: int, reason: str) -> None:
    assert why_tp_unsupported(model(mixer), tp) == f"TP {tp} does not divide the model's {reason}"


def test_windows_and_layers_that_keep_nothing_change_nothing() -> None:
    config = model("attention", "none")
    slid = replace(config, layers=(replace(config.layers[0], window=8), config.layers[1]))
    assert [why_tp_unsupported(slid, tp) for tp in range(1, 17)] == [
        why_tp_unsupported(config, tp) for tp in range(1, 17)
    ]


def test_every_mixer_has_a_builder_and_a_spec() -> None:
    """PARTS, BUILDERS and what a mixer is lowered to: three tables of the same mixers."""
    assert set(PARTS) == set(BUILDERS)
    for mixer, part in PARTS.items():
        assert list(kv_cache_specs(model(mixer), block_size=4, dtype="float32")) == [(0, part)]
