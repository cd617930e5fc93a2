"""From a spec to its cells: the cross product of each matrix, united, minus what is excluded."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rayk.kv.formats import engine_format
from rayk.kv.geometry import layout_veto
from rayk.kv.kernel_blocks import kernel_block_sizes
from rayk.kv.layout import resolve_layout
from rayk.kv.specs import page_bytes
from rayk.models.config import DecoderConfig
from rayk.models.drafters.refusals import why_no_drafts
from rayk.models.engine_pool import shared_riders
from rayk.models.kv_specs import engine_groups, group_chunks
from rayk.models.tensor_parallel import bad_division, why_tp_unsupported
from rayk.sched.arrivals import due_times
from rayk.sched.policies import heeds
from rayk.sched.policy import PolicySettings
from rayk.specs.devices import resolve_device
from rayk.specs.experiment import BLOCK_SIZE, Deadlines, ExperimentSpec, FaultSpec, SamplingSpec, SideSpec
from rayk.specs.load import LIST_KEYS, apply_point
from rayk.specs.speculative import NONE, axes_given, axis_value, drafts_of, is_key
from rayk.specs.vllm_engines import (
    NO_HANDSHAKE,
    PROVES_TP,
    SHARED_OPTIONS,
    is_divided,
    is_unheeded,
    vllm_engines,
)
from rayk.types.config import EngineConfig, EngineOptions, VllmEngineConfig
from rayk.types.errors import LayoutVetoed, SpecError, Unsupported, UserError
from rayk.types.fault_table import KINDS, OTHERS, POINTS, REQUEST_POINTS, ExpectedOutcome, Fault, expected
from rayk.types.model_names import short_name
from rayk.types.request import SamplingParams
from rayk.types.speculative import SpeculativeConfig
from rayk.types.structured import StructuredOutputs
from rayk.types.verdicts import VERDICTS

TABLED = (*KINDS, "kill_node")
"""Kinds of faults with points of a request's life."""

UNHEEDED = {
    "push": ("transfer.staging", "transfer.staging_mib", "transfer.path"),
    "pull": ("transfer.push_layers",),
}
"""Transfer mode -> what only the other mode heeds."""

Models = DecoderConfig | Mapping[str, DecoderConfig]
"""The decoder of all cells, or each model's by its name in the spec."""

STANDARD_AXES = (
    "mode",
    "prefill.tp",
    "decode.tp",
    "prefill.pp",
    "decode.pp",
    "prefill.dcp",
    "decode.dcp",
    "prefill.dcp_interleave",
    "decode.dcp_interleave",
    "prefill.layout",
    "decode.layout",
    "prefill.block_size",
    "decode.block_size",
    "prefill.kv_dtype",
    "decode.kv_dtype",
    "kv_dtype",
    "transfer.mode",
    "transfer.staging",
    "prefill.num_engines",
    "decode.num_engines",
    "policy",
    "failure_policy",
    "dtype",
    "device",
)
"""Axes every row of cells.parquet has, whether or not the matrix names them."""


MAX_STREAMS = 96
"""Requests of one cell in flight at once, each of which holds a thread of its worker's io group while it
streams. Of a server: on one engine, where nobody says how many. Those beyond its rows wait at its door."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One configuration to run. `spec` is the cell's own spec, without a matrix."""

    cell_id: str
    axes: dict[str, Any]
    """Every axis by its dotted name; None for what the cell does not heed: decode.* and transfer.* of
    aggregated cells, UNHEEDED of the others; what its policy and its arrivals do not."""
    mode: str
    prefill: EngineConfig
    """The engine of an aggregated cell, the prefill engine of a disaggregated one."""
    decode: EngineConfig | None
    num_prefill_engines: int
    num_decode_engines: int
    unsupported: str | None
    """Why the model itself, or its kinds of engines, cannot run this way (verdict UNSUPPORTED), or None."""
    checks: tuple[str, ...]
    faults: tuple[FaultSpec, ...]
    expected_verdict: str
    sampling: SamplingParams
    deadlines: Deadlines
    repeat: int
    policy: str
    failure_policy: str
    gpus_per_worker: float | Literal["auto"]
    """`auto` until the cluster is known."""
    spec: ExperimentSpec
    host_tokens: int = 0
    """Tokens whose KV fits a host tier; 0 if there is no tier that prompts are loaded from."""
    refused_by: str | None = None
    """Who says that it is unsupported: model or rayk. What vLLM refuses is known when it has run."""
    vllm: tuple[VllmEngineConfig, ...] = ()
    """The engines where vLLM runs the cell: (engine,) if aggregated, (prefill, decode) if not; else ().
    What `prefill` and `decode` say of models and KV groups holds for them, too."""

    @property
    def is_rayks(self) -> bool:
        """Whether every engine is rayk's own."""
        return set(self.spec.kinds) == {"rayk"}

    @property
    def engines(self) -> tuple[EngineConfig, ...]:
        """One engine per side."""
        return (self.prefill,) if self.decode is None else (self.prefill, self.decode)

    def on_device(self, device: str) -> Cell:
        """Return the cell where `device: auto` is `device`."""
        if self.spec.device != "auto" or self.prefill.device == device:
            return self
        decode = None if self.decode is None else replace(self.decode, device=device)
        vllm = tuple(replace(engine, device=device) for engine in self.vllm)
        return replace(self, prefill=replace(self.prefill, device=device), decode=decode, vllm=vllm)

    @property
    def all_engines(self) -> tuple[EngineConfig, ...]:
        """Each side's engine, as often as there are engines of it."""
        decode = (self.decode,) * self.num_decode_engines if self.decode is not None else ()
        return (self.prefill,) * self.num_prefill_engines + decode

    @property
    def kv_formats(self) -> tuple[str, ...]:
        """What each side keeps, by its name in kv.formats."""
        return tuple(engine_format(e.dtype, e.kv_dtype, e.kv_scales) for e in self.engines)

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values are rounded to a format with scales on any side."""
        return any(e.kv_dtype != "auto" for e in self.engines)

    @property
    def is_converted(self) -> bool:
        """Whether the decode side keeps another format than the prefill side."""
        return len(set(self.kv_formats)) > 1

    @property
    def policy_settings(self) -> PolicySettings:
        """For `get_policy`. Engines without a prefix cache are not looked up in an index, nor is a host tier
        that is not there."""
        settings = self.spec.policy_settings.settings()
        if not any(e.prefix_caching for e in self.engines):
            settings = replace(settings, index_blocks=0)
        in_tier = self.host_tokens // settings.block_tokens
        return replace(settings, host_blocks=min(settings.host_blocks or in_tier, in_tier))

    def session_of(self, index: int) -> str | None:
        """That a prompt's request belongs to."""
        num = self.spec.prompts.num_sessions
        return None if num is None else f"session {index % num}"

    def due_ns(self, num_requests: int, repeat: int) -> list[int]:
        """When each request of a repeat arrives, in nanoseconds after its start."""
        arrival = self.spec.arrival
        if arrival.rate is None:
            return [0] * num_requests
        return due_times(
            arrival.process,
            rate=arrival.rate,
            num_requests=num_requests,
            burstiness=arrival.burstiness,
            seed=arrival.seed,
            stream=1 + repeat,
        )

    @property
    def vllm_engines(self) -> tuple[VllmEngineConfig, ...]:
        """vLLM's engines that the cell needs, as many of each side as there are; none if it does not run."""
        if self.unsupported or not self.vllm:
            return ()
        prefill, *decode = self.vllm
        return (prefill,) * self.num_prefill_engines + tuple(decode) * self.num_decode_engines

    @property
    def num_workers(self) -> int:
        """Ranks over all engines of the cell."""
        decode = self.decode.num_ranks * self.num_decode_engines if self.decode else 0
        return self.prefill.num_ranks * self.num_prefill_engines + decode


def decoder_of(models: Models, spec: ExperimentSpec) -> DecoderConfig:
    """Read the decoder of a cell with this spec."""
    return models[spec.model] if isinstance(models, Mapping) else models


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a matrix gives."""

    cells: tuple[Cell, ...]
    """Cells in the order of the file, without duplicates and what is excluded."""
    idle_rules: tuple[int, ...]
    """Indexes of the exclude rules that match no cell of the matrix: most likely not what was meant."""


def expand_matrix(spec: ExperimentSpec, models: Models, *, device: str | None = None) -> Expansion:
    """Make the cells of a spec.

    `device` is what `auto` means (default: cuda when this machine has a GPU, else cpu).
    Raises SpecError when nothing is left.
    """
    names = axis_names(spec)
    cells: dict[str, Cell] = {}
    idle = set(range(len(spec.exclude)))
    for point in _points(spec):
        cell = _make_cell(apply_point(spec, point), names, models, device)
        matched = {i for i, rule in enumerate(spec.exclude) if _matches(cell, rule)}
        idle -= matched
        if not matched:
            cells.setdefault(json.dumps(cell.axes, sort_keys=True), cell)
    if not cells:
        raise SpecError(problem="no cell is left: `exclude` removes all", where="exclude")
    _check_model_names(spec)
    assert len({c.cell_id for c in cells.values()}) == len(cells), "two cells share a name"
    return Expansion(tuple(cells.values()), tuple(sorted(idle)))


def expand(spec: ExperimentSpec, models: Models, *, device: str | None = None) -> list[Cell]:
    """Expand the matrix of a spec; see `expand_matrix`."""
    return list(expand_matrix(spec, models, device=device).cells)


def _check_model_names(spec: ExperimentSpec) -> None:
    """Cells are named by their model's folder."""
    named: dict[str, str] = {}
    for model in spec.models():
        other = named.setdefault(short_name(model), model)
        if other != model:
            raise SpecError(
                problem=f"models {other!r} and {model!r} share the folder name that cells are told apart by",
                where="model",
                mend="rename one folder",
            )


def axis_names(spec: ExperimentSpec) -> tuple[str, ...]:
    """Return the standard axes and those the spec adds, in order; whose engines they are where some are
    vLLM's."""
    added = [key for matrix in spec.matrix for key in matrix]
    kinds = [f"{side}.kind" for side in ("prefill", "decode") if getattr(spec, side).kind is not None]
    if spec.engine.kind != "rayk" or kinds:
        kinds.insert(0, "engine.kind")
    return tuple(dict.fromkeys((*STANDARD_AXES, *kinds, *axes_given(spec), *added)))


def resolved_dtype(name: str, config: DecoderConfig) -> str:
    """`auto` is the checkpoint's dtype."""
    return config.dtype if name == "auto" else name


def _points(spec: ExperimentSpec) -> Iterator[dict[str, Any]]:
    for matrix in spec.matrix or [{}]:
        for values in itertools.product(*matrix.values()):
            yield dict(zip(matrix, values, strict=True))


def _matches(cell: Cell, rule: dict[str, Any]) -> bool:
    """Tell whether every key of an exclude rule, an axis of the matrix or not, has (one of) the rule's
    values."""
    for key, given in rule.items():
        options = given if isinstance(given, list) and key not in LIST_KEYS else [given]
        options = [{str(k): v for k, v in o.items()} if isinstance(o, dict) else o for o in options]
        if key == "faults":
            named = given if isinstance(given, list) else [given]
            options = [_plain_faults(FaultSpec.model_validate(fault) for fault in named)]
        absent = _is_unheeded(key, cell.spec)
        found = cell.axes[key] if key in cell.axes else None if absent else _axis_value(cell.spec, key)
        if is_key(key) and key.endswith(".method"):
            found, options = found or NONE, [option or NONE for option in options]
        if found not in options:
            return False
    return bool(rule)


def _is_unheeded(name: str, spec: ExperimentSpec) -> bool:
    """Tell whether nothing in a cell of this spec depends on an axis."""
    section, _, leaf = name.partition(".")
    if is_unheeded(name, spec.kinds):
        return True
    if section == "arrival":
        return not spec.arrival.heeds(leaf)
    if section == "offload":
        return leaf != "host_gib" and not spec.offload.host_gib
    if name == "prompts.num_sessions":
        return spec.policy != "session_affinity"
    if section == "policy_settings":
        return not heeds(spec.policy, leaf, hands_over=spec.mode != "aggregated")
    if spec.mode == "aggregated":
        return section in ("decode", "transfer")
    return name in UNHEEDED[spec.transfer.mode]


def _make_cell(spec: ExperimentSpec, names: tuple[str, ...], models: Models, device: str | None) -> Cell:
    config = decoder_of(models, spec)
    aggregated = spec.mode == "aggregated"
    axes = {name: None if _is_unheeded(name, spec) else _axis_value(spec, name) for name in names}
    prefill = _engine(spec, "prefill", config, device)
    decode = None if aggregated else _engine(spec, "decode", config, device)
    checks = _checks(spec, config)
    refused_by, unsupported = _refusal(spec, config, prefill, decode)
    sides = {"prefill": prefill} | ({"decode": decode} if decode is not None else {})
    return Cell(
        cell_id=cell_id(axes),
        axes=axes,
        mode=spec.mode,
        prefill=prefill,
        decode=decode,
        num_prefill_engines=spec.prefill.num_engines,
        num_decode_engines=0 if aggregated else spec.decode.num_engines,
        unsupported=unsupported,
        refused_by=refused_by,
        vllm=vllm_engines(spec, sides, config) if set(spec.kinds) == {"vllm"} else (),
        checks=checks,
        faults=tuple(spec.faults),
        expected_verdict=min(
            (verdict_of_fault(f, spec) for f in spec.faults), key=VERDICTS.index, default="PASS"
        ),
        sampling=_sampling(spec.sampling, checks, fast_prefill=prefill.fast_prefill),
        deadlines=spec.deadlines,
        repeat=spec.repeat,
        policy=spec.policy,
        failure_policy=spec.failure_policy,
        gpus_per_worker=spec.gpus_per_worker,
        spec=spec,
        host_tokens=_host_tokens(spec, prefill, decode, config),
    )


def _host_tokens(
    spec: ExperimentSpec, prefill: EngineConfig, decode: EngineConfig | None, config: DecoderConfig
) -> int:
    settings = spec.offload.settings()
    if settings is None or settings.load == "never" or _refusal(spec, config, prefill, None)[1] is not None:
        return 0
    engines = (prefill,) if decode is None else (prefill, decode)
    try:
        groups = engine_groups(prefill, config, shared_riders(engines, config))
    except (UserError, Unsupported):
        return 0  # a drafter that does not fit: speculative_checks refuses it in the spec's words
    token_bytes = sum(page_bytes(g.spec) * len(g.layers) / g.spec.block_size for g in groups)
    return int(settings.host_bytes / token_bytes)


def _sampling(spec: SamplingSpec, checks: tuple[str, ...], *, fast_prefill: bool) -> SamplingParams:
    """The same fields under the same names; check `logprobs` needs those of all tokens told.

    With fast prefill there are none of prompts. The check then sees output tokens only, and the cell's row
    says so: they depend on all of the prompt, too, and to refuse the pair would leave cells outside float32
    without their default check.
    """
    values: dict[str, Any] = {name: getattr(spec, name) for name in SamplingSpec.model_fields}
    if "logprobs" in checks:
        reported = ("logprobs",) if fast_prefill else ("logprobs", "prompt_logprobs")
        values |= {name: values[name] or 0 for name in reported}
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    if spec.structured_outputs is not None:
        values["structured_outputs"] = StructuredOutputs.of(spec.structured_outputs)
    return SamplingParams(**values)


def _engine(spec: ExperimentSpec, name: str, config: DecoderConfig, device: str | None) -> EngineConfig:
    side = getattr(spec, name)
    # vLLM's engines heed only some of what rayk's do.
    is_vllms = spec.kind_of(name) == "vllm"
    heeded = SHARED_OPTIONS if is_vllms else tuple(option.name for option in fields(EngineOptions))
    return EngineConfig(
        model=absolute_model(spec.model),
        tp=side.tp,
        dtype=resolved_dtype(spec.dtype, config),
        device=resolve_device(spec.device, device),
        layout="auto" if is_vllms else side.layout,
        block_size=side.block_size or BLOCK_SIZE,
        kv_dtype=side.kv_dtype or spec.kv_dtype,
        kv_scales=side.kv_scales or spec.kv_scales,
        speculative=None if is_vllms else _drafts(spec, name),
        **{name: _engine_option(spec, side, name) for name in heeded},
    )


def _drafts(spec: ExperimentSpec, side: str) -> SpeculativeConfig | None:
    drafts = drafts_of(spec, side)
    if drafts is None or drafts.model is None:
        return drafts
    return replace(drafts, model=absolute_model(drafts.model))


def _engine_option(spec: ExperimentSpec, side: SideSpec, name: str) -> Any:
    """Return the side's value where it has one, else the engines'; an empty mapping is a value."""
    value = getattr(side, name, None)
    if value is None:
        value = getattr(spec.engine, name)
    if name == "costs" and value:
        return absolute_model(value)
    if isinstance(value, dict):  # an engine has pairs, with numbers of layers as such
        return tuple(sorted((int(key) if key.isdecimal() else key, item) for key, item in value.items()))
    return tuple(value) if isinstance(value, list) else value


def absolute_model(model: str) -> str:
    """Return a local folder's absolute path, for workers that run in another directory."""
    folder = Path(model)
    return str(folder.resolve()) if folder.is_dir() else model


def _refusal(
    spec: ExperimentSpec, config: DecoderConfig, prefill: EngineConfig, decode: EngineConfig | None
) -> tuple[str | None, str | None]:
    """Tell who refuses a cell before it runs (model, rayk), and why; of vLLM's engines, vLLM is asked."""
    kinds = spec.kinds if decode is not None else spec.kinds[:1]
    if len(set(kinds)) > 1:
        return "rayk", f"{NO_HANDSHAKE}: prefill is {kinds[0]}, decode is {kinds[1]}"
    if kinds[0] == "vllm":
        is_proven = decode is None or not (is_divided(prefill) or is_divided(decode))
        return (None, None) if is_proven else ("rayk", PROVES_TP)
    for side, engine in (("prefill", prefill), ("decode", decode)):
        if engine is None:
            continue
        why = why_tp_unsupported(config, engine.tp)
        if why:
            return "model", f"{side}: {why}" if decode else why
        bad = bad_division(config, engine)
        if bad is not None:  # `specs.engines.check_division` refuses the spec
            return "model", f"{side}: {bad.problem}" if decode else bad.problem
        why = why_no_drafts(engine) or why_no_groups((engine,), config)
        if why:
            return "rayk", f"{side}: {why}" if decode else why
        if engine.layout != "auto":
            groups = engine_groups(engine, config)
            settings = engine.kernel_block_size, dict(engine.kernel_block_sizes), group_chunks(groups, config)
            rows = kernel_block_sizes(groups, *settings, engine.dcp)
            veto = partial(layout_veto, groups, kernel_block_sizes=rows, dcp=engine.dcp)
            try:
                resolve_layout(engine.layout, [("specs", veto)])
            except LayoutVetoed as error:
                return "rayk", str(replace(error, engine=side if decode else ""))
    return None, None


def why_no_groups(engines: Iterable[EngineConfig], config: DecoderConfig) -> str | None:
    """Say why the model's caches cannot be kept in an engine's KV format, or None."""
    try:
        for engine in engines:
            engine_groups(engine, config)
    except Unsupported as error:
        return str(error)
    return None


def _checks(spec: ExperimentSpec, config: DecoderConfig) -> tuple[str, ...]:
    if spec.checks is not None:
        return tuple(dict.fromkeys(spec.checks))
    exact = resolved_dtype(spec.dtype, config) == "float32" or spec.engine.compute == "paced"
    return ("tokens" if exact else "logprobs", "kv_bytes")


def verdict_of_fault(fault: FaultSpec, spec: ExperimentSpec) -> str:
    """Return the verdict that this fault must end a cell of this spec in; PASS of kinds that checks
    refuse."""
    if fault.expect is not None:
        return fault.expect
    return expected_of(fault, spec).verdict if is_known(fault) else "PASS"


def is_known(fault: FaultSpec) -> bool:
    """Tell whether the table of faults speaks of it."""
    return fault.kind in OTHERS or (fault.kind in TABLED and fault.point in (*POINTS, *REQUEST_POINTS))


def expected_of(fault: FaultSpec, spec: ExperimentSpec) -> ExpectedOutcome:
    """Return what must come of a fault that the table knows, whatever the spec expects."""
    policy, num_producers = spec.failure_policy, spec.prefill.num_engines
    if spec.mode == "aggregated":
        # Nobody else computes a lost prompt: but another engine, or another life of this one.
        policy = policy if policy == "migrate" else "fail"
    named = Fault(fault.kind, fault.point, fault.engine_role)
    found = expected(named, spec.transfer.mode, policy, num_producers)
    is_lost = fault.kind in ("kill", "kill_node", "stop") and fault.engine_role == "decode"
    if is_lost and fault.point != "handshake" and policy != "fail" and spec.decode.num_engines > 1:
        return ExpectedOutcome("PASS", is_recovered=True)  # another decode engine takes its requests
    return found


# --- names ----------------------------------------------------------------------------------------


def _axis_value(spec: ExperimentSpec, name: str) -> Any:
    if is_key(name):
        return axis_value(spec, name)
    value: Any = spec
    for part in name.split("."):
        value = getattr(value, part) if value is not None else None
    if value is None and name.startswith(("prefill.", "decode.")):
        side, _, leaf = name.partition(".")
        if leaf == "block_size":
            return spec.block_size_of(side)
        # A side's own value is absent: the shared one holds.
        shared: Any = spec if leaf in _OF_BOTH else spec.engine
        value = getattr(shared, leaf, None)
    if isinstance(value, list):
        return _plain_faults(value) if name == "faults" else value
    return value


def _plain_faults(faults: Iterable[FaultSpec]) -> list[dict[str, Any]]:
    """List faults as data, defaults included: equal where they mean the same."""
    return [fault.model_dump(exclude_none=True) for fault in faults]


_DEFAULTS = ExperimentSpec.model_validate({"model": "m", "prompts": {"file": "f"}})
_OF_BOTH = ("kv_dtype", "kv_scales")
"""Settings of a side that, where it has none of its own, the spec gives both sides."""
_IN_NAME = ("mode", "model", "prefill.tp", "decode.tp", "prefill.layout", "decode.layout")


def cell_id(axes: dict[str, Any]) -> str:
    """Return a readable name that depends on the cell's axes alone: `p1-d2-BHLNC-LBHNC`, `agg-tp4`.

    TP and layouts are always spelt out, other axes only where they differ from their default; where the model
    is an axis, its folder's name comes first.
    """
    prefill, decode = axes["prefill.tp"], axes["decode.tp"]
    layouts = [axes[k] for k in ("prefill.layout", "decode.layout") if axes[k] is not None]
    parts = [f"agg-tp{prefill}" if axes["mode"] == "aggregated" else f"p{prefill}-d{decode}"]
    if "model" in axes:
        parts.insert(0, short_name(axes["model"]))
    if set(layouts) != {"auto"}:
        parts += layouts
    for name, value in axes.items():
        side, _, leaf = name.partition(".")
        is_both = leaf in _OF_BOTH or is_key(leaf)
        inherits = side in ("prefill", "decode") and is_both and leaf in axes
        default = axes[leaf] if inherits else _axis_value(_DEFAULTS, name)
        if name in _IN_NAME or value is None or value == default:
            continue
        parts.append(f"{name}={_text(value)}")
    text = re.sub(r"[^A-Za-z0-9._=+-]", "_", "-".join(parts))
    if len(text) > 120:
        digest = hashlib.sha256(json.dumps(axes, sort_keys=True, default=str).encode()).hexdigest()
        text = f"{text[:107]}-{digest[:12]}"
    return text


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(_text(v) for v in value) or "none"
    if isinstance(value, dict):
        # A fault's kind and point say what they are, other values only with their keys.
        shown = {k: _text(v) for k, v in value.items() if (k, v) != ("seed", 0)}
        return ".".join(v if k in ("kind", "point") else f"{k}={v}" for k, v in shown.items())
    if isinstance(value, str) and re.search(r"[^A-Za-z0-9._=-]", value):
        # Paths and stop strings may differ in what a name cannot say.
        return f"{value}.{hashlib.sha256(value.encode()).hexdigest()[:8]}"
    return str(value).lower() if isinstance(value, bool) else str(value)
