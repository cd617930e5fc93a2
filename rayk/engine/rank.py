"""One rank of an engine: its share of the weights, its KV cache, and one forward pass at a time.

Legend: R requests of the batch, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayk.attention import AttentionGroups, AttentionLayer, AttentionView, CommonAttentionMetadata
from rayk.engine.backends import LayerBackends
from rayk.engine.fence import make_fence
from rayk.engine.graphs import CudaRecorder, DecodeGraphs, Recorder, StepViews
from rayk.engine.inputs import InputBuilder, ModelInputs
from rayk.engine.proposing import Proposing
from rayk.engine.replays import MAX_ROWS, CallRecorder
from rayk.engine.rollback import StateRollback
from rayk.engine.speculation import check_speculative
from rayk.engine.staging import Fetching, HostBuffers
from rayk.engine.warm_up import run_warm_up, warm_up_batches
from rayk.kernels.quantise import QuantisedKV
from rayk.kernels.replay import CannotReplay
from rayk.kernels.replay import why_no_native as why_no_replay
from rayk.kernels.scaled_matmul import multiplies_e4m3
from rayk.kernels.segments import Segments
from rayk.kv.caches import TORCH_DTYPES, CanonicalKVCaches, OwnsCache, allocate
from rayk.kv.groups import CacheKey
from rayk.models.config import ExpertsConfig
from rayk.models.decoder import Decoder
from rayk.models.drafters.config import find_drafter
from rayk.models.drafters.drafter import RankDrafter
from rayk.models.drafters.loader import load_drafter
from rayk.models.drafters.reading import FiniteReader
from rayk.models.drafters.riders import riders_of
from rayk.models.engine_plan import plan_engine
from rayk.models.families import load_config, read_config
from rayk.models.fingerprint import fingerprint
from rayk.models.kv_specs import engine_groups
from rayk.models.load_memory import LoadMemory, held_bytes, measured, one_after_the_other
from rayk.models.loader import load_decoder
from rayk.models.pieces import Keeping
from rayk.models.tensor_parallel import why_shape_unsupported
from rayk.models.weights import OpenWeights, WeightReader
from rayk.parallel.comm import Comm, queues_on_device
from rayk.parallel.groups import divide
from rayk.parallel.shard import TokenShard, engine_shape
from rayk.types.batch import Rollback, ScheduledBatch, ScheduledRequest
from rayk.types.config import EngineConfig
from rayk.types.drafting import DraftPlan, DraftShare
from rayk.types.errors import Unsupported

PROMPT_LOGITS = 1 << 23  # logits of prompt tokens that exist at once


class EngineRank:
    """Model, cache and forward pass of one rank: its share of the heads, tokens and layers.

    Every rank runs the same batches in the same order; only rank 0's result is used, which is on the last
    pipeline stage.
    """

    def __init__(
        self,
        config: EngineConfig,
        comm: Comm,
        *,
        poison: int | None = None,
        recorder: Recorder | None = None,
        on_loaded: Callable[[Decoder], None] = lambda decoder: None,
        open_weights: OpenWeights = WeightReader,
    ) -> None:
        """Load this rank's weights and allocate its cache.

        `poison` fills the cache with that byte instead of zeros. `recorder` repeats decode steps in place of
        CUDA graphs, on any device. `on_loaded` may change the decoder, loaded and its cache bound, before
        decode steps are recorded from it. `open_weights` is as in load_decoder. Raises
        CheckpointError, UnsupportedArchitecture, Unsupported (what docs/sharding.md lists), LayoutVetoed, or
        UserError for a setting.
        """
        assert comm.size == config.num_ranks, (comm.size, config.num_ranks)
        self.config = config
        self.comm = comm
        self.device = torch.device(config.device)
        self.model_config = (load_config if config.has_weights else read_config)(Path(config.model))
        if (why := why_shape_unsupported(self.model_config, config)) is not None:
            raise Unsupported(why)
        self.comms = divide(comm, engine_shape(config, self.model_config.num_layers))
        check_speculative(config, self.model_config)
        self.drafter_config = drafts = find_drafter(config, self.model_config)
        draft_layers = [] if drafts is None else [layer for layer, _ in drafts.keys]
        self.backends = LayerBackends(config, self.model_config, self.comms.dcp, draft_layers)
        riders = None if drafts is None else riders_of(drafts, config)
        groups = engine_groups(config, self.model_config, riders)
        self.plan = plan_engine(
            config,
            self.model_config,
            self.backends.vetoes(groups),
            riders=riders,
            draft_tp=1 if drafts is None else drafts.tp,
        )
        geometry = self.plan.ranks[comm.rank]
        self.stage = geometry.share.stage
        """Place in the pipeline, from 0."""
        self.incoming: tuple[torch.Tensor, ...] = ()
        """What the stage before made of the next step; put there by Pipeline."""
        self.outgoing: tuple[torch.Tensor, ...] = ()
        """What this stage made of the last step, for the stage after; taken by Pipeline."""
        self._fill = 0 if poison is None else poison
        self.caches: CanonicalKVCaches = allocate(geometry, self.device, fill=self._fill)
        # which matrices stay in fp8; None where all are dequantised
        self.keeping = self._keeping()
        self.decoder, self.load_memory = self._load(geometry.share.layers, open_weights)
        self.drafter = self._load_drafter()
        """Proposes tokens; None where nobody does, or n-grams do, which need no rank."""
        self.caches.bind(self.cache_owners, self.decoder.cache_readers)
        on_loaded(self.decoder)
        self._inputs = InputBuilder(
            geometry,
            max_seqs=config.max_seqs,
            max_positions=self.model_config.max_positions,
            scratch=self.plan.scratch,
        )
        self._rollback: StateRollback | None = None
        if self.plan.scratch is not None:
            self._rollback = StateRollback(self.plan.scratch, self._inputs.tables, self.caches)
        # they compute only the tokens whose logits are wanted
        self.fast_prefill_layers = self.model_config.fast_prefill_layers if config.fast_prefill else range(0)
        # tokens computed, summed over the layers that computed them, without padding
        self.num_token_layers = 0
        self._recorded_layers = 0  # layers that a token of a recorded step goes through
        self.attention_groups = AttentionGroups()
        self.attention_groups.initialise(self._attention_layers())
        self._prompt_hidden: torch.Tensor | None = None
        self.fence = make_fence(self.device)  # to wait for before others see or overwrite this rank's pages
        # measures the last step's forward pass, inputs and metadata aside, in ns; waits for it
        self.measure: Callable[[], int] = self.fence.step_ns
        self._staging = HostBuffers(self.device, self.fence.mark)
        self._proposing = self._make_proposing()
        # what a drafter takes of the last step, by packed token; recorded steps leave it in one place
        self._step_hidden: torch.Tensor | None = None
        self._recorded_hidden = self._room_for_hidden()
        self._on_draft_layer: Callable[[int], None] | None = None  # `on_layer` of the last step
        self._fetching = Fetching(self.device, self.fence.mark, config.max_seqs * (1 + config.max_drafts))
        # whether steps are begun before the tokens of the one before are known; None where they are
        self.why_not_ahead = self._why_not_ahead()
        self._last_tokens = torch.zeros(config.max_seqs, dtype=torch.int64, device=self.device)  # by row
        self._sampled_rows = self._last_tokens[:0]  # of the last step
        self.on_layer: Callable[[int], None] | None = None
        """Called for each layer of a step whose kernels are all queued, in order; for all at once where a
        step is replayed. Layers that compute nothing may be left out."""
        self._graphs: DecodeGraphs | None = None
        if self.device.type == "cuda":
            self.warm_up()
        # None where decode steps are replayed
        self.why_no_graphs = None if recorder is not None else self._why_no_graphs()
        if self.why_no_graphs is None:
            try:
                self._graphs = self._record_graphs(recorder)
            except CannotReplay as error:
                self.why_no_graphs = str(error)

    def _load(self, stage: range | None, open_weights: OpenWeights) -> tuple[Decoder, LoadMemory]:
        load = self._loading(stage)
        return measured(
            lambda opened: load(device=self.device, open_weights=opened), open_weights, self.device
        )

    def _loading(self, stage: range | None) -> Callable[..., Decoder]:
        """Return what loads the decoder of these layers, given `device` and `open_weights`."""
        return partial(
            load_decoder,
            Path(self.config.model),
            self.model_config,
            comm=self.comms.tp,
            stage=stage,
            dtype=TORCH_DTYPES[self.config.dtype],
            backend=self.backends.__getitem__,
            keeping=self.keeping,
        )

    def _load_drafter(self) -> RankDrafter | None:
        if self.drafter_config is None:
            return None
        load = partial(
            load_drafter,
            self.drafter_config,
            self.decoder,
            comm=self.comms.tp,
            dtype=TORCH_DTYPES[self.config.dtype],
            device=self.device,
            backend_for=self.backends.__getitem__,
        )
        drafter, memory = measured(lambda opened: load(open_weights=opened), FiniteReader, self.device)
        both = held_bytes(self.decoder, drafter)
        self.load_memory = one_after_the_other(self.load_memory, memory, weight_bytes=both)
        return drafter

    def _make_proposing(self) -> Proposing | None:
        if self.drafter is None:
            return None
        staging = HostBuffers(self.device, self.fence.mark)
        parts = self._inputs, self.plan.groups, self.backends, staging, self.device
        return Proposing(self.drafter, *parts)

    def _room_for_hidden(self) -> torch.Tensor | None:
        """Make room for what a drafter takes of a recorded step, [rows, elements]."""
        if self.drafter_config is None or not self.drafter_config.takes_hidden:
            return None
        size = max(1, len(self.drafter_config.taps)) * self.model_config.hidden_size
        rows = self.config.max_seqs * (1 + self.config.max_drafts)
        return torch.zeros(rows, size, dtype=TORCH_DTYPES[self.config.dtype], device=self.device)

    def _attention_layers(self) -> list[AttentionLayer]:
        groups = {layer: g for g in self.plan.groups if g.spec.has_token_rows for layer in g.layers}
        found = []
        for index in (i for i in self.model_config.attending_layers if i in self.decoder.stage):
            layer = self.model_config.layers[index]
            group = groups[index if layer.kv_source is None else layer.kv_source]
            found.append(
                AttentionLayer(
                    layer=index,
                    backend=self.backends[index],
                    spec=group.spec,
                    num_query_heads=self.model_config.num_query_heads // self.comms.tp.size,
                    view=AttentionView(
                        kv_group=group.index,
                        window=layer.window,
                        chunk=layer.chunk,
                        fast_prefill=index in self.fast_prefill_layers,
                    ),
                )
            )
        return found

    @property
    def cache_owners(self) -> Mapping[CacheKey, OwnsCache]:
        """Return every layer part that keeps a cache here."""
        drafts = {} if self.drafter is None else self.drafter.cache_owners
        return {**self.decoder.cache_owners, **drafts}

    @property
    def slot_tokens(self) -> tuple[TokenShard, ...]:
        """List the tokens of each KV group that steps of this rank compute slots for."""
        return self._inputs.tokens

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        return () if self._graphs is None else self._graphs.sizes

    @property
    def graphs_note(self) -> str:
        """Name the recorded batch sizes, or why there are none, for the results."""
        return ", ".join(map(str, self.graph_sizes)) or f"none: {self.why_no_graphs}"

    @property
    def scheduling_note(self) -> str:
        """Say how steps are scheduled, for the results."""
        return "asynchronous" if self.why_not_ahead is None else f"synchronous: {self.why_not_ahead}"

    @torch.inference_mode()
    def step(self, batch: ScheduledBatch) -> torch.Tensor:
        """Compute the batch's tokens and store their KV. Returns float32 logits [batch.num_logits, vocab], of
        requests in their order and of each one's last tokens in theirs, valid until the next step; none
        [0, vocab] on stages that are not the last. On a GPU this returns before the kernels have run."""
        self._prompt_hidden = self._step_hidden = None
        self._on_draft_layer = self.on_layer
        if self._rollback is not None:
            self._rollback.note(batch)
        if self._graphs is not None and self._graphs.fits(batch):
            self._inputs.update_tables(batch)
            self.fence.begin()
            logits = self._replay(self._graphs, batch)
        else:
            inputs = self._inputs.build(batch)
            fast = self._num_wanted(batch) is not None
            seen = self._see(inputs, inputs.logits_index_host if fast else None)
            self.fence.begin()
            inputs, seen = self._upload(inputs, seen)
            self._prepare(inputs.num_unknown, inputs.token_ids, inputs.sampled_rows)
            logits = self._eager(inputs, seen, fast=fast)
        self.measure = self.fence.end()
        return logits

    @torch.inference_mode()
    def propose(self, batch: ScheduledBatch, plan: DraftPlan) -> torch.Tensor:
        """Let the drafter compute its rows of the last step, `batch`, of whose tokens `plan` tells, and
        propose: see Proposing.run for the result. A collective of all ranks, after each step of an engine
        whose `drafter` is not None, before the next turn. On a GPU this returns before the kernels have
        run."""
        assert self._proposing is not None
        self.fence.begin()
        found = self._proposing.run(batch, plan, self._step_hidden, self._on_draft_layer)
        self._on_draft_layer = None
        self.fence.end()
        return found

    @property
    def drawn_from(self) -> Mapping[int, Sequence[torch.Tensor]]:
        """Return what Proposing.drawn_from is after the last `propose`."""
        assert self._proposing is not None
        return self._proposing.drawn_from

    @torch.inference_mode()
    def roll_back(self, rollbacks: Sequence[Rollback]) -> None:
        """Bring recurrent states back to those after the accepted tokens of their rows' last step, before
        anything else computes or reads them. What else a cache holds of rejected tokens is overwritten by
        those that come in their place. On a GPU this returns before it is done, as a step does.
        AssertionError for a row without drafts in its last step."""
        if self._rollback is not None and rollbacks:
            self.fence.begin()
            self._rollback.run(rollbacks)
            self.fence.end()

    def _num_wanted(self, batch: ScheduledBatch) -> int | None:
        """Count the tokens that the layers of `fast_prefill_layers` compute; None: all of them."""
        if not self.fast_prefill_layers:
            return None
        num_wanted = batch.num_logits
        return num_wanted if num_wanted < batch.num_tokens else None

    def empty_incoming(self, batch: ScheduledBatch) -> tuple[torch.Tensor, ...]:
        """Make room for what the stage before makes of a step; nothing on the first stage."""
        shapes = self.decoder.received_shapes(batch.num_tokens, self._num_wanted(batch))
        dtype = self.decoder.residual_dtype
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes)

    @torch.inference_mode()
    def keep(self, tokens: torch.Tensor | None) -> None:
        """Keep the tokens that the last step sampled for the next one: rank 0's, on its device. A collective
        where there are several ranks."""
        rows = self._sampled_rows
        if not len(rows):
            return
        if self.comm.size > 1:
            tokens = self.comm.all_gather(torch.zeros_like(rows) if tokens is None else tokens)[0]
        assert tokens is not None
        # A row that is not finite gets some token: its request fails.
        self._last_tokens.index_copy_(0, rows, tokens.clamp(min=0))

    def _prepare(self, num_unknown: int, token_ids: torch.Tensor, sampled_rows: torch.Tensor) -> None:
        """Put in the tokens that only the device knows."""
        self._sampled_rows = sampled_rows
        if num_unknown:
            kept = self._last_tokens[(-1 - token_ids).clamp(min=0)]
            token_ids.copy_(torch.where(token_ids < 0, kept, token_ids))

    def fetch(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        """Queue the copy of a step's tokens to the host; returns what waits for it."""
        return self._fetching.begin(tokens)

    def warm_up(self) -> None:
        """Compile every kernel that steps will launch; the cache is then as it was allocated. A collective,
        before the first step."""
        batches = warm_up_batches(
            self.plan.groups,
            max_seqs=self.config.max_seqs,
            max_batch_tokens=self.config.max_batch_tokens,
            max_positions=self.model_config.max_positions,
            max_drafts=self.config.max_drafts,
        )
        run_warm_up(((what, partial(self._warm_up_step, batch)) for what, batch in batches), self.comm)
        self.fence.wait()
        self.caches.buffer.fill_(self._fill)
        self.num_token_layers = 0

    def _warm_up_step(self, batch: ScheduledBatch) -> None:
        self.incoming = tuple(x.zero_() for x in self.empty_incoming(batch))
        self.step(batch)
        self.outgoing = ()
        if self.drafter is not None:
            self.propose(batch, tuple(map(self._warm_up_share, batch.requests)))

    def _warm_up_share(self, r: ScheduledRequest) -> DraftShare:
        """Have as many tokens proposed as there are positions for."""
        num_left = self.model_config.max_positions - r.num_computed_tokens - len(r.token_ids)
        return DraftShare(len(r.token_ids), 0, max(0, min(self.config.max_drafts, num_left)))

    def prompt_logits(self) -> Iterator[torch.Tensor]:
        """Yield float32 logits [some, vocab] of the last step's `prompt_logits`, in pieces that bound the
        memory; none but on the last stage. A collective of its ranks, which take them all before the next
        step."""
        if self._prompt_hidden is None:
            return
        rows = max(1, PROMPT_LOGITS // self.model_config.vocab_size)
        for hidden in torch.split(self._prompt_hidden, rows):
            with torch.inference_mode():
                logits = self.decoder.logits(hidden)
            yield logits

    def _eager(self, inputs: ModelInputs, seen: StepViews, *, fast: bool) -> torch.Tensor:
        """Compute the step kernel by kernel; `fast`: the last layers compute the sampled tokens only."""
        wanted, metadata = inputs.logits_index if fast else None, self._by_cache(seen)
        received, self.incoming = self.incoming, ()
        step = inputs.token_ids, inputs.positions, metadata, wanted, self.on_layer, received
        if not self.decoder.is_last:
            self.outgoing = self.decoder.pass_on(*step)
            self.num_token_layers += self.decoder.num_token_layers
            return torch.empty(0, self.model_config.vocab_size, device=self.device)
        hidden = self.decoder.forward(*step)
        self.num_token_layers += self.decoder.num_token_layers
        if self._recorded_hidden is not None:
            self._step_hidden = self._for_drafter(hidden)
        if inputs.prompt_index is not None:
            assert not fast, "prompt logits need every token in every layer"
            self._prompt_hidden = hidden[inputs.prompt_index]
        return self.decoder.logits(hidden if fast else hidden[inputs.logits_index])

    def _for_drafter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a drafter takes of a step whose final norm gave `hidden`."""
        return hidden if self.decoder.tapped is None else self.decoder.tapped

    def _replay(self, graphs: DecodeGraphs, batch: ScheduledBatch) -> torch.Tensor:
        logits = graphs.replay(batch, self._prepare)
        if self._recorded_hidden is not None:
            self._step_hidden = self._recorded_hidden[: batch.num_tokens]
        if self.on_layer is not None:
            for layer in self.decoder.stage:
                self.on_layer(layer)
        self.num_token_layers += batch.num_tokens * self._recorded_layers
        return logits

    def _see(self, inputs: ModelInputs, logits_index: np.ndarray | None) -> StepViews:
        groups = list(zip(self.plan.groups, inputs.metadata, strict=True))
        commons = {g.index: m for g, m in groups if isinstance(m, CommonAttentionMetadata)}
        return StepViews(
            attention=self.attention_groups.see(commons, logits_index),
            states={g.index: m for g, m in groups if isinstance(m, Segments)},
        )

    def _upload(self, inputs: ModelInputs, seen: StepViews) -> tuple[ModelInputs, StepViews]:
        """Move a step to the device, by one copy."""
        items = [inputs, *seen.attention.values(), *seen.states.values()]
        moved, *metadata = self._staging.upload(items)
        there = iter(metadata)
        return moved, StepViews(
            attention={view: next(there) for view in seen.attention},
            states={group: next(there) for group in seen.states},
        )

    def _by_cache(self, seen: StepViews) -> dict[CacheKey, Any]:
        states = {g.index: g.keys for g in self.plan.groups if g.index in seen.states}
        metadata_of: dict[CacheKey, Any] = {key: seen.states[i] for i, keys in states.items() for key in keys}
        attention = self.attention_groups.build(seen.attention)
        return metadata_of | {(layer, "attention"): metadata for layer, metadata in attention.items()}

    def fingerprint(self) -> dict[str, str]:
        """Return what another engine must agree on to read this one's KV. Raises CheckpointError."""
        return fingerprint(self.config.model if self.config.has_weights else None, self.model_config)

    def _why_not_ahead(self) -> str | None:
        if self.config.pp > 1:
            return f"pp {self.config.pp}: steps overlap by stages"
        if self.config.speculative is not None:
            return "speculative: drafts come of known tokens"
        match self.config.async_scheduling:
            case "never":
                return "engine.async_scheduling: never"
            case "auto" if self.device.type != "cuda":
                return f"device {self.device.type} computes before it returns"
        return None

    def _keeping(self) -> Keeping | None:
        wanted = self.config.weights
        if self.model_config.quantisation is None or wanted == "dequantised":
            return None
        return Keeping() if wanted == "kept" or multiplies_e4m3(self.device) else None

    @property
    def weights_note(self) -> str:
        """Say in which form the weights are held, for the results."""
        stored = self.model_config.quantisation
        if stored is None:
            return self.config.dtype
        return f"{stored.text}: {'all dequantised' if self.keeping is None else self.keeping.text}"

    def _why_no_graphs(self) -> str | None:
        if self.config.cuda_graphs == "never":
            return "engine.cuda_graphs: never"
        if self.comms.dcp.size > 1:
            return f"dcp {self.comms.dcp.size}: partial attention is merged by collectives between kernels"
        if self.config.pp > 1:
            return f"pp {self.config.pp}: stages exchange activations between steps"
        for backend in self.backends.used:
            if not backend.graph_safe:
                return f"attention backend {backend.name} works from the host"
        if self.device.type == "cpu" and (why_not := self._why_no_calls()):
            return why_not
        if self.comm.size > 1 and not queues_on_device(self.comm):
            return f"comm {self.comm.name} goes through the host"
        return None

    def _why_no_calls(self) -> str | None:
        """Say why a CPU cannot record its kernels' calls."""
        if (why_not := why_no_replay()) is not None:
            return why_not
        for backend in self.backends.used:
            if backend.implementation != "cpu-native":
                return f"attention runs as {backend.implementation}, whose calls cannot be noted"
        for index, layer in enumerate(self.model_config.layers):
            if layer.mixers != ("attention",) or isinstance(layer.mlp, ExpertsConfig):
                return f"layer {index} works from the host on a CPU"
        if self.keeping is not None and self.keeping.kept:
            return "a CPU multiplies weights kept in fp8 from the host"
        if any(isinstance(a.kv_cache, QuantisedKV) for a in self.decoder.attention_layers.values()):
            return "a CPU stores a quantised KV cache from the host"
        return f"{self.comm.size} ranks on CPUs" if self.comm.size > 1 else None

    @torch.inference_mode()
    def _record_graphs(self, recorder: Recorder | None) -> DecodeGraphs:
        def decode(token_ids: torch.Tensor, positions: torch.Tensor, seen: StepViews) -> torch.Tensor:
            hidden = self.decoder.forward(token_ids, positions, self._by_cache(seen))
            self._recorded_layers = self.decoder.num_token_layers // len(token_ids)
            if self._recorded_hidden is not None:
                self._recorded_hidden[: len(hidden)].copy_(self._for_drafter(hidden))
            return self.decoder.logits(hidden)

        on_cpu = recorder is None and self.device.type == "cpu"
        config = self.config
        most_rows = min(MAX_ROWS, config.max_batch_tokens, config.max_seqs * (1 + config.max_drafts))
        return DecodeGraphs(
            decode,
            recorder or (CallRecorder() if on_cpu else CudaRecorder(self.device)),
            sizes=range(1, most_rows + 1) if on_cpu else None,
            max_tokens=self.config.max_batch_tokens,
            max_drafts=self.config.max_drafts,
            scratch=self.plan.scratch,
            tables=self._inputs.tables,
            views=self.attention_groups.views,
            max_seqs=self.config.max_seqs,
            max_positions=self.model_config.max_positions,
            device=self.device,
            mark=self.fence.mark,
        )

    def close(self) -> None:
        self.caches.unbind(self.cache_owners, self.decoder.cache_readers)
