"""One rank of an engine: its share of the weights, its KV cache, and one forward pass at a time.

Legend: R requests of the batch, T packed tokens.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from rayk.attention import AttentionGroups, AttentionLayer, get_backend
from rayk.engine.inputs import InputBuilder
from rayk.engine.plan import plan_engine
from rayk.kv.caches import TORCH_DTYPES, CanonicalKVCaches, allocate
from rayk.models.families import load_config
from rayk.models.loader import load_decoder
from rayk.parallel.comm import Comm
from rayk.types.batch import ScheduledBatch
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError


class EngineRank:
    """Model, cache and forward pass of one tensor-parallel rank.

    Every rank runs the same batches in the same order; only rank 0's result is used.
    """

    def __init__(self, config: EngineConfig, comm: Comm, *, poison: int | None = None) -> None:
        """Load this rank's weights and allocate its cache.

        `poison` fills the cache with that byte instead of zeros. Raises CheckpointError,
        UnsupportedArchitecture, Unsupported (TP size), LayoutVetoed, or UserError for a setting.
        """
        assert comm.size == config.tp, (comm.size, config.tp)
        for setting in ("prefix_caching", "fast_prefill"):
            if getattr(config, setting):
                raise UserError(f"{setting} is not supported yet", mend=f"{setting}: false")
        self.config = config
        self.comm = comm
        self.device = torch.device(config.device)
        self.model_config = load_config(Path(config.model))
        self.backend = get_backend(config.attention_backend, config.device)
        vetoes = [(f"backend {self.backend.name}", self.backend.veto)]
        self.plan = plan_engine(config, self.model_config, vetoes)
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
        self.attention_groups = AttentionGroups()
        self.attention_groups.initialise(self._attention_layers())
        self.forward_ns = 0
        """What the last step's forward pass took, inputs and metadata aside."""

    def _attention_layers(self) -> list[AttentionLayer]:
        layers = self.decoder.attention_layers
        return [
            AttentionLayer(
                layer=index,
                kv_group=group.index,
                backend=self.backend,
                spec=group.spec,
                num_query_heads=layers[index].num_query_heads,
                window=layers[index].window,
            )
            for group in self.plan.groups
            for index in group.layers
        ]

    @torch.inference_mode()
    def step(self, batch: ScheduledBatch) -> torch.Tensor:
        """Compute the batch's tokens, store their KV; float32 logits [requests that need logits, vocab]."""
        inputs = self._inputs.build(batch)
        metadata = self.attention_groups.build(inputs.metadata)
        started = time.monotonic_ns()
        hidden = self.decoder.forward(inputs.token_ids, inputs.positions, metadata)
        logits = self.decoder.logits(hidden[inputs.logits_index])
        if self.device.type == "cuda":
            # Transfers do not wait for queued kernels: no block changes hands before they have run.
            torch.cuda.current_stream(self.device).synchronize()
        self.forward_ns = time.monotonic_ns() - started
        return logits

    def close(self) -> None:
        """Unbind the cache."""
        for layer in self.decoder.attention_layers.values():
            layer.unbind_kv_cache()
