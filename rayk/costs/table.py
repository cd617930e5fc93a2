"""Keep what an engine's work takes, and tell what a step takes.

A `CostBook` (see book) has the tables of a machine (or of several alike): of each kind of engine its
`EngineCosts`, and what its engines have in common: transfers, gaps between them, and the host.
Times are nanoseconds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from rayk.costs.features import DecodeRun, StepFeatures
from rayk.costs.hull import Hull
from rayk.costs.losses import NO_LOSSES, StepLosses
from rayk.models.config import DecoderConfig
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from rayk.types.model_names import short_name
from rayk.types.speculative import SpeculativeConfig

NOT_A_COST = (
    "max_positions", "stated_positions", "bos_token_id", "eos_token_ids", "pad_token_id",
    "mtp_layers",
)  # fmt: skip
"""Settings of a model that no step's time depends on."""
MEASURE_DRAFTS = "measure them: `rayk costs MODEL --drafts TOKENS`"
_TERM = re.compile(r"(one|requests|tokens|logits|prefills|pairs|seen|drafts)(?:([<>@])(\d+))?")


class EngineKey(NamedTuple):
    """What an engine's costs depend on."""

    model: str  # family and a digest of its sizes: weights do not matter
    tp: int
    pp: int
    dcp: int
    dtype: str
    kv_dtype: str
    device: str
    layout: str
    backend: str
    block_size: int

    @property
    def text(self) -> str:
        """Name it in a message."""
        return f"{self.model}-tp{self.tp}-{self.dtype}-{self.device}"

    @property
    def file_name(self) -> str:
        """Name a file of it: no other key has this name."""
        digest = hashlib.blake2b(repr(tuple(self)).encode(), digest_size=4).hexdigest()
        return f"{self.text}-{digest}"


def engine_key(config: DecoderConfig, engine: EngineConfig) -> EngineKey:
    """Say which costs an engine has."""
    sizes = {name: value for name, value in asdict(config).items() if name not in NOT_A_COST}
    digest = hashlib.blake2b(repr(sorted(sizes.items())).encode(), digest_size=4).hexdigest()
    return EngineKey(
        model=f"{config.family}-{digest}",
        tp=engine.tp,
        pp=engine.pp,
        dcp=engine.dcp,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
        device=engine.device,
        layout=engine.layout,
        backend=engine.attention_backend,
        block_size=engine.block_size,
    )


def drafter_name(speculative: SpeculativeConfig) -> str:
    """Say whose costs a drafter's are. One on ranks computes as many times as it proposes tokens."""
    if speculative.method == "ngram":
        return speculative.method
    model = f" {short_name(speculative.model)}" if speculative.model else ""
    return f"{speculative.method}{model} x{speculative.num_tokens}"


@lru_cache(maxsize=256)
def _parsed(term: str) -> tuple[str, str, int]:
    match = _TERM.fullmatch(term)
    assert match is not None, term
    name, sign, number = match.groups()
    return name, sign or "", int(number or 0)


def term_value(term: str, features: StepFeatures) -> float:
    """Evaluate one term of a step's time: `one`, a feature, `tokens>32` (those beyond 32), `tokens<32` (those
    up to 32) or `pairs@0` (in the model's first window)."""
    name, sign, number = _parsed(term)
    if name == "one":
        return 1
    if sign == "@":
        return features.windowed[number][name == "seen"]
    return _cut(getattr(features, f"num_{name}"), sign, number)


def _cut(value: int, sign: str, number: int) -> int:
    """Return what of a feature a term with a limit counts."""
    if sign == ">":
        return max(0, value - number)
    return min(value, number) if sign == "<" else value


def term_values(term: str, run: DecodeRun) -> Sequence[int] | int:
    """Evaluate one term of each of the steps' times, as `term_value` does; a number: the same of each."""
    name, sign, number = _parsed(term)
    if name == "one":
        return 1
    values: Sequence[int] | int
    values = run.windowed[number][name == "seen"] if sign == "@" else getattr(run, f"num_{name}")
    if isinstance(values, int):
        return _cut(values, sign, number)
    return [_cut(value, sign, number) for value in values] if sign in ("<", ">") else values


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """How far a fit is from what it was fitted to, as shares of the measured."""

    num_steps: int = 0
    p50: float = 0.0
    p90: float = 0.0
    worst: float = 0.0
    worst_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """What one class of steps takes: the sum of constants times terms."""

    terms: tuple[str, ...]
    constants: tuple[float, ...]  # ns per unit of each
    hull: Hull = field(default_factory=Hull)
    residuals: Residuals = field(default_factory=Residuals)
    ratios: tuple[float, ...] = (1.0,)  # quantiles of measured by fitted, evenly spaced

    def ns(self, features: StepFeatures) -> float:
        """Tell the mean time of such a step, wherever it lies."""
        found = 0.0
        for term, constant in zip(self.terms, self.constants, strict=True):
            found += constant * term_value(term, features)
        return found

    def scaled(self, factor: float) -> StepTable:
        """Return what steps take that are so many times as slow."""
        return replace(self, constants=tuple(factor * c for c in self.constants))

    def each_ns(self, run: DecodeRun) -> list[float]:
        """Tell the same of steps that follow one another, to the last bit: terms are added in this order."""
        same = 0.0  # what the terms so far come to, as long as that is the same of each step
        found: list[float] | None = None
        for term, constant in zip(self.terms, self.constants, strict=True):
            values = term_values(term, run)
            if not isinstance(values, int):
                before = [same] * len(values) if found is None else found
                found = [ns + constant * value for ns, value in zip(before, values, strict=True)]
            elif found is None:
                same += constant * values
            else:
                more = constant * values
                found = [ns + more for ns in found]
        return [same] * len(run.num_seen) if found is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """What something takes: so much each time, and per unit."""

    fixed_ns: float = 0.0
    descriptor_ns: float = 0.0
    byte_ns: float = 0.0

    def ns(self, num_bytes: float = 0, num_descriptors: float = 0) -> float:
        return self.fixed_ns + self.descriptor_ns * num_descriptors + self.byte_ns * num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """What one kind of engine takes: given to simulated and to paced engines."""

    key: EngineKey
    decode: StepTable
    prefill: StepTable  # any step in which some request computes more than a token, or its first
    verify: StepTable | None = None
    """Steps of decodes, some of which have drafts behind their token; None: nobody measured any."""
    drafting: Mapping[str, StepTable] = field(default_factory=dict)
    """What a turn takes beside its step in place of the three that follow, of an engine that drafts: by
    `drafter_name`. What the drafter takes is a part of it."""
    host_ns: float = 0.0  # of a turn beside its step: planning, polling, settling
    request_host_ns: float = 0.0  # the same per request of the step
    prefill_host_ns: float = 0.0  # and for each whose prompt it computes
    commands: Mapping[str, LinearCost] = field(default_factory=dict)
    """What a rank does for a hand-over: `each`, of a turn for any command; `MakeTicket`, by the bytes lent;
    `fence` and `verify`, by those read, each of the rank that has most."""
    losses: StepLosses = NO_LOSSES
    """What its steps lose beside those of other engines on the same host."""
    kind: str = "measured"  # or unmeasured: derived from data sheets
    source: str = ""  # which runs, or which data sheet

    @classmethod
    def flat(cls, step_ns: float, token_ns: float = 0.0, **others: Any) -> EngineCosts:
        """Make costs of steps that take `step_ns` and `token_ns` per token, anywhere: for tests."""
        table = StepTable(terms=("one", "tokens"), constants=(step_ns, token_ns))
        key = EngineKey("flat", 1, 1, 1, "float32", "auto", "cpu", "auto", "auto", 16)
        drafting = {"ngram": StepTable(terms=(), constants=())}
        own: dict[str, Any] = {"verify": table, "drafting": drafting, "source": "flat"}
        return cls(key=key, decode=table, prefill=table, **(own | others))

    @property
    def is_measured(self) -> bool:
        return self.kind == "measured"

    def table_of(self, features: StepFeatures) -> StepTable:
        """Find the table of a step's class. Raises UserError where nobody measured such steps."""
        if features.num_prefills:
            return self.prefill
        return self.decode if not features.num_drafts else self._verifying()

    def _verifying(self) -> StepTable:
        if self.verify is None:
            raise UserError(f"no costs of steps with drafts of {self.key.text}", mend=MEASURE_DRAFTS)
        return self.verify

    def turns_of(self, speculative: SpeculativeConfig | None) -> StepTable | None:
        """Find what turns of an engine that drafts so take beside its steps; None: it does not draft. Raises
        UserError where nobody measured that, or steps with drafts."""
        if speculative is None:
            return None
        self._verifying()
        name = drafter_name(speculative)
        if name not in self.drafting:
            known = f"; of {', '.join(self.drafting)} there are" if self.drafting else ""
            raise UserError(f"no costs of drafter {name} of {self.key.text}{known}", mend=MEASURE_DRAFTS)
        return self.drafting[name]

    def is_inside(self, features: StepFeatures) -> bool:
        """Tell whether such steps were measured."""
        return self.table_of(features).hull.why_outside(features) is None

    def step_ns(self, features: StepFeatures, *, strict: bool = True) -> float:
        """Tell what a step takes, on average. If `strict`, raises OutsideHull for one like none that was
        measured."""
        table = self.table_of(features)
        if strict:
            table.hull.check(features, self.key.text)
        return table.ns(features)

    def turn_ns(self, features: StepFeatures | DecodeRun) -> float:
        """Tell what the host takes of a turn beside its step, of an engine that does not draft."""
        prompts_ns = self.prefill_host_ns * features.num_prefills
        return self.host_ns + self.request_host_ns * features.num_requests + prompts_ns

    def scaled(self, factor: float) -> EngineCosts:
        """Return the costs of an engine so many times as slow at steps."""
        return replace(
            self,
            decode=self.decode.scaled(factor),
            prefill=self.prefill.scaled(factor),
            verify=None if self.verify is None else self.verify.scaled(factor),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time between processes, as evenly spaced quantiles, and what each stream under way adds: the first
    ones more, which take the cores."""

    quantiles: tuple[float, ...] = (0.0,)  # ns
    stream_ns: float = 0.0
    core_ns: float = 0.0  # what each of the first adds beside that, as many as the host has cores

    def ns(self, share: float = 0.5, num_streams: int = 0, *, num_cores: int = 0) -> float:
        """Tell the quantile at `share` (0.5: the median) while so many requests stream. `num_cores`: those of
        the host that its engines take."""
        taken_ns = self.core_ns * min(num_streams, num_cores)
        return quantile(self.quantiles, share) + taken_ns + self.stream_ns * num_streams


def quantile(values: Sequence[float], share: float) -> float:
    """Interpolate between evenly spaced quantiles."""
    if len(values) == 1:
        return values[0]
    place = share * (len(values) - 1)
    below = min(int(place), len(values) - 2)
    low, high = values[below], values[below + 1]
    return low + (place - below) * (high - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class GapTable:
    """What passes between processes, apart from their work."""

    dispatch: Gap = field(default_factory=Gap)  # from a placement until the engine has the request
    handover: Gap = field(default_factory=Gap)  # from a ticket's leaving until the decode engine has it
    release: Gap = field(default_factory=Gap)  # from a proof until the producer knows
    answer: Gap = field(default_factory=Gap)  # from a request's last token until its place is free
    tier: Gap = field(default_factory=Gap)  # an ask of a host tier, or its answer, on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCosts:
    """What a hand-over's read takes: of the reader while it posts each row (of a producer rank and a group),
    and from its last post until the last byte of all its rows is there."""

    post: LinearCost
    wait: LinearCost


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTable:
    reads: Mapping[str, ReadCosts] = field(default_factory=dict)  # by `read_name`

    def find(self, prefill: EngineConfig, decode: EngineConfig) -> ReadCosts | None:
        """Find what a decode engine's reads from a prefill engine cost. What they move is counted apart, and
        layouts and TP sizes matter most by that: where the very pair was not measured, take one of other
        layouts, then one of other TP sizes, between devices of these kinds."""
        wanted = _read_parts(prefill, decode)
        alike = [(name.split(), costs) for name, costs in sorted(self.reads.items())]
        for num_alike in (4, 3, 2):
            for parts, costs in alike:
                if tuple(parts[:num_alike]) == wanted[:num_alike]:
                    return costs
        return None


def read_name(prefill: EngineConfig, decode: EngineConfig) -> str:
    """Name the reads of a decode engine from a prefill engine by what their costs depend on: transport,
    devices, TP sizes, and layouts as the engines' settings name them, e.g. `nixl cpu 2:1 BHLNC:auto`."""
    return " ".join(_read_parts(prefill, decode))


def _read_parts(prefill: EngineConfig, decode: EngineConfig) -> tuple[str, ...]:
    devices = prefill.device if prefill.device == decode.device else f"{prefill.device}>{decode.device}"
    return "nixl", devices, f"{prefill.tp}:{decode.tp}", f"{prefill.layout}:{decode.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTable:
    """What the engines of a host share, and what forming one takes. What their steps lose to each other is
    each engine's own (`EngineCosts.losses`)."""

    num_cores: int = 0  # 0: not shared
    form_s: float = 0.0  # until an engine that died serves again
