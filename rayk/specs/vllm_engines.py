"""vLLM's engines in a spec: their configurations, what of a spec they heed, and the order of cells that keeps
them alive."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from rayk.models.config import DecoderConfig
from rayk.specs.experiment import ExperimentSpec
from rayk.types.config import EngineConfig, EngineOptions, VllmEngineConfig

ENGINES_KEPT = 4
"""vLLM's engines alive at once. Those that the next cell does not use stay until there are more: starting one
takes a minute."""
MAX_MODEL_LEN = 1024
"""Tokens of a sequence, unless engine.vllm says max_model_len: memory is reserved for them."""
NO_HANDSHAKE = "rayk and vLLM have no common handshake"
PROVES_TP = (
    "rayk proves what vLLM's engines of tensor parallelism alone hand over, not stages or dealt tokens"
)

VLLM_ONLY = ("python", "vllm", "connector", "connector_options")
"""Settings of engines that rayk's own do not heed."""
SHARED_OPTIONS = ("prefix_caching", "pp", "pp_layers", "dcp", "dcp_interleave")
"""Options of rayk's engines that vLLM's heed, too."""
RAYK_ONLY = (
    *(f"engine.{option.name}" for option in fields(EngineOptions) if option.name not in SHARED_OPTIONS),
    "kv_scales",
    "speculative",
    "policy",
    "failure_policy",
    "policy_settings",
    "offload",
    "placement",
    *(f"transfer.{name}" for name in ("staging", "staging_mib", "push_layers", "path", "lease_s")),
)
"""Keys and sections that vLLM's engines do not heed. Of `engine`, the sides' own values likewise."""


def is_unheeded(name: str, kinds: Sequence[str]) -> bool:
    """Tell whether engines of these kinds pass over an axis. Sides of unlike kind, which have no hand-over,
    heed what either does."""
    section, _, leaf = name.partition(".")
    if section in ("engine", "prefill", "decode") and leaf in VLLM_ONLY:
        return "vllm" not in kinds
    if section in ("prefill", "decode"):
        name = leaf if leaf == "kv_scales" or leaf.startswith("speculative.") else f"engine.{leaf}"
    return "rayk" not in kinds and any(name == key or name.startswith(f"{key}.") for key in RAYK_ONLY)


def vllm_engines(
    spec: ExperimentSpec, engines: Mapping[str, EngineConfig], config: DecoderConfig
) -> tuple[VllmEngineConfig, ...]:
    """Configure a cell whose engines are all vLLM's; `engines`: each side as rayk would run it."""
    return tuple(_engine(spec, side, engine, config) for side, engine in engines.items())


def is_divided(engine: EngineConfig) -> bool:
    """Tell whether more than heads is divided over its ranks."""
    return engine.pp > 1 or engine.dcp > 1


def _engine(spec: ExperimentSpec, side: str, engine: EngineConfig, config: DecoderConfig) -> VllmEngineConfig:
    own = getattr(spec, side)
    arguments = {**spec.engine.vllm, **(own.vllm or {})}
    longest = arguments.get("max_model_len", min(MAX_MODEL_LEN, config.max_positions))
    return VllmEngineConfig(
        # Not resolved: the interpreter of a virtual environment is a link, and its place says which it is.
        python=os.path.abspath(own.python or spec.engine.python),  # noqa: PTH100
        model=engine.model,
        tp=engine.tp,
        pp=engine.pp,
        pp_layers=engine.pp_layers,
        dcp=engine.dcp,
        dcp_interleave=engine.dcp_interleave,
        dtype=engine.dtype,
        device=engine.device,
        kv_dtype=engine.kv_dtype,
        layout=own.layout,
        block_size=own.block_size,
        max_tokens=longest if type(longest) is int else MAX_MODEL_LEN,
        prefix_caching=engine.prefix_caching,
        # Nothing is handed over where one engine does all.
        connector="" if is_divided(engine) and spec.mode == "aggregated" else spec.engine.connector,
        transfer_mode=spec.transfer.mode,
        connector_options=_as_json(spec.engine.connector_options),
        arguments=_as_json(arguments),
    )


def _as_json(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((key, json.dumps(value, sort_keys=True)) for key, value in sorted(values.items()))


class Kept:
    """The engines that a run keeps alive: at most `most`, the least recently used stop first."""

    def __init__(self, most: int = ENGINES_KEPT) -> None:
        self._most = most
        self._alive: list[VllmEngineConfig] = []  # least recently used first

    def missing(self, needed: Sequence[VllmEngineConfig]) -> int:
        """Say how many of a cell's engines are not alive."""
        return (Counter(needed) - Counter(self._alive)).total()

    def use(self, needed: Sequence[VllmEngineConfig]) -> int:
        """Have a cell's engines alive; returns how many start for it."""
        num_starts = self.missing(needed)
        for engine in needed:
            if engine in self._alive:
                self._alive.remove(engine)
        self._alive = [*self._alive[max(0, len(self._alive) + len(needed) - self._most) :], *needed]
        return num_starts


def in_order(needs: Sequence[Sequence[VllmEngineConfig]]) -> Iterator[int]:
    """Yield the indexes of cells, from the engines that each needs, so that cells that share engines follow
    each other: next are always those for which fewest engines start, and of these those with most engines
    alive. Cells that need none come first, and cells that need the same stay in the order of the file."""
    alike: dict[tuple[VllmEngineConfig, ...], list[int]] = {}
    for index, needed in enumerate(needs):
        alike.setdefault(tuple(needed), []).append(index)
    kept = Kept()
    while alike:
        chosen = min(alike, key=lambda needed: (kept.missing(needed), kept.missing(needed) - len(needed)))
        kept.use(chosen)
        yield from alike.pop(chosen)


def num_starts(needs: Sequence[Sequence[VllmEngineConfig]]) -> int:
    """Say how many engines start when cells run in this order."""
    kept = Kept()
    return sum(kept.use(needed) for needed in needs)
