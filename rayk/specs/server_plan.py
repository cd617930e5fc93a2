"""What a server is asked to be, checked as an experiment's cell is: before any actor starts."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayk.kv.geometry import plan_rank
from rayk.kv.layout import LAYOUTS
from rayk.kv.manager import KVCacheManager
from rayk.models.config import DecoderConfig
from rayk.models.families import load_config
from rayk.models.headers import check_weights
from rayk.models.kv_specs import engine_groups
from rayk.specs.cells import Cell
from rayk.specs.checks import plan_cells
from rayk.specs.devices import check_device
from rayk.specs.experiment import dotted_keys
from rayk.specs.load import load_spec
from rayk.specs.serving import ServerSettings, model_card, settings_of
from rayk.types.config import EngineConfig
from rayk.types.errors import SpecError, Unsupported

SETTABLE = (
    "engine",
    "prefill",
    "decode",
    "transfer",
    "policy_settings",
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
POOL_KEYS = ("engine.num_blocks", "prefill.num_blocks", "decode.num_blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """What somebody asks for, by the names of `rayk serve`'s options. None: not given."""

    model: str
    mode: str | None = None
    prefill_tp: int | None = None
    decode_tp: int | None = None
    num_prefill: int | None = None
    num_decode: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    policy: str = "round_robin"
    failure_policy: str = "migrate"
    max_waiting: int = 512
    request_s: float = 600.0
    num_spares: int = 0
    overrides: tuple[str, ...] = ()
    """KEY=VALUE, of the keys in SETTABLE."""

    @property
    def resolved_mode(self) -> str:
        """Disaggregated if any TP size or number of engines is given."""
        given = (self.prefill_tp, self.decode_tp, self.num_prefill, self.num_decode)
        return self.mode or ("aggregated" if all(v is None for v in given) else "disaggregated")


def plan_server(
    options: ServerOptions, *, device: str | None = None, is_local: bool = True
) -> ServerSettings:
    """A server's settings, everything checked that needs neither torch nor Ray.

    `device` is what `auto` means (default: cuda when this machine has a GPU, else cpu); `is_local`: the
    engines run on this machine, and a device that it lacks is refused. Raises UserError, and Unsupported
    where the model cannot run this way.
    """
    config = load_config(options.model)
    check_weights(Path(options.model))
    _check_overrides(options.overrides)
    _check_sides(options)
    loaded = load_spec(_as_spec(options), list(options.overrides), source="options")
    if loaded.spec.matrix:
        key = next(iter(loaded.spec.matrix[0]))
        raise SpecError(problem=f"{key} has a list of values", where=f"--set {key}", mend="give one")
    ((cell, _),) = plan_cells(loaded, config, device=device)
    if is_local:
        check_device(options.device, where="--device")
    if cell.unsupported is not None:
        raise Unsupported(cell.unsupported)
    folder = Path(options.model).resolve()
    cell = _with_pools(cell, config, options.overrides)
    return settings_of(
        cell,
        replace(model_card(str(folder), config, folder.name), pool_tokens=_pool_tokens(cell, config)),
        max_waiting=options.max_waiting,
        request_s=options.request_s,
        num_spares=options.num_spares,
    )


def _with_pools(cell: Cell, config: DecoderConfig, overrides: Sequence[str]) -> Cell:
    """Pools that hold twice `max_seqs` requests of all the model's positions, as far as POOL_BYTES allow,
    where nobody gave a number of blocks."""
    if any(text.startswith(f"{key}=") for text in overrides for key in POOL_KEYS):
        return cell
    decode = None if cell.decode is None else _with_pool(cell.decode, config)
    return replace(cell, prefill=_with_pool(cell.prefill, config), decode=decode)


def _with_pool(engine: EngineConfig, config: DecoderConfig) -> EngineConfig:
    groups = engine_groups(engine, config)
    layout = LAYOUTS["BLHNC" if engine.layout == "auto" else engine.layout]
    rank = plan_rank(groups, layout, tp_size=engine.tp, tp_rank=0, num_blocks=DEFAULT_BLOCKS)
    each = KVCacheManager(groups, DEFAULT_BLOCKS).max_request_blocks(
        config.max_positions, engine.max_batch_tokens
    )
    # As many again for those that wait to be handed over, or are handed over just now.
    wanted = 2 * each * engine.max_seqs + 1
    return replace(engine, num_blocks=min(wanted, max(DEFAULT_BLOCKS, POOL_BYTES // rank.block_bytes)))


def _pool_tokens(cell: Cell, config: DecoderConfig) -> int | None:
    """See ModelCard.pool_tokens."""
    engines = [cell.prefill] if cell.decode is None else [cell.prefill, cell.decode]
    found = config.max_positions
    for engine in engines:
        manager = KVCacheManager(engine_groups(engine, config), engine.num_blocks)
        numbers = range(1, found + 1)
        # The last token is never fed back: it needs no place.
        found = bisect.bisect_right(
            numbers,
            engine.num_blocks - 1,
            key=lambda n, e=engine, m=manager: m.max_request_blocks(max(1, n - 1), e.max_batch_tokens),  # type: ignore[misc]
        )
    return found if found < config.max_positions else None


def _as_spec(options: ServerOptions) -> dict[str, Any]:
    """The experiment of one cell whose engines are the server's. Its one prompt is never run."""
    return {
        "name": "serve",
        "model": options.model,
        "dtype": options.dtype,
        "device": options.device,
        "mode": options.resolved_mode,
        "policy": options.policy,
        "failure_policy": options.failure_policy,
        "prefill": _side(options.prefill_tp, options.num_prefill),
        "decode": _side(options.decode_tp, options.num_decode),
        "prompts": {"random": {"count": 1, "input_tokens": [1]}},
        "sampling": {"max_tokens": 1},
    }


def _side(tp: int | None, num_engines: int | None) -> dict[str, int]:
    given = {"tp": tp, "num_engines": num_engines}
    return {name: value for name, value in given.items() if value is not None}


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse keys that mean nothing to a server. Raises SpecError."""
    valid = [key for key in dotted_keys() if key.split(".")[0] in SETTABLE]
    for text in overrides:
        key = text.partition("=")[0].strip()
        if "=" in text and key not in valid:
            close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
            mend = f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"
            raise SpecError(problem=f"a server has no key {key!r}", where=f"--set {text}", mend=mend)


def _check_sides(options: ServerOptions) -> None:
    """Refuse settings of decode engines, and of transfers, of a server that has none. Raises SpecError."""
    if options.resolved_mode != "aggregated":
        return
    given = [f"--decode-tp {options.decode_tp}"] * (options.decode_tp is not None)
    given += [f"--num-decode {options.num_decode}"] * (options.num_decode is not None)
    given += [f"--set {text}" for text in options.overrides if text.startswith(("decode.", "transfer."))]
    if given:
        raise SpecError(
            problem="an aggregated server has no decode engines and transfers nothing",
            where=given[0],
            mend="--prefill-tp and --num-prefill are its engines'; or --mode disaggregated",
        )
