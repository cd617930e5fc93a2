"""Faults an experiment plants, as a rank commits them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rayk.handover.planted_state import wrong_state
from rayk.models.layers.rope import Rotary, Rotation
from rayk.transfer.faults import FLIP_BIT, TransferFault
from rayk.types.fault_table import STATE_POINTS

if TYPE_CHECKING:
    from rayk.models.decoder import Decoder
    from rayk.models.layers.mixers import Mixer
    from rayk.models.layers.places import Places


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedFault:
    """One fault of one rank; see specs.FaultSpec for the fields."""

    kind: str
    point: str | None = None
    layer: int | None = None
    step: int | None = None
    request: int | None = None
    seed: int = 0
    transfer_fault: TransferFault | None = None
    """What a fault at a point of a transfer's life does."""

    def hits(self, request_id: str) -> bool:
        """Tell whether this request is meant: the one of prompt `request`, or any."""
        index = request_id.rpartition("/")[2].partition("~")[0]
        return self.request is None or index == str(self.request)

    def flipped_bit(self) -> TransferFault:
        """Return one bit of the first token's first bytes, chosen by the seed."""
        return TransferFault(kind=FLIP_BIT, byte=self.seed // 8 % 16, bit=self.seed % 8)


class FaultBox:
    """A rank's faults of one kind each strike once."""

    def __init__(self, faults: Sequence[PlantedFault]) -> None:
        self._left = list(faults)
        self.num_faults_hit: Counter[tuple[str, str]] = Counter()
        """(kind, point) -> how many have struck."""

    def take(self, kind: str, request_id: str) -> PlantedFault | None:
        """Take the fault of this kind that hits this request, which asking uses up; None if there is none."""
        for fault in self._left:
            if fault.kind == kind and fault.hits(request_id):
                self._left.remove(fault)
                self.num_faults_hit[kind, fault.point or ""] += 1
                return fault
        return None


def kill_raylet() -> None:
    """End this worker's node as a power cut would. Ray starts every worker as a child of its raylet."""
    parent = os.getppid()
    name = Path(f"/proc/{parent}/comm").read_text(encoding="ascii").strip()
    assert name == "raylet", f"the parent of this worker is {name}, not a raylet"
    os.kill(parent, signal.SIGKILL)


# --- wrong_kv: a rank that computes its own keys or values wrongly ---------------------------------


def commit_wrong_kv(decoder: Decoder, faults: Sequence[PlantedFault]) -> None:
    """Make a loaded decoder, its caches bound, compute or store one layer's KV wrongly from now on.

    Both sides of a transfer then hold the same wrong bytes: digests agree, only the values tell.
    """
    for fault in faults:
        if fault.kind == "wrong_kv":
            _commit(decoder, fault.layer or 0, fault.point)


def _commit(decoder: Decoder, layer: int, point: str | None) -> None:
    if point is not None and point in STATE_POINTS:
        _replace_mixer(decoder, layer, wrong_state(decoder, layer, point))
        return
    if point == "k_norm":
        weight = decoder.attention_layers[layer].key_norm_weight
        assert weight is not None, f"layer {layer} has no k-norm"
        weight.copy_(weight.roll(1, -1))
        return
    mixer = decoder.layer(layer).mixer
    assert mixer is not None, f"layer {layer} has no mixer"
    # [B, U, N, D] of keys or of latents.
    view = decoder.cache_owners[layer, "attention"].field_views()[0].view
    if point == "rope":
        rope = decoder.config.layers[layer].rope
        assert rope is not None, f"layer {layer} has no positions"
        rotary = Rotary(rope, dtype=torch.float32, device=view.device)
        wrong: Mixer = _OnePositionOn(mixer, rotary.at(torch.ones(1, device=view.device)))
    else:
        assert point == "store_kv", point
        wrong = _OneSlotOn(mixer, view.shape[2])
    _replace_mixer(decoder, layer, wrong)


def _replace_mixer(decoder: Decoder, layer: int, mixer: Mixer) -> None:
    layers = list(decoder.layers)
    layers[decoder.stage.index(layer)] = replace(decoder.layer(layer), mixer=mixer)
    decoder.layers = tuple(layers)


class _OnePositionOn:
    """A mixer that takes every token to stand one position later. Implements models.layers.mixers.Mixer."""

    def __init__(self, mixer: Mixer, one: Rotation) -> None:
        """`one` is the rotation of position 1."""
        self._mixer = mixer
        length = torch.hypot(one.cos, one.sin)
        self._cos, self._sin = one.cos / length, one.sin / length

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        rotation = places.rotation
        assert rotation is not None
        cos, sin = rotation.cos, rotation.sin
        on_cos, on_sin = self._cos.to(cos.dtype), self._sin.to(cos.dtype)
        turned = rotation._replace(cos=cos * on_cos - sin * on_sin, sin=sin * on_cos + cos * on_sin)
        return self._mixer.forward(x, places._replace(rotation=turned), metadata)


class _OneSlotOn:
    """A mixer that stores every token in the next slot of its kernel block, the last one in the first."""

    def __init__(self, mixer: Mixer, block_size: int) -> None:
        self._mixer = mixer
        self._block_size = block_size

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """`metadata` is the paged backends', by part where the layer has two caches."""
        paged = metadata["attention"] if isinstance(metadata, Mapping) else metadata
        slots, size = paged.common.slot_mapping, self._block_size
        shifted = torch.where(slots < 0, slots, slots - slots % size + (slots + 1) % size)
        wrong = replace(paged, common=replace(paged.common, slot_mapping=shifted))
        if isinstance(metadata, Mapping):
            return self._mixer.forward(x, places, {**metadata, "attention": wrong})
        return self._mixer.forward(x, places, wrong)
