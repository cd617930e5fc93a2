"""One rank of an engine: its share of the weights, its KV cache, and one forward pass at a time.

Legend: R requests of the batch, T packed tokens.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rayk.attention.backend import get_backend
from rayk.engine.inputs import InputBuilder, ModelInputs
from rayk.engine.plan import EnginePlan, plan_engine
from rayk.kv.caches import TORCH_DTYPES, CanonicalKVCaches, allocate
from rayk.kv.layout import KVCacheLayout
from rayk.models.families import load_config
from rayk.models.loader import load_decoder
from rayk.parallel.comm import Comm
from rayk.types.batch import ScheduledBatch
from rayk.types.config import EngineConfig


class EngineRank:
    """Model, cache and forward pass of one tensor-parallel rank.

    Every rank runs the same batches in the same order; only rank 0's result is used.
    """

    def __init__(self, config: EngineConfig, comm: Comm, *, poison: int | None = None) -> None:
        """Load this rank's weights and allocate its cache.

        `poison` fills the cache with that byte instead of zeros. Raises CheckpointError,
        UnsupportedArchitecture, Unsupported (TP size) or LayoutVetoed.
        """
        assert comm.size == config.tp, (comm.size, config.tp)
        self.config = config
        self.comm = comm
        self.device = torch.device(config.device)
        self.model_config = load_config(Path(config.model))
        self.backend = get_backend(config.attention_backend, config.device)
        self.plan = self._plan()
        geometry = self.plan.ranks[comm.rank]
        self.caches: CanonicalKVCaches = allocate(geometry, self.device, fill=0 if poison is None else poison)
        self.decoder = load_decoder(
            Path(config.model),
            self.model_config,
            comm=comm,
            dtype=TORCH_DTYPES[config.dtype],
            device=self.device,
            backend=self.backend,
        )
        self.caches.bind(self.decoder.attention_layers)
        self._inputs = InputBuilder(
            geometry,
            max_seqs=config.max_seqs,
            max_positions=self.model_config.max_positions,
            device=self.device,
        )
        self._group_of = {layer: g.index for g in self.plan.groups for layer in g.layers}

    def _plan(self) -> EnginePlan:
        specs = plan_engine(self.config, self.model_config).groups

        def veto(layout: KVCacheLayout) -> str | None:
            reasons = (self.backend.veto(layout.name, g.spec) for g in specs)
            return next((reason for reason in reasons if reason is not None), None)

        return plan_engine(self.config, self.model_config, [(f"backend {self.backend.name}", veto)])

    @torch.inference_mode()
    def step(self, batch: ScheduledBatch) -> torch.Tensor:
        """Compute the batch's tokens, store their KV; float32 logits [requests that need logits, vocab]."""
        inputs = self._inputs.build(batch)
        hidden = self.decoder(inputs.token_ids, inputs.positions, self._metadata(inputs))
        return self.decoder.logits(hidden[inputs.logits_index])

    def _metadata(self, inputs: ModelInputs) -> dict[int, object]:
        """Backend metadata per layer, built once for layers of equal group and window."""
        built: dict[tuple[int, int | None], object] = {}
        per_layer: dict[int, object] = {}
        for layer, group in self._group_of.items():
            window = self.model_config.layers[layer].window
            if (group, window) not in built:
                built[group, window] = self.backend.build(inputs.metadata[group], window)
            per_layer[layer] = built[group, window]
        return per_layer

    def close(self) -> None:
        """Unbind the cache and drop the weights."""
        for layer in self.decoder.attention_layers.values():
            layer.unbind_kv_cache()
