"""The grammar of an experiment file: pydantic models, strict, unknown keys forbidden.

Every leaf of `ExperimentSpec` has a dotted name (`prefill.tp`, `engine.num_blocks`) and may be an
axis of the matrix, but for the few in `NOT_AXES`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    create_model,
    model_validator,
)
from pydantic_core import PydanticKnownError

from rayk.kv.layout import LAYOUTS
from rayk.models.families import FAMILIES
from rayk.sched.arrivals import PROCESSES
from rayk.sched.policies import POLICIES
from rayk.sched.policy import PolicySettings
from rayk.specs.grammar import ModelPath, StrictModel, checked
from rayk.specs.speculative import SideSpeculative, SpeculativeSpec, drafter_models
from rayk.types.bounds import (
    MAX_ENGINES,
    MAX_RATE,
    MAX_REQUESTS,
    MAX_SECONDS,
    MAX_TOKENS,
    MIN_RATE,
)
from rayk.types.config import BOTH_SIDES, Backend, EngineOptions
from rayk.types.offload import OffloadSettings
from rayk.types.request import MAX_LOGPROBS, MAX_PENALTY, MAX_SEED
from rayk.types.structured import StructuredOutputs
from rayk.types.verdicts import Verdict


def _one_of(*choices: str) -> AfterValidator:
    """Return a validator for names that another package lists."""

    def check(name: str) -> str:
        if name not in choices:
            expected = ", ".join(repr(c) for c in choices)
            raise PydanticKnownError("literal_error", {"expected": expected})
        return name

    return AfterValidator(check)


def _check_path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError(f"{text!r} is no path of a folder; null, or nothing, is none")
    return text


def _check_interpreter(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError(f"{text!r} is no path of an interpreter")
    return text


def _check_connector(text: str) -> str:
    """Allow a class that vLLM registers, or one by its module."""
    module, _, name = text.rpartition(":")
    if not name.isidentifier() or (":" in text and not all(p.isidentifier() for p in module.split("."))):
        raise ValueError(f"{text!r} is neither the name of a connector of vLLM's nor module:Class")
    return text


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is not JSON, as which settings travel to vLLM's process."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"what goes to vLLM must be JSON: {error}") from error
    return value


def _check_form(value: dict[str, Any]) -> dict[str, Any]:
    StructuredOutputs.of(value)
    return value


Layout = Annotated[str, _one_of("auto", *LAYOUTS)]
VLLM_LAYOUTS = {"NHD": "LBNHC", "HND": "LBHNC"}
"""vLLM's older names of layouts -> the six names, which vLLM shares with rayk."""
EngineKind = Literal["rayk", "vllm"]
Interpreter = Annotated[str, AfterValidator(_check_interpreter)]
Connector = Annotated[str, AfterValidator(_check_connector)]
HEAD = "eagle3"
"""What an EAGLE-3 head is called among families: it drafts for a model, and is none."""
CheckpointFamily = Annotated[str, _one_of(*FAMILIES, HEAD)]
Policy = Annotated[str, _one_of(*POLICIES)]
Process = Annotated[str, _one_of(*PROCESSES)]
KVDtype = Literal["auto", "fp8_e4m3", "nvfp4"]
KVScales = Literal["tensor", "token_head"]
Dtype = Literal["float32", "bfloat16", "float16", "auto"]
WeightsDtype = Literal["float32", "bfloat16", "float16"]
Check = Literal["tokens", "kv_bytes", "kv_values", "logprobs", "drafts"]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Requests = Annotated[int, Field(ge=1, le=MAX_REQUESTS)]
Engines = Annotated[int, Field(ge=1, le=MAX_ENGINES)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Cost = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Shape = Annotated[float, Field(ge=1e-3, le=1e6, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=MIN_RATE, le=MAX_RATE, allow_inf_nan=False)]
BLOCK_SIZE = 16
"""Block size of rayk's engines, where nobody says."""
MAX_GIB = 1 << 20
MAX_ITEMS = 1000
"""Most items of a list that is no axis."""
JsonMapping = Annotated[dict[str, Any], Field(max_length=MAX_ITEMS), AfterValidator(_check_json)]
MAX_CELLS = 10_000
"""Most cells of a matrix, before what is excluded."""

NOT_AXES = ("name", "checkpoints", "matrix", "exclude", "repeat")


def as_list(value: Any) -> Any:
    """A single item where a list is expected stands for a list of one."""
    return value if isinstance(value, list) or value is None else [value]


def or_nothing(value: Any) -> Any:
    """Where a section is expected null stands for one that says nothing."""
    return {} if value is None else value


def _layer_numbers(value: Any) -> Any:
    """List keys as text, as JSON has them; layers of a mapping in ascending order."""
    if not isinstance(value, dict):
        return value
    for key in value:
        if not isinstance(key, int | str) or not str(key).isdecimal():
            raise ValueError(f"{key!r} is not the number of a layer")
    return {str(int(key)): value[key] for key in sorted(value, key=int)}


GroupKind = Literal["full", "sliding", "chunked", "mla"]
"""KV groups whose blocks have a row per token, which kernels may cut."""
KernelBlockSizes = dict[GroupKind, PositiveInt]


class CheckpointSpec(StrictModel):
    """A tiny random checkpoint that a run writes where it is missing, as `rayk checkpoint` would.

    The name of a family alone stands for the family's own settings.
    """

    family: CheckpointFamily
    model: ModelPath | None = None
    """eagle3: the model that the head drafts for. None: the spec's, if it has one alone."""
    seed: Seed = 0
    config: Annotated[dict[str, Any], Field(max_length=MAX_ITEMS)] = Field(default_factory=dict)
    """Values of config.json that differ from the family's own."""
    dtype: WeightsDtype = "float32"
    quantise: str | None = None
    """A format of quantised releases, as `rayk checkpoint --quantise` has them."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_family(cls, value: Any) -> Any:
        return {"family": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_family(self) -> Self:
        if self.family == HEAD and self.quantise is not None:
            raise ValueError(f"a head ({HEAD}) is stored in {self.dtype}: leave `quantise` out")
        if self.family != HEAD and self.model is not None:
            raise ValueError(f"{self.family} drafts for no model: leave `model` out, or family: {HEAD}")
        return self


class RandomPrompts(StrictModel):
    """`count` random prompts whose lengths cycle through `input_tokens`. The first `prefix_tokens` of each
    are one of `num_prefixes` stretches, in turn, as those of `rayk bench`."""

    count: Requests = 8
    input_tokens: Annotated[list[PositiveInt], BeforeValidator(as_list), Field(min_length=1)] = Field(
        default_factory=lambda: [5, 37, 300]
    )
    prefix_tokens: Count = 0
    num_prefixes: Requests = 1
    seed: Seed = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that are drawn: of all prompts, and of the prefixes that they share."""
        rounds, rest = divmod(self.count, len(self.input_tokens))
        drawn = rounds * sum(self.input_tokens) + sum(self.input_tokens[:rest])
        return drawn + self.num_prefixes * self.prefix_tokens

    @model_validator(mode="after")
    def _few_enough(self) -> RandomPrompts:
        if self.num_tokens > MAX_TOKENS:
            raise ValueError(f"{self.num_tokens:,} tokens in all, and at most {MAX_TOKENS:,} are drawn")
        return self


class PromptsSpec(StrictModel):
    """Where prompts come from: exactly one of `random` and `file`."""

    random: RandomPrompts | None = None
    file: str | None = None
    num_sessions: Requests | None = None
    """Requests belong to so many sessions in turn; None: to none."""

    @model_validator(mode="after")
    def _one_source(self) -> PromptsSpec:
        if (self.random is None) == (self.file is None):
            raise ValueError("give exactly one of `random` and `file`")
        return self


class SamplingSpec(StrictModel):
    """How tokens are chosen, when to stop and what to tell; see types.request.SamplingParams.

    A `seed` is every request's; without one, each has its own, which depends on its prompt's index and on the
    repeat alone: it draws the same tokens in every cell and in every run.
    """

    max_tokens: PositiveInt = 24
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    ignore_eos: bool = True
    stop_token_ids: list[Count] = Field(default_factory=list)
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(as_list)] = Field(
        default_factory=list
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    structured_outputs: Annotated[dict[str, Any], AfterValidator(_check_form)] | None = None
    """The form that every output must have: one of json (a schema), json_object, regex, choice, grammar."""


Stages = Annotated[list[PositiveInt], Field(min_length=1, max_length=MAX_ENGINES)]
_LISTS: dict[str, Any] = {"pp_layers": Annotated[Stages | None, BeforeValidator(as_list)]}
"""Types of the engine options that a spec gives as lists."""
_MAPPINGS: dict[str, Any] = {
    "kernel_block_sizes": KernelBlockSizes,
    "layer_backends": Annotated[dict[str, checked(Backend)], BeforeValidator(_layer_numbers)],  # type: ignore[misc]
}
"""Types of the engine options that a spec gives as mappings."""


def _option_fields(*, of_side: bool) -> dict[str, Any]:
    """Name -> (type, default) of the engine options that a spec's section has. `of_side`: of a side's own
    values, which are None where it has none."""
    hints = get_type_hints(EngineOptions, include_extras=True)
    found: dict[str, Any] = {}
    for option in fields(EngineOptions):
        hint = hints[option.name]
        kind = _MAPPINGS.get(option.name) or _LISTS.get(option.name) or checked(hint)
        if not of_side:
            found[option.name] = kind, {} if option.name in _MAPPINGS else option.default
        elif BOTH_SIDES not in getattr(hint, "__metadata__", ()):
            found[option.name] = kind | None, None
    return found


class _EngineChoice(StrictModel):
    """Whose engines they are, and what vLLM's need."""

    kind: EngineKind = "rayk"
    python: Interpreter = ".venv-vllm/bin/python"
    """Interpreter of the environment with vLLM; `make vllm` makes the default one."""
    vllm: JsonMapping = Field(default_factory=dict)
    """vLLM's engine arguments by its own names (max_model_len), in place of what rayk makes of the spec."""
    connector: Connector = "NixlConnector"
    """vLLM's connector that hands KV over: a name that vLLM knows, or module:Class."""
    connector_options: JsonMapping = Field(default_factory=dict)
    """vLLM's kv_connector_extra_config."""


class _SideFields(StrictModel):
    """What a side's engines have that `engine` does not say."""

    kind: EngineKind | None = None
    python: Interpreter | None = None
    vllm: JsonMapping | None = None
    """Laid over `engine.vllm`."""
    tp: Engines = 1
    layout: Layout = "auto"
    block_size: PositiveInt | None = None
    """None: BLOCK_SIZE, and vLLM's engines choose their own."""
    kv_dtype: KVDtype | None = None
    kv_scales: KVScales | None = None
    speculative: SideSpeculative | None = None
    num_engines: Engines = 1
    node_labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes its engines may be on, in the words of Ray's label selectors: v, !v, in(a, b)."""


if TYPE_CHECKING:

    class EngineSettings(_EngineChoice):
        """Settings both sides share: see types.config.EngineOptions."""

        def __getattr__(self, name: str) -> Any: ...

    class SideSpec(_SideFields):
        """One side's engines. None means: as `engine` (or the top-level `kv_dtype`) says."""

        def __getattr__(self, name: str) -> Any: ...

else:
    EngineSettings = create_model(
        "EngineSettings", __base__=_EngineChoice, __module__=__name__, **_option_fields(of_side=False)
    )
    SideSpec = create_model(
        "SideSpec", __base__=_SideFields, __module__=__name__, **_option_fields(of_side=True)
    )


class TransferSpec(StrictModel):
    """How KV travels."""

    mode: Literal["pull", "push"] = "pull"
    staging: Literal["auto", "never", "always"] = "auto"
    """Whether whole stretches are moved into a buffer and repacked there; auto: where that costs less."""
    staging_mib: PositiveInt = 64
    """Size of each decode rank's staging buffer; reads that do not fit go through it in chunks."""
    push_layers: PositiveInt | Literal["auto"] = "auto"
    """Layers that one write of a push brings; auto: as the cost model says."""
    path: Literal["direct", "host"] = "direct"
    """direct: decode engines read from prefill engines. host: from the host tier, which has read from these:
    where no network joins the two, or the prefill engine's blocks are to be free soon."""
    lease_s: Seconds | None = None
    """A lease that nobody renews ends after so long; consumers renew it three times meanwhile. None: it lasts
    as long as a request may."""


class OffloadSpec(StrictModel):
    """A host tier of KV pages that a node's engines share, and a disk tier behind it; see types.offload."""

    host_gib: Annotated[float, Field(ge=0, le=MAX_GIB, allow_inf_nan=False)] = 0.0
    """Size of each node's host tier; 0: there is none."""
    layout: Annotated[str, _one_of(*LAYOUTS)] = "BHLNC"
    """How its pages lie: BHLNC as canonical pages, across layers; layouts with L outermost as a page per
    layer."""
    block_size: PositiveInt = 16
    """Tokens of its blocks, before they grow as an engine's do."""
    state_block_size: PositiveInt | None = None
    """Tokens per kept state of recurrent layers; None: as many as its blocks of attention have."""
    store: bool = True
    store_tokens: PositiveInt = 512
    """A request is stored whenever so many more of its tokens have KV, when its prompt has, and when it
    ends."""
    load: Literal["auto", "always", "never"] = "auto"
    """Whether prompts are loaded from it; auto: where that costs less than computing them."""
    swap: Literal["auto", "always", "never"] = "auto"
    """Whether preempted requests are swapped out to it; auto: where that costs less than to compute again."""
    outbox_mib: Annotated[int, Field(ge=0, le=MAX_GIB * 1024)] | None = None
    """Host memory of each rank into which it copies what it stores; None: 512 on a GPU, none on a CPU."""
    disk_folder: Annotated[str, AfterValidator(_check_path)] | None = None
    """Folder of the disk tier; None: there is none."""
    disk_gib: Annotated[float, Field(gt=0, le=MAX_GIB, allow_inf_nan=False)] = 1.0
    keep: Literal["cell", "run"] = "cell"
    """Whether the pages of one cell in host memory are forgotten before the next begins. Those on disk
    stay."""

    def settings(self, *, transfer_s: float = 30.0, request_s: float = 90.0) -> OffloadSettings | None:
        """For tiers and engines; None where there is no host tier. Deadlines of one store or load, and of a
        request, for which what was offered or swapped out is kept."""
        if not self.host_gib:
            return None
        own = self.model_dump(exclude={"host_gib", "disk_gib", "keep", "outbox_mib"})
        sizes = {"host_bytes": int(self.host_gib * 2**30), "disk_bytes": int(self.disk_gib * 2**30)}
        if self.outbox_mib is not None:
            sizes["outbox_bytes"] = self.outbox_mib * 2**20
        folder = None if self.disk_folder is None else os.path.realpath(self.disk_folder)
        limits = {"transfer_s": transfer_s, "lease_s": request_s + transfer_s}
        return OffloadSettings(**(own | sizes | limits | {"disk_folder": folder}))


class ArrivalSpec(StrictModel):
    """When requests arrive; see sched.arrivals. Times depend on these, the prompts' number and the repeat
    alone: they are the same in every cell."""

    rate: Rate | None = None
    """Requests per second on average; None: all arrive at once."""
    process: Process = "poisson"
    burstiness: Shape = 1.0
    """Shape of gamma: 1 is poisson, less comes in bursts."""
    seed: Seed = 0

    def heeds(self, leaf: str) -> bool:
        """Tell whether anything depends on this key of the section."""
        if leaf == "rate" or self.rate is None:
            return leaf == "rate"
        return not (leaf == "burstiness" and self.process != "gamma") and not (
            leaf == "seed" and self.process == "constant"
        )


class PolicySpec(StrictModel):
    """What policies can be told: the same fields under the same names as sched.policy.PolicySettings."""

    output_cost: Cost = 1.0
    move_cost: Cost = 0.1
    block_tokens: PositiveInt = 64
    index_blocks: Count = 65536
    host_cost: Cost = 0.1
    host_blocks: Count = 0
    local_prompt_tokens: Count = 64
    local_backlog_tokens: Count = 512

    def settings(self) -> PolicySettings:
        """Make the settings that `get_policy` takes."""
        return PolicySettings(**self.model_dump())


class Deadlines(StrictModel):
    """Every wait of a cell ends by one of these, in seconds."""

    cell_s: Seconds = 300.0
    request_s: Seconds = 120.0
    transfer_s: Seconds = 30.0


class FaultSpec(StrictModel):
    """One planted fault. `expect` is the verdict that proves it was caught."""

    kind: str
    point: str | None = None
    role: Literal["prefill", "decode"] | None = None
    rank: Count | None = None
    request: Count | None = None
    """Index of the prompt whose request is hit."""
    layer: Count | None = None
    step: Count | None = None
    """The how-manieth time that its point is passed there, from 1."""
    engine: Count | None = None
    """Index of the engine among those of its role; None: each of them commits the fault."""
    delay_s: Seconds | None = None
    seed: Seed = 0
    expect: Verdict | None = None

    @property
    def engine_role(self) -> str:
        """The side that commits the fault: the one named, else where its point happens."""
        at_decode = self.point == "decode" or self.kind in ("flip_bit", "wrong_drafts")
        return self.role or ("decode" if at_decode else "prefill")


def _kind(section: Any) -> Any:
    return section.get("kind") if isinstance(section, dict) else None


class ExperimentSpec(StrictModel):
    """A whole experiment file. `matrix` points are laid over the other keys, one cell each."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = "experiment"
    model: ModelPath
    checkpoints: Annotated[dict[ModelPath, CheckpointSpec], Field(max_length=MAX_ITEMS)] = Field(
        default_factory=dict
    )
    """Checkpoints by folder. Those that no cell runs are not written."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Dtype = "float32"
    prompts: PromptsSpec
    sampling: SamplingSpec = SamplingSpec()
    mode: Literal["aggregated", "disaggregated"] = "disaggregated"
    prefill: SideSpec = SideSpec()
    decode: SideSpec = SideSpec()
    kv_dtype: KVDtype = "auto"
    kv_scales: KVScales = "tensor"
    """Scales of fp8 caches: one per layer and side of the cache (tensor), or one per token and head."""
    speculative: Annotated[SpeculativeSpec, BeforeValidator(or_nothing)] = SpeculativeSpec()
    transfer: TransferSpec = TransferSpec()
    offload: OffloadSpec = OffloadSpec()
    engine: EngineSettings = EngineSettings()
    policy: Policy = "round_robin"
    policy_settings: PolicySpec = PolicySpec()
    placement: Literal["auto", "pack", "spread"] = "auto"
    """auto: nodes as Ray chooses. pack: one node for a cell's engines. spread: prefill and decode engines on
    different nodes. An engine's own workers always share a node."""
    arrival: ArrivalSpec = ArrivalSpec()
    gpus_per_worker: Annotated[float, Field(gt=0, le=MAX_ENGINES)] | Literal["auto"] = 1.0
    """GPUs of one worker; auto: a whole one, or the share at which the largest cell fits the cluster."""
    matrix: Annotated[list[dict[str, list[Any]]], BeforeValidator(as_list)] = Field(default_factory=list)
    exclude: Annotated[list[dict[str, Any]], BeforeValidator(as_list), Field(max_length=MAX_ITEMS)] = Field(
        default_factory=list
    )
    repeat: Annotated[int, Field(ge=1, le=MAX_ITEMS)] = 1
    checks: Annotated[list[Check], BeforeValidator(as_list), Field(min_length=1)] | None = None
    """None: tokens and kv_bytes in float32, logprobs and kv_bytes in other dtypes."""
    deadlines: Deadlines = Deadlines()
    failure_policy: Literal["fail", "recompute", "migrate"] = "fail"
    faults: Annotated[list[FaultSpec], BeforeValidator(as_list), Field(max_length=MAX_ITEMS)] = Field(
        default_factory=list
    )

    @model_validator(mode="before")
    @classmethod
    def _by_kind(cls, data: Any) -> Any:
        """Fill in what depends on whose engines a side has: vLLM has names of its own for layouts, and rayk a
        default size of blocks."""
        if not isinstance(data, dict):
            return data
        sides = {side: data.get(side, {}) for side in ("prefill", "decode")}
        shared = _kind(data.get("engine"))
        matrix = data.get("matrix")
        points = [m for m in (matrix if isinstance(matrix, list) else [matrix]) if isinstance(m, dict)]
        kinds = [v for m in points for key, v in m.items() if str(key).endswith(".kind")]
        names_vllm = "vllm" in (shared, *map(_kind, sides.values())) or any(
            "vllm" in as_list(v) for v in kinds
        )
        for side, given in sides.items():
            if not isinstance(given, dict):
                continue
            layout = given.get("layout")
            if layout in ("NHD", "HND") and (_kind(given) or shared) == "vllm":
                sides[side] = given | {"layout": VLLM_LAYOUTS[layout]}
            elif given.get("block_size") is None and not names_vllm:
                sides[side] = given | {"block_size": BLOCK_SIZE}
        return data | sides

    def kind_of(self, side: str) -> str:
        """Whose engines a side has: rayk or vllm."""
        return str(getattr(self, side).kind or self.engine.kind)

    def block_size_of(self, side: str) -> int | None:
        """Find the block size that is given, or that a side's kind of engine has."""
        given: int | None = getattr(self, side).block_size
        return BLOCK_SIZE if given is None and self.kind_of(side) == "rayk" else given

    @property
    def names_vllm(self) -> bool:
        """Whether some engines of the matrix may be vLLM's."""
        named = [self.engine.kind, self.prefill.kind, self.decode.kind]
        named += [
            v for m in self.matrix for key, values in m.items() if key.endswith(".kind") for v in values
        ]
        return "vllm" in named

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of engine on each side that a cell of this spec has."""
        sides = ("prefill",) if self.mode == "aggregated" else ("prefill", "decode")
        return tuple(map(self.kind_of, sides))

    def models(self) -> list[str]:
        """Return every model that some cell runs, the first of them first."""
        axes = [matrix.get("model", [self.model]) for matrix in self.matrix or [{}]]
        return list(dict.fromkeys(name for axis in axes for name in axis))

    def drafters(self) -> list[str]:
        """Return every checkpoint of a drafter that some cell's engines may have."""
        return drafter_models(self)

    def prompt_files(self) -> list[str]:
        """Return every prompts file that some cell reads."""
        axes = [matrix.get("prompts.file", []) for matrix in self.matrix]
        named = [self.prompts.file, *(name for axis in axes for name in axis)]
        return list(dict.fromkeys(name for name in named if name is not None))


def dotted_keys(model: type[BaseModel] = ExperimentSpec, prefix: str = "") -> Iterator[str]:
    """Dotted names of every leaf of the spec, in the order of the grammar."""
    for name, info in model.model_fields.items():
        child = section_model(info.annotation)
        if child is None:
            yield prefix + name
        else:
            yield from dotted_keys(child, f"{prefix}{name}.")


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field that is a section (`X` or `X | None`), else None."""
    options: tuple[Any, ...] = (annotation,)
    if get_origin(annotation) in (Union, UnionType):
        options = get_args(annotation)
    models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
    return models[0] if models else None


AXES: tuple[str, ...] = tuple(k for k in dotted_keys() if k.split(".")[0] not in NOT_AXES)
"""Every key that may be an axis."""
