"""The grammar of a plan's file: which model, on what, under which traffic, to keep which limits."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from rayk.specs.experiment import (
    MAX_GIB,
    Count,
    Dtype,
    Engines,
    EngineSettings,
    KVDtype,
    Policy,
    PolicySpec,
    PositiveInt,
    Process,
    Rate,
    Requests,
    Seed,
    Shape,
    TransferSpec,
    as_list,
)
from rayk.specs.grammar import ModelPath, StrictModel
from rayk.specs.load import parse_override, read_spec_data, set_key
from rayk.specs.marks import Marks
from rayk.specs.plan_drafts import DraftSearch
from rayk.specs.refusals import first_refusal
from rayk.specs.traces import TraceSpec
from rayk.traces.drawn import Lengths, parse_lengths
from rayk.types.bounds import MAX_SECONDS
from rayk.types.durations import parse_ms
from rayk.types.errors import UserError

NUM_REQUESTS = 2000
Mode = Literal["aggregated", "disaggregated"]
MODES: tuple[Mode, ...] = get_args(Mode)
Objective = Literal["auto", "fewest_gpus", "max_rate"]


def _as_lengths(value: Any) -> Any:
    """Let numbers and lists stand for the texts that `rayk bench` takes."""
    values = value if isinstance(value, list) else [value]
    if any(isinstance(v, bool) or not isinstance(v, int | str) for v in values):
        return value
    return ",".join(map(str, values))


def _check_lengths(text: str) -> str:
    try:
        parse_lengths(text, where="")
    except UserError as error:
        raise ValueError(f"{error.problem} ({error.mend})") from error
    return text


def _as_time(value: Any) -> Any:
    """Let a number stand for milliseconds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.6f}ms" if is_number else value


def _check_time(text: str) -> str:
    found = parse_ms(text)
    if found is None or not 0 < found <= MAX_SECONDS * 1e3:
        raise ValueError(f"{text!r} is no time over 0: 500ms, 1.5s, or a number of milliseconds")
    return text


def _check_gpus(text: str) -> str:
    if not re.fullmatch(r"(?:[1-9]\d{0,4}x)?[A-Za-z]\w*", text):
        raise ValueError(f"{text!r} is no number of GPUs: e.g. 8xH200")
    return text


LengthsText = Annotated[str, BeforeValidator(_as_lengths), AfterValidator(_check_lengths)]
Time = Annotated[str, BeforeValidator(_as_time), AfterValidator(_check_time)]
Gpus = Annotated[str, AfterValidator(_check_gpus)]


T = TypeVar("T")
Choices = Annotated[list[T], BeforeValidator(as_list), Field(min_length=1, max_length=64)]
"""One alone stands for itself."""


class NodesSpec(StrictModel):
    """Nodes that are alike."""

    count: Engines = 1
    gpus: Gpus


class CpuSpec(StrictModel):
    """A machine without GPUs: each rank of an engine takes a slot."""

    slots: Engines
    memory_gib: Annotated[float, Field(gt=0, le=MAX_GIB)] = 2.0
    """What weights and KV of one rank may take."""


class TrafficSpec(StrictModel):
    """What comes; names and draws are those of `rayk bench`."""

    rate: Rate | None = None
    """Requests per second; None: as many as the SLO allows, or those of the trace."""
    process: Process = "poisson"
    burstiness: Shape = 1.0
    input_tokens: LengthsText = "512"
    output_tokens: LengthsText = "128"
    prefix_tokens: Count = 0
    num_prefixes: Requests = 1
    num_sessions: Requests | None = None
    num_requests: Requests = NUM_REQUESTS
    """How many a simulation that counts has at least; those that only sort plans out are shorter."""
    seed: Seed = 0
    trace: TraceSpec | None = None
    """Recorded traffic in place of all that is drawn."""

    @model_validator(mode="after")
    def _one_kind(self) -> TrafficSpec:
        if self.trace is not None:
            drawn = ("rate", "process", "burstiness", "input_tokens", "output_tokens", "prefix_tokens")
            given = [n for n in (*drawn, "num_prefixes", "num_sessions") if n in self.model_fields_set]
            if given:
                raise ValueError(f"`{given[0]}` is drawn, and a trace has it: leave it out, or `trace`")
        return self

    @property
    def inputs(self) -> Lengths:
        return parse_lengths(self.input_tokens, where="traffic.input_tokens")

    @property
    def outputs(self) -> Lengths:
        return parse_lengths(self.output_tokens, where="traffic.output_tokens")


class SloSpec(StrictModel):
    """What an answer must keep to be good, and how many must."""

    ttft: Time | None = None
    tpot: Time | None = None
    e2e: Time | None = None
    good: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of requests."""

    @model_validator(mode="after")
    def _some_limit(self) -> SloSpec:
        if self.ttft is None and self.e2e is None:
            raise ValueError("give `ttft: 500ms` or `e2e: 10s`: else requests may wait for ever")
        return self

    @property
    def limits_ms(self) -> dict[str, float]:
        """Limit by ttft, tpot, e2e, of those that are given."""
        found = {}
        for name in ("ttft", "tpot", "e2e"):
            given: str | None = getattr(self, name)
            limit = None if given is None else parse_ms(given)
            if limit is not None:
                found[name] = limit
        return found


class SearchSpec(StrictModel):
    """What is tried. Lists of choices; None: what the planner thinks worth a try."""

    mode: Choices[Mode] = Field(default_factory=lambda: list(MODES))
    tp: Choices[Engines] | None = None
    """TP of engines of either side; None: the powers of 2 that fit a node and the model can have."""
    prefill_tp: Choices[Engines] | None = None
    """TP of prefill engines, in place of `tp`; likewise `decode_tp`."""
    decode_tp: Choices[Engines] | None = None
    num_prefill: Choices[Engines] | None = None
    """Prefill engines, or aggregated ones."""
    num_decode: Choices[Engines] | None = None
    max_batch_tokens: Choices[PositiveInt] | None = None
    max_seqs: Choices[PositiveInt] | None = None
    policy: Choices[Policy] | None = None
    """None: least_loaded; with a prefix cache prefix_aware, too, and with sessions session_affinity."""
    block_size: Choices[PositiveInt] = Field(default_factory=lambda: [16])
    num_blocks: PositiveInt | Literal["auto"] = "auto"
    """Blocks of every engine; auto: what memory holds beside the weights."""
    speculative: DraftSearch | None = None
    """Drafts that are tried; engines without are, too."""

    @property
    def num_drafts(self) -> list[int]:
        """How many tokens engines draft at once, of those that are tried; 0: they draft none."""
        return [0] if self.speculative is None else [0, *dict.fromkeys(self.speculative.num_tokens)]


class PlanSpec(StrictModel):
    """A whole file of `rayk plan`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = "plan"
    model: ModelPath
    """A checkpoint's folder, its config.json alone, or a name of the hub."""
    dtype: Dtype = "auto"
    kv_dtype: KVDtype = "auto"
    gpus: Gpus | None = None
    """GPUs of one node."""
    nodes: Choices[NodesSpec] | None = None
    """Nodes of GPUs of one kind; an engine stays in a node."""
    cpu: CpuSpec | None = None
    costs: str | None = None
    """Folder of measured tables."""
    hardware: str | None = None
    """Data sheet: predictions from it are marked as unmeasured."""
    traffic: TrafficSpec = TrafficSpec()
    slo: SloSpec
    objective: Objective = "auto"
    """auto: the fewest GPUs that keep the SLO at the rate asked for; without a rate, the highest rate."""
    search: SearchSpec = SearchSpec()
    engine: EngineSettings = EngineSettings()
    """Settings that all engines have; those that `search` has are one choice here."""
    transfer: TransferSpec = TransferSpec()
    policy_settings: PolicySpec = PolicySpec()

    @model_validator(mode="after")
    def _whole(self) -> PlanSpec:
        if sum(given is not None for given in (self.gpus, self.nodes, self.cpu)) != 1:
            raise ValueError("give exactly one of `gpus` (8xH200), `nodes` and `cpu`")
        if (self.costs is None) == (self.hardware is None):
            raise ValueError("give exactly one of `costs` (a folder of `rayk costs`) and `hardware`")
        if self.engine.kind != "rayk":
            raise ValueError("plans are made of rayk's own engines: leave out engine.kind")
        for name in ("max_batch_tokens", "max_seqs", "num_blocks"):
            if name in self.engine.model_fields_set and name in self.search.model_fields_set:
                raise ValueError(f"`{name}` is given twice: in `engine` and in `search`")
        if self.objective == "fewest_gpus" and self.traffic.rate is None and self.traffic.trace is None:
            raise ValueError("objective: fewest_gpus needs traffic.rate, or a trace")
        return self

    @property
    def policies(self) -> list[str]:
        """The policies to try, the likeliest first."""
        if self.search.policy is not None:
            return self.search.policy
        has_sessions = self.traffic.num_sessions is not None or self.traffic.trace is not None
        found = ["least_loaded"] + ["prefix_aware"] * bool(self.engine.prefix_caching)
        return found + ["session_affinity"] * (has_sessions and bool(self.engine.prefix_caching))

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.cpu is None else "cpu"

    @property
    def resolved_objective(self) -> Literal["fewest_gpus", "max_rate"]:
        if self.objective != "auto":
            return self.objective
        is_open = self.traffic.rate is None and self.traffic.trace is None
        return "max_rate" if is_open else "fewest_gpus"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedPlan:
    """A checked file and the places of its keys."""

    spec: PlanSpec
    marks: Marks

    def default_folder(self) -> Path:
        """Tell where results go when nobody says: runs/<name>-<time>."""
        return Path("runs") / f"{self.spec.name}-{time.strftime('%Y%m%d-%H%M%S')}"

    def where(self, key: str) -> str:
        """Return the place of a dotted key."""
        return self.marks.where(tuple(key.split(".")))


def load_plan(
    spec: str | Path | Mapping[str, Any] | PlanSpec, overrides: Sequence[str] = (), *, source: str = "spec"
) -> LoadedPlan:
    """Read a file or a mapping, override (`KEY=VALUE`) and validate. Raises SpecError naming file:line."""
    if isinstance(spec, PlanSpec):
        data, marks = spec.model_dump(exclude_unset=True), Marks(source=source)
    else:
        data, marks = read_spec_data(spec, source)
    for text in overrides:
        key, value, where = parse_override(text)
        _drop_rival(data, key)
        set_key(data, marks, key, value, where, PlanSpec)
    try:
        return LoadedPlan(spec=PlanSpec.model_validate(data), marks=marks)
    except ValidationError as error:
        raise first_refusal(error, marks, PlanSpec) from error


RIVALS = (("gpus", "nodes", "cpu"), ("costs", "hardware"))
"""Keys of which a file has one: to set one takes the others away."""


def _drop_rival(data: dict[str, Any], key: str) -> None:
    name = key.split(".")[0]
    for group in RIVALS:
        if name in group:
            for other in set(group) - {name}:
                data.pop(other, None)


def dump_plan(spec: PlanSpec) -> str:
    """Return the file that `load_plan` reads back to an equal spec."""
    data = spec.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(data, sort_keys=False, width=100)
