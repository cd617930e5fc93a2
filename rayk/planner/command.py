"""Make the server of a plan, and the command that starts it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from rayk.models.config import DecoderConfig
from rayk.planner.candidates import Candidate
from rayk.planner.drafts import server_option, settings_of
from rayk.specs.cells import Cell
from rayk.specs.plan import PlanSpec
from rayk.specs.server_plan import ServerOptions, plan_server_of
from rayk.specs.serving import ServerSettings
from rayk.types.model_names import weights_name

SEARCHED = ("max_batch_tokens", "max_seqs", "num_blocks")
"""Engine options that a candidate says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedServer:
    """What a simulation runs: the server that the command starts."""

    cell: Cell
    settings: ServerSettings
    command: str


def planned_server(spec: PlanSpec, candidate: Candidate, config: DecoderConfig) -> PlannedServer:
    """Plan a candidate's server as `rayk serve` would. Raises UserError and Unsupported like it."""
    options = server_options(spec, candidate)
    plan = plan_server_of(options, config, device=spec.device)
    check_engines(plan.settings, candidate)
    return PlannedServer(cell=plan.cell, settings=plan.settings, command=command_of(options))


def server_options(spec: PlanSpec, candidate: Candidate) -> ServerOptions:
    """Say in the options of `rayk serve` what a candidate is."""
    f = candidate.family
    sides: dict[str, Any] = {"prefill_tp": f.prefill_tp, "num_prefill": candidate.num_prefill}
    if f.decode_tp is not None:
        sides |= {"decode_tp": f.decode_tp, "num_decode": candidate.num_decode}
    return ServerOptions(
        model=weights_name(spec.model),
        mode=f.mode,
        dtype=spec.dtype,
        device=spec.device,
        policy=candidate.policy,
        speculative_config=_speculative_config(spec, candidate),
        overrides=tuple(f"{key}={_written(value)}" for key, value in _overrides(spec, candidate).items()),
        **sides,
    )


def _speculative_config(spec: PlanSpec, candidate: Candidate) -> str | None:
    asked = spec.search.speculative
    wanted = None if asked is None else settings_of(asked, candidate.family.num_drafts)
    return None if wanted is None else server_option(wanted)


def _overrides(spec: PlanSpec, candidate: Candidate) -> dict[str, Any]:
    """List settings that options have no names for, by their keys in specs."""
    f = candidate.family
    found: dict[str, Any] = {"engine.max_batch_tokens": f.max_batch_tokens, "engine.max_seqs": f.max_seqs}
    if f.decode_blocks in (None, f.prefill_blocks):
        found["engine.num_blocks"] = f.prefill_blocks
    else:
        found |= {"prefill.num_blocks": f.prefill_blocks, "decode.num_blocks": f.decode_blocks}
    if f.block_size != 16:
        found["prefill.block_size"] = f.block_size
        if f.decode_tp is not None:
            found["decode.block_size"] = f.block_size
    if spec.kv_dtype != "auto":
        found["kv_dtype"] = spec.kv_dtype
    for section in ("engine", "transfer", "policy_settings"):
        if section == "transfer" and f.is_aggregated:
            continue
        given = getattr(spec, section).model_dump(exclude_unset=True)
        found |= {f"{section}.{name}": v for name, v in given.items() if name not in SEARCHED}
    return found


def _written(value: Any) -> str:
    """Write a value as YAML reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def command_of(options: ServerOptions) -> str:
    """Write the command that gives these options."""
    named = {
        "--mode": options.mode,
        "--prefill-tp": options.prefill_tp,
        "--num-prefill": options.num_prefill,
        "--decode-tp": options.decode_tp,
        "--num-decode": options.num_decode,
        "--dtype": None if options.dtype == "auto" else options.dtype,
        "--device": options.device,
        "--policy": options.policy,
        "--speculative-config": options.speculative_config,
    }
    words = ["rayk", "serve", options.model]
    for option, value in named.items():
        words += [] if value is None else [option, str(value)]
    for text in options.overrides:
        words += ["--set", text]
    return shlex.join(words)


def check_engines(settings: ServerSettings, candidate: Candidate) -> None:
    """Assert that a server has the engines of a candidate: a plan whose command starts others is none."""
    f = candidate.family
    sides: list[tuple[str, int, int | None, int | None]] = [
        (
            "aggregated" if f.is_aggregated else "prefill",
            candidate.num_prefill,
            f.prefill_tp,
            f.prefill_blocks,
        )
    ]
    if not f.is_aggregated:
        sides.append(("decode", candidate.num_decode, f.decode_tp, f.decode_blocks))
    for role, num, tp, blocks in sides:
        engines = [e.config for e in settings.engines if e.role == role]
        found = {
            (
                e.tp, e.num_blocks, e.block_size, e.max_batch_tokens, e.max_seqs,
                0 if e.speculative is None else e.speculative.num_tokens,
            )
            for e in engines
        }  # fmt: skip
        wanted = {(tp, blocks, f.block_size, f.max_batch_tokens, f.max_seqs, f.num_drafts)}
        assert (len(engines), found) == (num, wanted), (role, found, wanted)
    assert settings.policy == candidate.policy, settings.policy
