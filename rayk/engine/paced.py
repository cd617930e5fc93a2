"""Engines that compute nothing (`engine.compute: paced`): a step waits for as long as a cost table says.

All else is real: processes, the scheduler, blocks and the prefix cache, pages and their transfers, with their
proof. The decoder has shapes and no weights; blocks are filled with bytes that tell them apart, and tokens
follow types.paced_tokens. So many engines run on a few cores, and what is around them is measured.

Not modelled is what a GPU does beside its host: a paced engine's steps are not begun before the last one's
tokens are known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from rayk.costs.book import CostBook
from rayk.costs.features import windows_of
from rayk.costs.table import EngineCosts, engine_key
from rayk.engine.leader import BUSY_POLL_S, Leader
from rayk.engine.pace import StepPace
from rayk.engine.rank import EngineRank
from rayk.engine.sampling import PendingTokens
from rayk.kv.caches import CacheView
from rayk.metrics import Meter
from rayk.models.config import DecoderConfig
from rayk.models.decoder import Decoder
from rayk.models.load_memory import LoadMemory
from rayk.models.weights import OpenWeights, ShapeReader
from rayk.types.batch import ScheduledBatch, StepTokens
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported, UserError
from rayk.types.paced_tokens import PacedTokens, why_not_paced
from rayk.types.request import Request

POLL_S = 0.002  # how often an engine with transfers, but no step to run, turns, at pace 1
_WHY = "engine.compute: paced"
_MAX_BYTE = 0x3F  # numbers of such bytes are finite in every format of a cache, and small


def paced_poll_s(config: EngineConfig) -> float:
    """Say how often an engine looks after transfers: sixteen that look 3,000 times a second take four
    cores."""
    return POLL_S * config.pace if config.compute == "paced" else BUSY_POLL_S


class PacedRank(EngineRank):
    """A rank that keeps the time of steps in place of computing them."""

    def __init__(self, config: EngineConfig, *args: Any, **named: Any) -> None:
        """Take arguments as EngineRank does. Raises UserError where the tables of `config.costs` have none of
        such an engine, and Unsupported for pipeline stages."""
        if config.pp > 1:
            raise Unsupported(f"{_WHY} with pp {config.pp}: stages do not take their turns")
        if not config.costs:
            raise UserError(f"{_WHY} without cost tables", mend="engine.costs: FOLDER")
        super().__init__(config, *args, **named)
        costs = find_costs(CostBook.load(config.costs), self.model_config, config)
        windows = windows_of(self.model_config)
        self.pace = StepPace(costs, factor=config.pace, windows=windows, is_told=self.comm.rank == 0)
        self._pages = [
            [view for key in group.keys for view in _bytes_of(self.caches.view(*key))]
            for group in self.caches.geometry.groups
        ]

    def _load(self, stage: range | None, open_weights: OpenWeights) -> tuple[Decoder, LoadMemory]:
        """Build the decoder from config.json alone, on torch's meta device."""
        del open_weights
        decoder = self._loading(stage)(device=torch.device("meta"), open_weights=ShapeReader)
        return decoder, LoadMemory(
            weight_bytes=0, max_read_bytes=0, load_peak_bytes=0, load_device_peak_bytes=None
        )

    def step(self, batch: ScheduledBatch) -> torch.Tensor:
        """Fill the batch's new blocks and let the step's time pass. Returns float32 [logits, 0]: there are
        none."""
        self.fence.begin()
        self._fill_blocks(batch)
        on_layer = self.on_layer
        parts = [] if on_layer is None else [partial(on_layer, layer) for layer in self.decoder.stage]
        self.pace.hold(batch, parts)
        self.num_token_layers += batch.num_tokens * len(self.decoder.stage)
        self.measure = self.fence.end()
        return torch.empty(sum(r.needs_logits for r in batch.requests), 0)

    def fetch(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        """Return what a step sampled: nothing, for the leader knows the tokens."""
        del tokens
        return list

    def warm_up(self) -> None:
        """Compile nothing: no kernel is launched."""

    def _fill_blocks(self, batch: ScheduledBatch) -> None:
        """Write one byte all over each new block, another for each block and time: the same on every rank,
        as replicas of a unit must be."""
        for index, views in enumerate(self._pages):
            blocks = [
                block for r in batch.requests for block in _fresh(r.new_block_ids, r.num_filled_blocks, index)
            ]
            if not blocks:
                continue
            digests = (hashlib.blake2b(b"%d %d" % (batch.step, b), digest_size=1) for b in blocks)
            values = torch.tensor([1 + d.digest()[0] % _MAX_BYTE for d in digests], dtype=torch.uint8)
            ratio = self.caches.geometry.groups[index].kernel_blocks_per_block
            places = torch.tensor(blocks)
            if ratio > 1:
                places = (places[:, None] * ratio + torch.arange(ratio)).reshape(-1)
                values = values.repeat_interleave(ratio)
            places, values = places.to(self.device), values.to(self.device)
            for view in views:
                view[places] = values[:, None, None, None]

    def _why_not_ahead(self) -> str | None:
        return _WHY

    def _why_no_graphs(self) -> str | None:
        return _WHY

    @property
    def weights_note(self) -> str:
        """Say that there are none."""
        return f"none: {_WHY}"


def _fresh(
    new_block_ids: tuple[tuple[int, tuple[int, ...]], ...], num_filled: tuple[int, ...], group: int
) -> Iterable[int]:
    ids = new_block_ids[group][1][num_filled[group] if num_filled else 0 :]
    return (block for block in ids if block)


def _bytes_of(view: CacheView) -> list[torch.Tensor]:
    """View what a layer keeps as uint8 [B, U, N, bytes]."""
    bundles = [view] if isinstance(view, torch.Tensor) else list(view.values())
    return [bundle.view(torch.uint8) for bundle in bundles]


def watch_pace(meter: Meter, pace: StepPace) -> None:
    """Let a meter of rank 0 tell how its engine keeps pace."""

    def report() -> None:
        kept = pace.report()
        meter.total("rayk_pace_outside_steps_total", kept.num_outside_hull)
        if kept.num_steps:
            meter.set("rayk_pace_late_share", kept.late_p99_share)
        if kept.machine_busy_share is not None:
            meter.set("rayk_pace_machine_busy_share", kept.machine_busy_share)

    meter.on_flush(report)


def find_costs(book: CostBook, model: DecoderConfig, config: EngineConfig) -> EngineCosts:
    """Find the costs of an engine to be paced. Where there are none of its device, those of the one other
    device that the tables know stand in: it is that device's engine which is played. Raises UserError."""
    key = engine_key(model, config)
    if book.any_engine is None and key not in book.engines:
        others = [k for k in book.engines if k._replace(device=key.device, backend=key.backend) == key]
        if len(others) == 1:
            return book.engines[others[0]]
    return book.find(key)


class PacedLeader(Leader):
    """A leader whose engine has no logits: tokens follow a rule."""

    def __init__(self, *args: Any, tokens: PacedTokens, pace: StepPace, **named: Any) -> None:
        """Take other arguments as Leader does. `pace`: rank 0's, which is told when the engine was idle."""
        super().__init__(*args, **named)
        self._tokens = tokens
        self._pace = pace
        self._keys: dict[str, tuple[Request, int]] = {}  # of requests that run, by their ids

    def wait(self) -> None:
        """Run what was posted, and tell the pace where there was nothing to do before."""
        is_idle = not self._busy() and self._inbox.empty()
        super().wait()
        if is_idle:
            self._pace.resume()

    def sample(
        self, batch: ScheduledBatch, logits: torch.Tensor, prompt_logits: Iterable[torch.Tensor]
    ) -> PendingTokens:
        """Choose the step's tokens by the rule."""
        del logits, prompt_logits
        found: dict[str, int] = {}
        for share, state in zip(batch.requests, self.scheduler.scheduled(batch), strict=True):
            if not share.needs_logits:
                continue
            index = len(state.tokens) - state.num_prompt
            found[share.request_id] = self._tokens.token(self._key(state.request), index)
        if len(self._keys) > 4 * len(batch.requests) + 64:
            self._keys = {name: self._keys[name] for name in found}
        return PendingTokens(tokens=torch.empty(0), finish=lambda _: StepTokens(token_ids=found))

    def _key(self, request: Request) -> int:
        known = self._keys.get(request.request_id)
        if known is None or known[0] is not request:  # an id may come again, with another prompt
            known = self._keys[request.request_id] = request, PacedTokens.key(request.prompt_token_ids)
        return known[1]

    def _bad_input(self, request: Request) -> UserError | None:
        wants = why_not_paced(request.sampling)
        if wants:
            problem = f"request {request.request_id} asks for {wants}, and a paced engine has no logits"
            return UserError(problem, mend="leave it out, or engine.compute: real")
        return super()._bad_input(request)
