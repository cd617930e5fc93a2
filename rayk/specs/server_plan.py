"""Plans a server from its options, checked as an experiment's cell is: before any actor starts."""

from __future__ import annotations

import bisect
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayk.kv.groups import max_request_blocks
from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import drafts_by_mtp
from rayk.models.engine_pool import engine_pool
from rayk.models.families import load_config, read_config
from rayk.models.headers import check_weights
from rayk.models.hub import model_folder, pinned
from rayk.models.kv_specs import engine_groups
from rayk.specs.cells import Cell
from rayk.specs.checks import plan_cells
from rayk.specs.devices import check_device
from rayk.specs.engines import check_fits_device
from rayk.specs.experiment import dotted_keys
from rayk.specs.host_tier import check_machine, check_pools
from rayk.specs.load import load_spec, with_pinned_drafters
from rayk.specs.serving import ServerSettings, model_card, settings_of
from rayk.specs.vllm_drafts import draft_settings
from rayk.specs.vllm_engines import VLLM_ONLY
from rayk.types.config import EngineConfig
from rayk.types.errors import SpecError, Unsupported
from rayk.types.model_names import hub_name, short_name

SETTABLE = (
    "engine",
    "prefill",
    "decode",
    "transfer",
    "offload",
    "policy_settings",
    "speculative",
    "kv_dtype",
    "kv_scales",
    "placement",
    "gpus_per_worker",
)
"""Keys of an experiment, and sections of keys, that a server has too. What others say, it has options for."""


POOL_BYTES = 256 << 20
"""What a rank's cache takes, at most, where nobody gives a number of blocks; but DEFAULT_BLOCKS may take
more."""
DEFAULT_BLOCKS = 256
OF_CELLS = {
    "offload.keep": "a server has no cells: its host tier is there as long as it is",
    "engine.record_steps": "a server has no cells, with which steps are written down",
}
"""Keys that mean nothing to a server -> why."""
POOL_KEYS = ("engine.num_blocks", "prefill.num_blocks", "decode.num_blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """What somebody asks for, by the names of `rayk serve`'s options. None: not given."""

    model: str
    mode: str | None = None
    prefill_tp: int | Sequence[int] | None = None
    """TP size of every prefill engine, or of each."""
    decode_tp: int | Sequence[int] | None = None
    num_prefill: int | None = None
    num_decode: int | None = None
    prefill_pp: int | None = None
    """Pipeline stages of prefill engines."""
    decode_pp: int | None = None
    prefill_dcp: int | None = None
    """Ranks among which prefill engines deal a sequence's tokens."""
    decode_dcp: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    policy: str = "round_robin"
    failure_policy: str = "migrate"
    max_waiting: int = 512
    request_s: float = 600.0
    num_spares: int = 0
    overrides: tuple[str, ...] = ()
    """KEY=VALUE, of the keys in SETTABLE."""
    # What follows are vLLM's names of such options.
    served_model_name: str | None = None
    tensor_parallel_size: int | None = None
    """TP size of one aggregated engine, or of both sides of a disaggregated server."""
    max_model_len: int | None = None
    """Prompt and output of one request; None: the model's positions."""
    max_num_seqs: int | None = None
    kv_cache_dtype: str = "auto"
    pipeline_parallel_size: int | None = None
    """Stages of all engines, whatever the mode; likewise the next two."""
    decode_context_parallel_size: int | None = None
    cp_kv_cache_interleave_size: int | None = None
    speculative_config: str | Mapping[str, Any] | None = None
    """JSON, or what it stands for: of engines of both sides."""

    @property
    def resolved_mode(self) -> str:
        """Disaggregated if any side's size or number of engines is given."""
        given = [self.prefill_tp, self.decode_tp, self.num_prefill, self.num_decode]
        given += [self.prefill_pp, self.decode_pp, self.prefill_dcp, self.decode_dcp]
        return self.mode or ("aggregated" if all(v is None for v in given) else "disaggregated")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPlan:
    """A server that may be started: what its options say, checked once. The cluster it runs on then decides
    what `device: auto` is (`on_device`) and how workers share GPUs."""

    options: ServerOptions
    config: DecoderConfig
    settings: ServerSettings
    cell: Cell
    """The experiment's cell that has the server's policy, and its first engines."""

    def on_device(self, device: str) -> ServerSettings:
        """Return the settings where `auto` is `device`. Raises SpecError where an engine cannot run on
        that."""
        if self.options.device != "auto" or device == self.settings.device:
            return self.settings
        entries = self.settings.engines
        moved = tuple(replace(e, config=replace(e.config, device=device)) for e in entries)
        for entry in moved:
            side = "decode" if entry.role == "decode" else "prefill"
            check_fits_device(entry.config, lambda name, side=side: self._where(side, name))  # type: ignore[misc]
        return replace(self.settings, engines=moved)

    def _where(self, side: str, name: str) -> str:
        """Return the option that gives an engine's setting."""
        keys = [text.partition("=")[0].strip() for text in self.options.overrides]
        return _override_of(
            f"{side}.{name}" if f"{side}.{name}" in keys else f"engine.{name}", self.options.overrides
        )


def plan_server(options: ServerOptions, *, device: str | None = None, is_local: bool = True) -> ServerPlan:
    """Plan a server, everything checked that needs neither torch nor Ray.

    `is_local`: the engines run on this machine, and a device that it lacks is refused. `device` is what
    `auto` means: by default cuda when this machine has a GPU, else cpu; where engines run elsewhere it stays
    open.
    Raises UserError, and Unsupported where the model cannot run this way.
    """
    options = _in_own_names(options)
    options = replace(options, model=pinned(options.model))
    folder = model_folder(options.model)
    config = read_config(folder)
    name = hub_name(options.model)
    model = options.model if name is not None else str(folder.resolve())
    model_id = folder.resolve().name if name is None else name.repo
    device = device or (None if is_local else "auto")
    return _planned(options, config, (model, model_id), folder, device=device, is_local=is_local)


def plan_server_of(options: ServerOptions, config: DecoderConfig, *, device: str) -> ServerPlan:
    """Plan a server elsewhere, of a model whose config alone is known. Raises like `plan_server`."""
    options = _in_own_names(options)
    names = options.model, short_name(options.model)
    return _planned(options, config, names, None, device=device, is_local=False)


def _planned(
    options: ServerOptions,
    config: DecoderConfig,
    names: tuple[str, str],
    folder: Path | None,
    *,
    device: str | None,
    is_local: bool,
) -> ServerPlan:
    """`names`: the model's own, and the one that clients use if nobody says. `folder`: of its weights, which
    must be there if engines compute; None: nobody looks."""
    config = replace(config, max_positions=_max_model_len(options.max_model_len, config))
    _check_overrides(options.overrides)
    _check_sides(options)
    cells = [_plan_cell(options, config, tp_sizes, device) for tp_sizes in _tp_sizes(options)]
    if folder is not None and cells[0].prefill.has_weights:
        load_config(folder)
        check_weights(folder)
    if is_local:
        check_device(options.device, where="--device")
        check_machine(cells[0].spec.offload, lambda key: _override_of(key, options.overrides))
    for cell in cells:
        if cell.unsupported is not None:
            raise Unsupported(cell.unsupported)
    prefill = [_nth(cells, i).prefill for i in range(cells[0].num_prefill_engines)]
    decode = [d for i in range(cells[0].num_decode_engines) if (d := _nth(cells, i).decode) is not None]
    prefill, decode = (_with_pools(side, config, options.overrides) for side in (prefill, decode))
    if is_local:
        check_pools((*prefill, *decode), config, "the engines")
    model, model_id = names
    card = model_card(model, config, options.served_model_name or model_id)
    settings = settings_of(
        cells[0],
        replace(card, pool_tokens=_pool_tokens({*prefill, *decode}, config)),
        prefill,
        decode,
        max_waiting=options.max_waiting,
        request_s=options.request_s,
        num_spares=options.num_spares,
    )
    return ServerPlan(options=options, config=config, settings=settings, cell=cells[0])


def note_unused_tensors(plan: ServerPlan) -> str:
    """Return one line on what of the checkpoint a server does not use, or nothing. Raises CheckpointError
    where its weights are not those of its config.json. Needs torch, but not Ray, where they are read."""
    if not plan.settings.engines[0].config.has_weights:
        return ""
    from rayk.models.unused import note_unused

    mtp = any(drafts_by_mtp(entry.config) for entry in plan.settings.engines)
    return note_unused(model_folder(plan.options.model), plan.config, mtp=mtp)


_KEY_OF = {
    "max_num_seqs": "engine.max_seqs",
    "pipeline_parallel_size": "engine.pp",
    "decode_context_parallel_size": "engine.dcp",
    "cp_kv_cache_interleave_size": "engine.dcp_interleave",
    "prefill_pp": "prefill.pp",
    "decode_pp": "decode.pp",
    "prefill_dcp": "prefill.dcp",
    "decode_dcp": "decode.dcp",
}
"""Fields of ServerOptions that are another name of a key of specs."""


def _in_own_names(options: ServerOptions) -> ServerOptions:
    """Return the same without second names of what an experiment has a key for. Raises SpecError."""
    name, tp = options.served_model_name, options.tensor_parallel_size
    if name is not None and not re.fullmatch(r"[!-~]{1,200}", name):
        where = f"--served-model-name {name[:200]}"
        raise SpecError("a model's name has 1 to 200 visible ASCII characters", where=where)
    if tp is not None:
        if options.prefill_tp is not None or options.decode_tp is not None:
            where = f"--tensor-parallel-size {tp}"
            raise SpecError(
                "TP sizes are given twice", where=where, mend="--prefill-tp and --decode-tp alone"
            )
        mode = options.mode or "aggregated"
        decode_tp = tp if mode == "disaggregated" else None
        options = replace(options, mode=mode, prefill_tp=tp, decode_tp=decode_tp)
    given: dict[str, Any] = {"kv_dtype": _kv_dtype(options.kv_cache_dtype)}
    if options.speculative_config is not None:
        drafts = draft_settings(options.speculative_config)
        given |= {f"speculative.{key}": value for key, value in drafts.items()}
    given |= {key: getattr(options, name) for name, key in _KEY_OF.items()}
    sizes = dict.fromkeys(_KEY_OF)
    mode = options.mode or options.resolved_mode
    options = replace(options, mode=mode, kv_cache_dtype="auto", tensor_parallel_size=None, **sizes)  # type: ignore[arg-type]
    options = replace(options, speculative_config=None)
    for key, value in given.items():
        twice = [text for text in options.overrides if text.partition("=")[0].strip() == key]
        if value is not None and twice:
            raise SpecError(f"{key} is given twice", where=f"--set {twice[0]}", mend="give it once")
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            options = replace(options, overrides=(*options.overrides, f"{key}={text}"))
    return options


def _kv_dtype(vllm_name: str) -> str | None:
    """None: as the checkpoint says. Raises SpecError."""
    known = {"auto": None, "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "nvfp4": "nvfp4"}
    if vllm_name not in known:
        where = f"--kv-cache-dtype {vllm_name}"
        raise SpecError("no such format of KV", where=where, mend=f"one of {', '.join(known)}")
    return known[vllm_name]


def _max_model_len(given: int | None, config: DecoderConfig) -> int:
    """Bound prompt and output of one request. Raises SpecError."""
    if given is not None and not 2 <= given <= config.max_positions:
        problem = f"the model has {config.max_positions} positions"
        mend = f"2 to {config.max_positions}"
        raise SpecError(problem, where=f"--max-model-len {given}", mend=mend)
    return given or config.max_positions


def parse_tp_sizes(text: str | None, option: str) -> tuple[int, ...] | None:
    """Parse what an option like `2` or `1,2` says. Raises SpecError."""
    if text is None:
        return None
    sizes = text.split(",")
    if not all(size.isdecimal() and len(size) < 9 and int(size) for size in sizes):
        raise SpecError(
            problem="a TP size is a whole number above 0",
            where=f"{option} {text}",
            mend=f"{option} 2, or {option} 1,2 for one engine of each size",
        )
    return tuple(map(int, sizes))


def _plan_cell(
    options: ServerOptions,
    config: DecoderConfig,
    tp_sizes: tuple[int | None, int | None],
    device: str | None,
) -> Cell:
    """Plan the experiment's cell whose engines have these TP sizes, checked."""
    loaded = load_spec(_as_spec(options, *tp_sizes), list(options.overrides), source="options")
    loaded = with_pinned_drafters(loaded)
    if loaded.spec.matrix:
        key = next(iter(loaded.spec.matrix[0]))
        raise SpecError(problem=f"{key} has a list of values", where=f"--set {key}", mend="give one")
    ((cell, _),) = plan_cells(loaded, config, device=device)
    return cell


def _nth(cells: Sequence[Cell], i: int) -> Cell:
    """Choose the cell with the i-th engine of a role."""
    return cells[min(i, len(cells) - 1)]


def _tp_sizes(options: ServerOptions) -> list[tuple[int | None, int | None]]:
    """TP sizes of the i-th prefill and the i-th decode engine, as far as any differs from those before.
    Raises SpecError."""
    prefill = _sizes_of("prefill", options.prefill_tp, options.num_prefill, options.overrides)
    decode = _sizes_of("decode", options.decode_tp, options.num_decode, options.overrides)
    longest = max(len(prefill), len(decode))
    padded = (sizes + sizes[-1:] * (longest - len(sizes)) for sizes in (prefill, decode))
    return list(zip(*padded, strict=True))


def _sizes_of(
    side: str, tp: int | Sequence[int] | None, num_engines: int | None, overrides: Sequence[str]
) -> tuple[int | None, ...]:
    """List the TP sizes of a role's engines; one where they are alike."""
    if tp is None or isinstance(tp, int):
        return (tp,)
    if len(tp) == 1:
        return (tp[0],)
    where = f"--{side}-tp {','.join(map(str, tp))}"
    if not tp or num_engines not in (None, len(tp)):
        raise SpecError(
            problem=f"{len(tp)} TP sizes for {num_engines or 'any number of'} engines",
            where=where,
            mend=f"one size for each engine, without --num-{side}, or one for all",
        )
    for text in overrides:
        if text.startswith((f"{side}.tp=", f"{side}.num_engines=")):
            raise SpecError(problem=f"{where} says that", where=f"--set {text}", mend="give one of the two")
    return tuple(tp)


def _with_pools(
    engines: Sequence[EngineConfig], config: DecoderConfig, overrides: Sequence[str]
) -> list[EngineConfig]:
    """Give engines pools that hold twice `max_seqs` requests of all the model's positions, as far as
    POOL_BYTES allow, where nobody gave a number of blocks."""
    if any(text.startswith(f"{key}=") for text in overrides for key in POOL_KEYS):
        return list(engines)
    return [_with_pool(engine, config) for engine in engines]


def _with_pool(engine: EngineConfig, config: DecoderConfig) -> EngineConfig:
    few = replace(engine, num_blocks=2)
    ranks = engine_pool(few, config)
    num_behind = ranks[0].num_blocks - few.num_blocks
    fitting = POOL_BYTES // max(rank.block_bytes for rank in ranks) - num_behind
    each = max_request_blocks(engine_groups(engine, config), config.max_positions, engine.max_batch_tokens)
    # As many again for those that wait to be handed over, or are handed over just now.
    enough = 2 * each * engine.max_seqs + 1
    return replace(engine, num_blocks=min(enough, max(DEFAULT_BLOCKS, fitting)))


def _pool_tokens(engines: Iterable[EngineConfig], config: DecoderConfig) -> int | None:
    """Find ModelCard.pool_tokens of these engines."""
    found = config.max_positions
    for engine in engines:
        groups = engine_groups(engine, config)
        numbers = range(1, found + 1)
        # The last token is never fed back: it needs no place.
        found = bisect.bisect_right(
            numbers,
            engine.num_blocks - 1,
            key=lambda n, e=engine, g=groups: max_request_blocks(g, max(1, n - 1), e.max_batch_tokens),  # type: ignore[misc]
        )
    return found if found < config.max_positions else None


def _as_spec(options: ServerOptions, prefill_tp: int | None, decode_tp: int | None) -> dict[str, Any]:
    """Return the experiment of one cell whose engines are the server's. Its one prompt is never run."""
    return {
        "name": "serve",
        "model": options.model,
        "dtype": options.dtype,
        "device": options.device,
        "mode": options.resolved_mode,
        "policy": options.policy,
        "failure_policy": options.failure_policy,
        "prefill": _side(prefill_tp, _num_engines(options.prefill_tp, options.num_prefill)),
        "decode": _side(decode_tp, _num_engines(options.decode_tp, options.num_decode)),
        "prompts": {"random": {"count": 1, "input_tokens": [1]}},
        "sampling": {"max_tokens": 1},
        "checks": ["kv_bytes"],  # logprobs, which other checks ask for, are no server's
    }


def _num_engines(tp: int | Sequence[int] | None, given: int | None) -> int | None:
    """A list of several TP sizes counts them."""
    return len(tp) if isinstance(tp, Sequence) and len(tp) > 1 else given


def _side(tp: int | None, num_engines: int | None) -> dict[str, int]:
    given = {"tp": tp, "num_engines": num_engines}
    return {name: value for name, value in given.items() if value is not None}


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse keys that mean nothing to a server. Raises SpecError."""
    of_vllm = tuple(f".{name}" for name in ("kind", *VLLM_ONLY))
    valid = [key for key in dotted_keys() if key.split(".")[0] in SETTABLE and key not in OF_CELLS]
    valid = [key for key in valid if not key.endswith(of_vllm)]
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in OF_CELLS:
            raise SpecError(problem=OF_CELLS[key], where=f"--set {text}", mend="leave it out")
        if key.endswith(of_vllm) and key in dotted_keys():
            raise SpecError(
                problem="a server's engines are rayk's own",
                where=f"--set {text}",
                mend="`vllm serve` with the proving connector, or `rayk run` with engine.kind: vllm",
            )
        if "=" in text and key not in valid:
            # The right word in the wrong section comes before a like word.
            close = [name for name in valid if name.split(".")[-1] == key.split(".")[-1]]
            close = close or difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
            named = " or ".join(map(repr, close))
            mend = f"did you mean {named}?" if close else f"valid: {', '.join(valid)}"
            raise SpecError(problem=f"a server has no key {key!r}", where=f"--set {text}", mend=mend)


def _override_of(key: str, overrides: Sequence[str]) -> str:
    """Return the last that gives a key, which is the one that counts."""
    return f"--set {next(t for t in reversed(overrides) if t.partition('=')[0].strip() == key)}"


def _check_sides(options: ServerOptions) -> None:
    """Refuse settings of decode engines, and of transfers, of a server that has none. Raises SpecError."""
    if options.resolved_mode != "aggregated":
        return
    given = ["--decode-tp"] * (options.decode_tp is not None)
    given += [f"--num-decode {options.num_decode}"] * (options.num_decode is not None)
    given += [f"--set {text}" for text in options.overrides if text.startswith(("decode.", "transfer."))]
    if given:
        raise SpecError(
            problem="an aggregated server has no decode engines and transfers nothing",
            where=given[0],
            mend="--prefill-tp and --num-prefill are its engines'; or --mode disaggregated",
        )
