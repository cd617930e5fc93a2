"""What mixers with a recurrent state make of the cache they are given: views, units, rebinding, freeing."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.kv.caches import CanonicalKVCaches, allocate
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.models.decoder import Decoder
from rayk.models.kv_specs import kv_cache_specs
from rayk.parallel.local import LocalComm
from rayk.parallel.shard import EngineShape
from tests.markers import one_per
from tests.models.noise import assert_as_transformers
from tests.models.tiny import Checkpoint, Paged, load, reference_logits, run_ranks, write_checkpoint

NUM_REQUESTS = 2


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("mamba2"), "mamba2", num_hidden_layers=2)


def pieces(seed: int = 5) -> list[list[list[int]]]:
    """What each step feeds each request."""
    rng = random.Random(seed)
    return [[[rng.randrange(263) for _ in range(n)] for n in step] for step in ((9, 4), (1, 7), (1, 1))]


def caches(decoder: Decoder, layout: str, tp: tuple[int, int] = (1, 0)) -> CanonicalKVCaches:
    """A real buffer for a model with recurrent layers only, every byte of which is poison."""
    specs = kv_cache_specs(decoder.config, block_size=8, dtype="float32")
    geometry = plan_rank(
        group_layers(specs),
        LAYOUTS[layout],
        shape=EngineShape(tp[0]),
        rank=tp[1],
        num_blocks=NUM_REQUESTS + 1,
    )
    return allocate(geometry, torch.device("cpu"), fill=-1)


def logits(decoder: Decoder, layouts: list[str], tp: tuple[int, int] = (1, 0)) -> torch.Tensor:
    """Of all steps, each of which runs in a cache of its own layout with the bytes of the one before."""
    paged = Paged(decoder, NUM_REQUESTS, tp=tp)
    outs: list[torch.Tensor] = []
    for index, (layout, step) in enumerate(zip(layouts, pieces(), strict=True)):
        old = {key: owner.field_views() for key, owner in decoder.cache_owners.items()}
        made = caches(decoder, layout, tp)
        made.bind(decoder.cache_owners)
        for key, owner in decoder.cache_owners.items() if index else ():
            for before, now in zip(old[key], owner.field_views(), strict=True):
                assert (before.name, before.units) == (now.name, now.units)
                now.view.copy_(before.view)
        outs += paged.step(step)
    return torch.cat(outs)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_rebinding_to_another_layout_keeps_results(mamba2: Checkpoint, tp_size: int) -> None:
    def body(comm: Any) -> list[torch.Tensor]:
        tp = (comm.size, comm.rank)
        orders = (["BLHNC"] * 3, ["BHLNC", "LHBNC", "BLNHC"], ["LBNHC", "BLHNC", "LBHNC"])
        return [logits(load(mamba2, comm), list(order), tp) for order in orders]

    for ranks in run_ranks(tp_size, body):
        for order, mine in enumerate(ranks):
            assert_as_transformers(mamba2, mine, reference, what=f"order {order}")


def reference(model: Any) -> torch.Tensor:
    """transformers' logits, in the order of `logits`."""
    fed: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
    cuts = []
    for step in pieces():
        for request, piece in enumerate(step):
            cuts.append((request, len(fed[request]), len(fed[request]) + len(piece)))
            fed[request] += piece
    whole = [reference_logits(model, ids) for ids in fed]
    return torch.cat([whole[request][start:stop] for request, start, stop in cuts])


@pytest.mark.parametrize(
    ("layout", "overrides", "launches"),
    [
        ("BLHNC", {}, 1),
        ("LBHNC", {}, 1),
        # Between a unit and the next lie other layers, or other blocks.
        ("BHLNC", {}, 3),
        ("LHBNC", {}, 3),
        # One group's taps of B are 60 bytes, so that those of C begin after a gap.
        ("BLHNC", {"n_groups": 1, "state_size": 5}, 2),
    ],
)
def test_adjacent_taps_are_convolved_at_once(
    tmp_path: Path, layout: str, overrides: dict[str, Any], launches: int
) -> None:
    checkpoint = write_checkpoint(tmp_path, "mamba2", num_hidden_layers=2, **overrides)
    decoder = load(checkpoint, LocalComm())
    assert_as_transformers(checkpoint, logits(decoder, [layout] * 3), reference)
    for mixer in decoder.cache_owners.values():
        assert len(mixer._conv._runs) == launches


@one_per()
@pytest.mark.parametrize("family", ["mamba2", "jamba", "falcon_h1"])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_units_are_what_was_cut(tmp_path: Path, family: str, tp_size: int) -> None:
    """Without weights the projection of x, B and C is its bias, which counts its rows: the taps show which
    channels a rank has."""
    checkpoint = write_checkpoint(
        tmp_path, family, **({} if family == "mamba2" else {"mamba_proj_bias": True})
    )
    with torch.no_grad():
        for _, mixer in checkpoint.model.named_modules():
            if hasattr(mixer, "in_proj"):
                mixer.in_proj.weight.zero_()
                mixer.in_proj.bias.copy_(torch.arange(len(mixer.in_proj.bias)))
    checkpoint.model.save_pretrained(tmp_path)
    first_rows = first_rows_of(checkpoint)

    def body(comm: Any) -> list[set[tuple[str, int]]]:
        paged = Paged(load(checkpoint, comm), 1, tp=(comm.size, comm.rank))
        paged.step([[1, 2, 3, 4, 5]])
        owners = [owner for (_, part), owner in paged.decoder.cache_owners.items() if part == "state"]
        bound = []
        for owner in owners:
            views = owner.field_views()
            for field in views:
                if field.name in first_rows:
                    taps = field.view[int(paged.slots[0, 0]), :, 0]
                    assert_rows(taps, field.units, *first_rows[field.name])
            bound.append({(field.name, unit) for field in views for unit in field.units})
        return bound

    specs = kv_cache_specs(checkpoint.config, block_size=8, dtype="float32")
    spec = next(spec for key, spec in specs.items() if key[1] == "state")
    for rank, bound in enumerate(run_ranks(tp_size, body)):
        fields = {(f.name, unit) for f in spec.fields() for unit in f.shard(tp_size, rank)}
        assert bound == [fields] * len(checkpoint.config.state_layers)


def first_rows_of(checkpoint: Checkpoint) -> dict[str, tuple[int, int, float]]:
    """Field of taps -> taps per channel, the first row of the projection that makes them, its multiplier."""
    config = checkpoint.config.mamba2
    if config is None:
        return {"conv_x": (3, 0, 1.0)}
    inner, width = config.num_heads * config.head_size, config.num_groups * config.state_size
    _, x, b, c, _ = config.part_multipliers
    starts = {"conv_x": (inner, x), "conv_b": (2 * inner, b), "conv_c": (2 * inner + width, c)}
    return {name: (config.conv_width - 1, *start) for name, start in starts.items()}


def assert_rows(taps: torch.Tensor, units: tuple[int, ...], num_taps: int, start: int, by: float) -> None:
    """taps [units, channels * taps] hold the numbers of their channels' rows, times `by`."""
    channels = taps.unflatten(-1, (-1, num_taps))
    for unit, found in zip(units, channels, strict=True):
        first = start + unit * len(found)
        rows = torch.arange(first, first + len(found)).float() * by
        assert torch.equal(found, rows[:, None].expand_as(found)), unit


def test_field_views_are_the_memory_of_the_cache(mamba2: Checkpoint) -> None:
    decoder = load(mamba2, LocalComm())
    for layout in ("BLHNC", "BHLNC"):
        made = caches(decoder, layout)
        made.bind(decoder.cache_owners)
        for (layer, part), owner in decoder.cache_owners.items():
            bundles = made.view(layer, part)
            for field in owner.field_views():
                field.view.fill_(float(layer + 1))
                assert bool((bundles[field.name] == layer + 1).all()), (layout, field.name)
                assert field.view.shape == bundles[field.name].shape


class Pages(bytearray):
    """Memory whose end shows: a tensor over it keeps it alive."""


def test_unbinding_frees_the_memory(mamba2: Checkpoint) -> None:
    decoder = load(mamba2, LocalComm())
    paged = Paged(decoder, 1)
    pages = Pages(1 << 20)
    alive = weakref.ref(pages)
    buffer = torch.frombuffer(pages, dtype=torch.float32)
    del pages
    start = 0
    for owner in decoder.cache_owners.values():
        bundles = {}
        for field in owner.field_views():
            count = field.view.numel()
            bundles[field.name] = buffer[start : start + count].view(field.view.shape)
            start += count
        owner.bind_kv_cache(bundles)
    paged.step([[1, 2, 3]])
    del bundles, buffer, field
    assert alive() is not None, "nothing was bound"
    for owner in decoder.cache_owners.values():
        owner.unbind_kv_cache()
    assert alive() is None
    with pytest.raises(AssertionError, match="layer 0: no state cache is bound"):
        paged.step([[4]])
    with pytest.raises(AssertionError, match="no state cache is bound"):
        decoder.cache_owners[1, "state"].field_views()


def test_bundles_of_another_shape_are_refused(mamba2: Checkpoint) -> None:
    owner = load(mamba2, LocalComm()).cache_owners[0, "state"]
    shapes = {"conv_x": (8, 48), "conv_b": (2, 36), "conv_c": (2, 36), "ssm": (8, 192)}
    right = {name: torch.zeros(3, units, 1, size) for name, (units, size) in shapes.items()}
    owner.bind_kv_cache(right)
    for name in shapes:
        with pytest.raises(AssertionError):
            owner.bind_kv_cache(right | {name: right[name][:, 1:]})
    with pytest.raises(AssertionError, match="bfloat16"):
        owner.bind_kv_cache(right | {"ssm": right["ssm"].bfloat16()})
