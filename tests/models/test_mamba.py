"""Models with Mamba layers against transformers, float32: prompts in pieces, at several TP sizes."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.parallel.local import LocalComm
from tests.helpers import assert_matches
from tests.markers import one_per
from tests.models.noise import assert_as_transformers
from tests.models.tiny import (
    Checkpoint,
    Paged,
    load,
    reference_logits,
    run_ranks,
    wide_scans,
    write_checkpoint,
)

NO_BIASES = {"mamba_conv_bias": False, "mamba_proj_bias": False}
BIASES = {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", {}),
    "mamba2-one-group": ("mamba2", {"n_groups": 1, "use_bias": False, "use_conv_bias": False}),
    "mamba2-four-groups": ("mamba2", {"n_groups": 4, "tie_word_embeddings": True}),
    # At TP 2 both ranks read group 1, at TP 4 ranks 1 and 2 read two groups each.
    "mamba2-three-groups": (
        "mamba2",
        {"hidden_size": 48, "num_heads": 12, "head_dim": 8, "n_groups": 3, "conv_kernel": 3},
    ),
    "jamba": ("jamba", {}),
    "jamba-dense": ("jamba", {"num_experts": 1, **NO_BIASES}),
    "bamba": ("bamba", {}),
    "bamba-biases": ("bamba", {"mamba_n_groups": 1, **BIASES}),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid-plain": (
        "granitemoehybrid",
        {"num_local_experts": 0, "position_embedding_type": None, **NO_BIASES},
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-biases": ("nemotron_h", {"use_bias": True, "mlp_bias": True, "moe_latent_size": None}),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1-norm-gate": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "projectors_bias": True},
    ),
    "falcon_h1-gate-norm": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 1,
            "projectors_bias": True,
            **BIASES,
        },
    ),
}
LENGTHS = (3, 17, 40)
CUTS = ((0, 1, 2, 3), (0, 4, 5, 12, 17), (0, 19, 20, 39, 40))
"""Of each prompt: a step takes every request's next piece, so that lengths mix."""


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(263) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    family, overrides = VARIANTS[request.param]
    return write_checkpoint(tmp_path_factory.mktemp(request.param), family, **overrides)


def every_logit(checkpoint: Checkpoint, tp_size: int, state_block_size: int | None = None) -> torch.Tensor:
    """Logits of every position of every prompt, which must be the same bits on all ranks."""
    ids = prompts()

    def body(comm):
        paged = Paged(
            load(checkpoint, comm), len(ids), tp=(comm.size, comm.rank), state_block_size=state_block_size
        )
        parts: list[list[torch.Tensor]] = [[] for _ in ids]
        for step in range(max(map(len, CUTS)) - 1):
            batch = [p[slice(*cuts[step : step + 2])] if step + 1 < len(cuts) else []
                     for p, cuts in zip(ids, CUTS, strict=True)]  # fmt: skip
            for part, logits in zip(parts, paged.step(batch), strict=True):
                part.append(logits)
        return torch.cat([piece for part in parts for piece in part if piece.numel()])

    ranks = run_ranks(tp_size, body)
    for other in ranks[1:]:
        assert torch.equal(ranks[0], other), "ranks of one group return different logits"
    return ranks[0]


def whole_logits(model: Any) -> torch.Tensor:
    """transformers', in the order of `every_logit`."""
    return torch.cat([reference_logits(model, ids) for ids in prompts()])


@one_per()
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", list(VARIANTS), indirect=True)
def test_logits_equal_transformers(checkpoint: Checkpoint, tp_size: int) -> None:
    assert_as_transformers(checkpoint, every_logit(checkpoint, tp_size), whole_logits)


@pytest.mark.parametrize("checkpoint", ["jamba", "falcon_h1"], indirect=True)
def test_states_in_small_blocks(checkpoint: Checkpoint) -> None:
    """A piece of a prompt crosses borders of state blocks: it reads one slot and writes several."""
    logits = every_logit(checkpoint, 2, state_block_size=6)
    assert_as_transformers(checkpoint, logits, whole_logits)


@one_per()
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", ["mamba2-three-groups", "jamba", "falcon_h1"], indirect=True)
def test_cache_holds_the_states_that_transformers_caches(checkpoint: Checkpoint, tp_size: int) -> None:
    ids = prompts()[1]

    def body(comm):
        paged = Paged(load(checkpoint, comm), 1, tp=(comm.size, comm.rank))
        for piece in (ids[:5], ids[5:6], ids[6:]):
            paged.step([piece])
        slot = int(paged.slots[0, 0])
        return {
            (layer, field.name, unit): field.view[slot, at, 0].clone()
            for (layer, part), owner in paged.decoder.cache_owners.items()
            if part == "state"
            for field in owner.field_views()
            for at, unit in enumerate(field.units)
        }

    ranks = run_ranks(tp_size, body)
    assert set().union(*ranks) == set(cached_states(checkpoint, checkpoint.model, ids)), "no rank holds some"
    for states in ranks:
        keys = sorted(states)

        def joined(model: Any, keys: list[tuple[int, str, int]] = keys) -> torch.Tensor:
            kept = cached_states(checkpoint, model, ids)
            return torch.cat([kept[key].flatten() for key in keys])

        mine = torch.cat([states[key].flatten() for key in keys])
        assert_as_transformers(checkpoint, mine, joined, what="states")


def cached_states(
    checkpoint: Checkpoint, model: Any, ids: list[int]
) -> dict[tuple[int, str, int], torch.Tensor]:
    """(layer, field, unit) -> what transformers keeps of it, in the order of our pages."""
    with torch.no_grad(), wide_scans(model):
        out = model(torch.tensor([ids]), use_cache=True)
    cache = getattr(out, "past_key_values", None) or out.cache_params
    found: dict[tuple[int, str, int], torch.Tensor] = {}
    for layer in checkpoint.config.state_layers:
        conv, state = (getattr(cache.layers[layer], f"{kind}_states")[0][0] for kind in ("conv", "recurrent"))
        for name, channels in conv_parts(checkpoint, conv[:, 1:]).items():
            found |= {(layer, name, unit): taps for unit, taps in enumerate(channels)}
        units = state.unflatten(0, (-1, 16)) if checkpoint.config.mamba1 else state
        found |= {(layer, "ssm", unit): values for unit, values in enumerate(units)}
    return found


def conv_parts(checkpoint: Checkpoint, conv: torch.Tensor) -> dict[str, torch.Tensor]:
    """[units, channels, taps] of each field."""
    config = checkpoint.config.mamba2
    if config is None:
        return {"conv_x": conv.unflatten(0, (-1, 16))}
    inner, width = config.num_heads * config.head_size, config.num_groups * config.state_size
    x, b, c = conv.split([inner, width, width])
    return {
        "conv_x": x.unflatten(0, (config.num_heads, -1)),
        "conv_b": b.unflatten(0, (config.num_groups, -1)),
        "conv_c": c.unflatten(0, (config.num_groups, -1)),
    }


@pytest.mark.parametrize("family", ["mamba2", "jamba", "falcon_h1"])
def test_bfloat16_is_close_to_transformers_bfloat16(tmp_path: Path, family: str) -> None:
    """A smoke test: the two round at different places."""
    # transformers' jamba wants a layer that attends.
    options = {"num_hidden_layers": 2, "num_experts": 1} if family == "jamba" else {"num_hidden_layers": 1}
    checkpoint = write_checkpoint(tmp_path, family, **options)
    ids = prompts()[2]
    rounded = copy.deepcopy(checkpoint.model).bfloat16()
    exact = reference_logits(copy.deepcopy(rounded).double(), ids)
    eager = reference_logits(rounded, ids)

    def body(comm):
        paged = Paged(load(checkpoint, comm, torch.bfloat16), 1, tp=(comm.size, comm.rank))
        for attention in paged.decoder.attention_layers.values():
            attention.bind_kv_cache(attention.kv_cache.bfloat16())
        return torch.cat([paged.step([piece])[0] for piece in (ids[:20], ids[20:])])

    for tp_size in (1, 2):
        assert_matches(run_ranks(tp_size, body)[0], exact, eager.float())


@pytest.mark.parametrize("checkpoint", ["granitemoehybrid", "falcon_h1"], indirect=True)
def test_embedding_multiplier_is_not_rounded(checkpoint: Checkpoint) -> None:
    """Unlike gemma's: in bfloat16 2.2 is 2.203."""
    ids = torch.arange(263)
    rounded = copy.deepcopy(checkpoint.model.model).bfloat16()
    theirs = rounded.embed_tokens(ids) * checkpoint.model.config.embedding_multiplier
    decoder = load(checkpoint, LocalComm(), torch.bfloat16)
    assert torch.equal(decoder._embedding.forward(ids), theirs.detach())


@pytest.mark.parametrize(("wide", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_residual_stream_is_as_wide_as_config_json_says(
    tmp_path: Path, wide: bool, dtype: torch.dtype
) -> None:
    checkpoint = write_checkpoint(tmp_path, "mamba2", residual_in_fp32=wide)
    theirs: list[torch.dtype] = []
    rounded = copy.deepcopy(checkpoint.model).bfloat16()
    for block in rounded.backbone.layers:
        block.register_forward_hook(lambda *call: theirs.append(call[-1].dtype))
    reference_logits(rounded, [1, 2, 3])
    decoder = load(checkpoint, LocalComm(), torch.bfloat16)
    paged = Paged(decoder, 1)
    seen = [Seen(layer) for layer in decoder.layers]
    decoder.layers = tuple(seen)
    assert paged.step([[1, 2, 3]])[0].dtype == torch.float32
    assert [layer.dtype for layer in seen] == theirs == [dtype] * 3


class Seen:
    """A layer whose output's dtype is kept."""

    rope = None

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.dtype: torch.dtype | None = None

    def forward(self, *call: Any) -> torch.Tensor:
        out: torch.Tensor = self._layer.forward(*call)
        self.dtype = out.dtype
        return out
