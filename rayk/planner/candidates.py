"""List the plans that a machine has room for, with what each may do at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from rayk.costs.book import CostBook
from rayk.costs.features import windows_of
from rayk.costs.table import EngineCosts
from rayk.models.config import DecoderConfig
from rayk.models.memory_plan import plan_size, stage_weights
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.planner.drafts import settings_of
from rayk.planner.estimate import EngineSide, SideRates, rates_of
from rayk.planner.machine import PlanMachine
from rayk.planner.traffic import Profile
from rayk.specs.cells import MAX_STREAMS
from rayk.specs.plan import PlanSpec
from rayk.types.bounds import MAX_BLOCKS
from rayk.types.config import EngineConfig
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import UserError
from rayk.types.speculative import SpeculativeConfig

MAX_REASONS = 4  # that a message gives
CHOICES: dict[str, dict[str, list[int]]] = {
    "cuda": {"max_batch_tokens": [2048, 8192], "max_seqs": [32, MAX_STREAMS]},
    "cpu": {"max_batch_tokens": [256, 1024], "max_seqs": [4, 16]},
}
"""What is tried where nobody says. An engine of a server never has more than MAX_STREAMS requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFamily:
    """Plans that differ in how many engines they have, and in their policy."""

    mode: str
    prefill_tp: int  # of aggregated engines, too
    decode_tp: int | None = None
    max_batch_tokens: int
    max_seqs: int
    block_size: int
    prefill_blocks: int
    decode_blocks: int | None = None
    num_drafts: int = 0
    """Tokens that are drafted at once; 0: engines do not draft."""
    rates: SideRates

    @property
    def is_aggregated(self) -> bool:
        return self.decode_tp is None

    @property
    def settings(self) -> tuple[object, ...]:
        """List what engines are told; what memory and costs make of it aside."""
        sizes = self.max_batch_tokens, self.max_seqs, self.block_size, self.num_drafts
        return self.mode, self.prefill_tp, self.decode_tp, *sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One plan: what would be started."""

    family: PlanFamily
    num_prefill: int
    num_decode: int = 0
    policy: str

    @property
    def num_gpus(self) -> int:
        return self.num_prefill * self.family.prefill_tp + self.num_decode * (self.family.decode_tp or 0)

    @property
    def bound(self) -> float:
        """Requests per second that it may take at most, were there no queues."""
        rates = self.family.rates
        if self.family.is_aggregated:
            return self.num_prefill * rates.prefill
        return min(self.num_prefill * rates.prefill, self.num_decode * rates.decode)

    @property
    def num_engines(self) -> int:
        return self.num_prefill + self.num_decode

    def shrunk(self, most: int) -> Candidate | None:
        """Return a fleet of at most so many engines in about the same ratio; None: it is no larger."""
        total = self.num_engines
        if total <= most:
            return None
        if not self.num_decode:
            return replace(self, num_prefill=most)
        share = self.num_prefill / total
        pairs = [(max(1, round(share * n)), n) for n in range(most // 2, most + 1)]
        num, n = min(pairs, key=lambda pair: (abs(pair[0] / pair[1] - share), pair[1]))
        return replace(self, num_prefill=num, num_decode=max(1, n - num))

    @property
    def plan_id(self) -> str:
        """Name it, unlike any other plan of a search."""
        f = self.family
        if f.is_aggregated:
            engines = f"agg{self.num_prefill}xtp{f.prefill_tp}"
        else:
            engines = f"p{self.num_prefill}xtp{f.prefill_tp}-d{self.num_decode}xtp{f.decode_tp}"
        blocks = f"-k{f.block_size}" if f.block_size != 16 else ""
        drafts = f"-draft{f.num_drafts}" if f.num_drafts else ""
        return f"{engines}-b{f.max_batch_tokens}-s{f.max_seqs}{blocks}{drafts}-{self.policy}"

    @property
    def text(self) -> str:
        """Say in words which engines it has."""
        f = self.family
        drafts = f", drafting {f.num_drafts} token{'s' if f.num_drafts != 1 else ''}" if f.num_drafts else ""
        if f.is_aggregated:
            return f"{_engines(self.num_prefill, 'aggregated')} at TP {f.prefill_tp}{drafts}"
        prefill = f"{_engines(self.num_prefill, 'prefill')} at TP {f.prefill_tp}"
        return f"{prefill}, {_engines(self.num_decode, 'decode')} at TP {f.decode_tp}{drafts}"


def _engines(num: int, kind: str) -> str:
    return f"{num} {kind} engine{'s' if num != 1 else ''}"


class Space:
    """All plans of a spec on a machine."""

    def __init__(
        self,
        spec: PlanSpec,
        config: DecoderConfig,
        machine: PlanMachine,
        costs: CostBook,
        profile: Profile,
        rates: DraftRates | None = None,
    ) -> None:
        """`config`: in the dtype that engines have. `rates`: of drafts that are tried."""
        self.spec, self.config, self.machine = spec, config, machine
        self.costs, self._profile = costs, profile
        self.refused: dict[str, str] = {}
        """Why some engines are not tried, by what they are: each reason once."""
        self._rates = rates
        self._weights: dict[int, list[int]] = {}

    @cached_property
    def _every(self) -> list[PlanFamily]:
        return list(self._families())

    def with_drafts(self, candidate: Candidate, num_drafts: int) -> Candidate | None:
        """Find the plan that differs from this one in drafts alone; None: its engines cannot be."""
        wanted = replace(candidate.family, num_drafts=num_drafts).settings
        found = next((family for family in self._every if family.settings == wanted), None)
        return None if found is None else replace(candidate, family=found)

    def break_even(self, candidate: Candidate, num_requests: float) -> float:
        """Tell how many tokens a step must give for drafts to pay, while so many requests decode at once:
        what a mean step takes with drafts, over what it takes without."""
        f, profile = candidate.family, self._profile
        sizes = f.block_size, f.max_batch_tokens, f.max_seqs
        steps = []
        for num_drafts in (f.num_drafts, 0):
            found = self._side(f.decode_tp or f.prefill_tp, *sizes, num_drafts)
            assert found is not None, "there is a plan of it"
            context = profile.input_tokens + profile.output_tokens / 2
            steps.append(found[0].decode_ns(max(1, round(num_requests)), context))
        return steps[0] / steps[1]

    @cached_property
    def families(self) -> list[PlanFamily]:
        """List kinds of plans of which some request can be good. Raises UserError where there is none, with
        the first reasons."""
        found = [family for family in self._every if not family.rates.why_not]
        if not found:
            reasons = list(dict.fromkeys(self.refused.values()))
            raise UserError(
                f"no plan is possible: {'; '.join(reasons[:MAX_REASONS]) or 'nothing is left to try'}",
                mend="wider limits in `slo`, more of `gpus`, or other choices in `search`",
            )
        return found

    def of(self, family: PlanFamily, num_prefill: int, num_decode: int = 0) -> Candidate:
        return Candidate(
            family=family,
            num_prefill=num_prefill,
            num_decode=num_decode,
            policy=self.spec.policies[0],
        )

    def counts(self, family: PlanFamily) -> Iterator[Candidate]:
        """Yield a family's plans that the machine holds."""
        search, machine = self.spec.search, self.machine
        prefill = search.num_prefill or range(1, machine.num_gpus // family.prefill_tp + 1)
        if family.decode_tp is None:
            for num in prefill:
                if machine.holds([(family.prefill_tp, num)]):
                    yield self.of(family, num)
            return
        for num in prefill:
            for num_decode in search.num_decode or self._useful(family, num):
                if machine.holds([(family.prefill_tp, num), (family.decode_tp, num_decode)]):
                    yield self.of(family, num, num_decode)

    def _useful(self, family: PlanFamily, num_prefill: int) -> Sequence[int]:
        """List how many decode engines beside so many prefill engines are worth a try: around those that
        keep up with them, by the estimate, which may be off by half in either direction."""
        assert family.decode_tp is not None
        room = (self.machine.num_gpus - num_prefill * family.prefill_tp) // family.decode_tp
        even = num_prefill * family.rates.prefill / family.rates.decode
        low, high = max(1, int(even / 2)), min(room, int(even * 2) + 1)
        if low > room:
            return [room] if room >= 1 else []
        return sorted({round(n) for n in np.linspace(low, high, min(12, high - low + 1))})

    def _families(self) -> Iterator[PlanFamily]:
        search = self.spec.search
        chunks, rows = self.choices("max_batch_tokens"), self.choices("max_seqs")
        for sizes in product(search.block_size, chunks, rows, search.num_drafts):
            sides: dict[tuple[str, int], tuple[EngineSide, int]] = {}
            for role in ("prefill", "decode"):
                for tp in self.tp_sizes(role):
                    found = self._side(tp, *sizes)
                    if found is not None:
                        sides[role, tp] = found
            for mode in search.mode:
                yield from self._of_mode(mode, sides, sizes)

    def choices(self, name: str) -> list[int]:
        """List what is tried of `max_batch_tokens` or `max_seqs`."""
        own: list[int] | None = getattr(self.spec.search, name)
        if own is None and name in self.spec.engine.model_fields_set:
            own = [getattr(self.spec.engine, name)]
        return own or CHOICES[self.spec.device][name]

    def tp_sizes(self, role: str) -> Sequence[int]:
        """List the TP sizes of prefill or of decode engines: where nobody says, powers of 2 up to the largest
        node; those that the model cannot have are left out quietly."""
        search = self.spec.search
        asked = (search.prefill_tp if role == "prefill" else search.decode_tp) or search.tp
        if asked:
            return asked
        sizes = [2**n for n in range(self.machine.largest.bit_length()) if 2**n <= self.machine.largest]
        return [tp for tp in sizes if why_tp_unsupported(self.config, tp) is None]

    def _of_mode(
        self,
        mode: str,
        sides: dict[tuple[str, int], tuple[EngineSide, int]],
        settings: tuple[int, int, int, int],
    ) -> Iterator[PlanFamily]:
        block_size, chunk, num_rows, num_drafts = settings
        limits = self.spec.slo.limits_ms
        common: dict[str, Any] = {
            "mode": mode,
            "max_batch_tokens": chunk,
            "max_seqs": num_rows,
            "block_size": block_size,
            "num_drafts": num_drafts,
        }
        prefill = {tp: found for (role, tp), found in sides.items() if role == "prefill"}
        decode = {tp: found for (role, tp), found in sides.items() if role == "decode"}
        for tp, (side, blocks) in prefill.items():
            if mode == "aggregated":
                rates = rates_of(side, None, self._profile, limits)
                yield self._noted(
                    PlanFamily(**common, prefill_tp=tp, prefill_blocks=blocks, rates=rates), f"TP {tp}"
                )
                continue
            for decode_tp, (decode_side, decode_blocks) in decode.items():
                rates = rates_of(side, decode_side, self._profile, limits)
                family = PlanFamily(
                    **common,
                    prefill_tp=tp,
                    decode_tp=decode_tp,
                    prefill_blocks=blocks,
                    decode_blocks=decode_blocks,
                    rates=rates,
                )
                yield self._noted(family, f"TP {tp} to TP {decode_tp}")

    def _noted(self, family: PlanFamily, name: str) -> PlanFamily:
        if family.rates.why_not:
            name += f" with {family.num_drafts} drafts" if family.num_drafts else ""
            self.refused.setdefault(f"{family.mode} {name}", f"{family.mode} {name}: {family.rates.why_not}")
        return family

    def _side(
        self, tp: int, block_size: int, max_batch_tokens: int, max_seqs: int, num_drafts: int
    ) -> tuple[EngineSide, int] | None:
        """Make a kind of engine and its number of blocks; None where it cannot be, which is noted."""
        name = f"TP {tp} with {num_drafts} drafts" if num_drafts else f"TP {tp}"
        asked = self.spec.search.speculative
        if num_drafts and asked is not None and asked.method != "ngram":
            self.refused[name] = f"drafts by {asked.method}: what a drafter keeps in memory is not counted"
            return None
        if tp > self.machine.largest:
            self.refused[name] = f"{name}: the largest node has {self.machine.largest} GPUs"
            return None
        if (why := why_tp_unsupported(self.config, tp)) is not None:
            self.refused[name] = f"{name}: {why}"
            return None
        engine = engine_of(
            self.spec,
            self.config,
            tp=tp,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_seqs=max_seqs,
            speculative=self._speculative(num_drafts),
        )
        if tp not in self._weights:
            self._weights[tp] = stage_weights(engine, self.config, keeps_fp8=self.machine.keeps_fp8)
        tokens = self._profile.most_tokens
        room, weights = self.machine.rank_bytes, self._weights[tp]
        size = plan_size(engine, self.config, room, weights, tokens=tokens)
        given = self._num_blocks
        if size.reason or (given or 0) > size.num_blocks:
            why = size.reason or f"{given:,} blocks, and memory holds {size.num_blocks:,}"
            self.refused[name] = f"{name}: {why}"
            return None
        try:
            costs = self.costs.of_engine(self.config, engine)
        except UserError as error:
            self.refused[name] = str(error)
            return None
        mean = plan_size(engine, self.config, room, weights, tokens=max(1, round(self._profile.total_tokens)))
        blocks = min(given or size.num_blocks, MAX_BLOCKS)
        places = mean.num_requests * blocks // max(1, mean.num_blocks)
        return self._priced(costs, engine, places), blocks

    @property
    def _num_blocks(self) -> int | None:
        """The blocks of an engine that somebody asks for."""
        asked = self.spec.search.num_blocks
        if asked == "auto" and "num_blocks" in self.spec.engine.model_fields_set:
            return int(self.spec.engine.num_blocks)
        return None if asked == "auto" else asked

    def _priced(self, costs: EngineCosts, engine: EngineConfig, places: int) -> EngineSide:
        from rayk.simulate.engine import runs_ahead

        return EngineSide(
            costs=costs,
            windows=windows_of(self.config),
            max_batch_tokens=engine.max_batch_tokens,
            max_places=min(engine.max_seqs, MAX_STREAMS, places),
            runs_ahead=runs_ahead(engine),
            speculative=engine.speculative,
            rates=self._rates,
        )

    def _speculative(self, num_drafts: int) -> SpeculativeConfig | None:
        asked = self.spec.search.speculative
        return None if asked is None else settings_of(asked, num_drafts)


def engine_of(spec: PlanSpec, config: DecoderConfig, **sizes: Any) -> EngineConfig:
    """Make an engine with a plan's settings, and fields of EngineConfig that a search says."""
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in spec.engine.model_fields_set
        if name in EngineConfig.__dataclass_fields__
        and not isinstance(value := getattr(spec.engine, name), dict)
    }
    own = {"dtype": config.dtype, "device": spec.device, "kv_dtype": spec.kv_dtype}
    return replace(EngineConfig(model=spec.model), **(given | own | sizes))
