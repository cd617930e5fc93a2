"""What a server is made of: its engines, its limits, and what becomes of requests whose engines are lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rayk.models.config import DecoderConfig
from rayk.sched.dispatcher import DispatchRules
from rayk.sched.policy import PolicySettings
from rayk.sched.request_describer import new_secret
from rayk.specs.cells import MAX_STREAMS, Cell
from rayk.specs.experiment import OffloadSpec, TransferSpec
from rayk.types.config import EngineConfig
from rayk.types.fault_table import FailurePolicy
from rayk.types.serving import ModelCard

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Pauses before each try to form a server's lost engine again; the last one for all that follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEntry:
    """One engine of a server."""

    name: str
    """prefill0, decode1, ..."""
    role: str
    """aggregated, prefill or decode; the latter two may be exchanged while it runs."""
    config: EngineConfig
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes it may be on, in the words of Ray's label selectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """One server. All of its engines are aggregated, or none."""

    model: ModelCard
    engines: tuple[EngineEntry, ...]
    policy: str = "round_robin"
    policy_settings: PolicySettings = PolicySettings()
    failure_policy: FailurePolicy = "migrate"
    """Of requests whose engine or transfer is lost: fail ends them; recompute has the decode engine go on by
    itself where a transfer fails; migrate places them again, behind what was delivered. A lost engine's
    requests are placed again by both."""
    transfer: TransferSpec = TransferSpec()
    offload: OffloadSpec = OffloadSpec()
    placement: str = "auto"
    gpus_per_worker: float | Literal["auto"] = 1.0
    num_spares: int = 0
    """Idle workers, each ready to take a lost one's place."""
    max_running: int | None = None
    """Requests on engines at once; None: twice the rows of the engines that decode."""
    max_waiting: int = 512
    """Requests that wait for a place at once."""
    max_attempts: int = 8
    """Times one request is placed."""
    request_s: float = 600.0
    """A request lasts no longer."""
    transfer_s: float = 30.0
    hang_s: float = 15.0
    """An engine whose loop stands still for so long is killed and formed again. Longer than any step."""
    front_s: float = 15.0
    """A front that was not heard of for so long is gone: its requests are aborted."""
    prefix_secret: bytes = field(default_factory=new_secret, repr=False, compare=False)
    """Shared by its fronts: what prompts' prefixes are digested with (sched.request_describer)."""

    def __post_init__(self) -> None:
        names, roles = [e.name for e in self.engines], {e.role for e in self.engines}
        assert len(set(names)) == len(names), f"engines share a name: {names}"
        assert roles in ({"aggregated"}, {"prefill", "decode"}), f"nobody does all of a request: {roles}"

    def max_places(self, engines: Iterable[tuple[str, EngineConfig]]) -> int:
        """Tell how many requests may have a place at once on these engines, each with its role of now."""
        if self.max_running is not None:
            return self.max_running
        # Twice its rows: while some decode, others are prefilled and handed over.
        return sum(min(2 * config.max_seqs, MAX_STREAMS) for role, config in engines if role != "prefill")

    @property
    def dispatch_rules(self) -> DispatchRules:
        """What its dispatcher goes by."""
        return DispatchRules(
            hands_over=not self.is_aggregated, max_waiting=self.max_waiting, pauses_s=PAUSES_S
        )

    @property
    def is_aggregated(self) -> bool:
        """Whether every engine does all of a request."""
        return self.engines[0].role == "aggregated"

    @property
    def num_workers(self) -> int:
        """Workers of all engines and spares."""
        return sum(e.config.num_ranks for e in self.engines) + self.num_spares

    @property
    def device(self) -> str:
        """cpu or cuda, of all engines."""
        return self.engines[0].config.device


def model_card(folder: str, config: DecoderConfig, model_id: str) -> ModelCard:
    """Return what fronts need to know of a checkpoint."""
    return ModelCard(
        model_id=model_id,
        folder=folder,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
    )


def cell_engines(cell: Cell) -> list[EngineEntry]:
    """Name a cell's engines: prefill0, ..., decode0, ..."""
    role, decode = "aggregated" if cell.decode is None else "prefill", cell.decode
    found = [
        EngineEntry(name=f"prefill{i}", role=role, config=cell.prefill)
        for i in range(cell.num_prefill_engines)
    ]
    if decode is not None:
        names = [f"decode{i}" for i in range(cell.num_decode_engines)]
        found += [EngineEntry(name=name, role="decode", config=decode) for name in names]
    return found


def cell_rules(cell: Cell, restarts: frozenset[str]) -> DispatchRules:
    """Return what the dispatcher of a cell goes by. `restarts`: engines that are formed again, each once."""
    return DispatchRules(
        hands_over=cell.decode is not None,
        places_at_once=True,
        restarts=restarts,
        failure_policy=cell.spec.failure_policy,
    )


def settings_of(
    cell: Cell,
    model: ModelCard,
    prefill: Sequence[EngineConfig],
    decode: Sequence[EngineConfig],
    **others: Any,
) -> ServerSettings:
    """Return a server with the policies and transfers of an experiment's cell, and these engines, which have
    passed a cell's checks; aggregated without decode engines.

    `others`: fields of ServerSettings that a cell does not have.
    """
    role = "prefill" if decode else "aggregated"
    engines = [
        EngineEntry(name=f"prefill{i}", role=role, config=config, node_labels=cell.spec.prefill.node_labels)
        for i, config in enumerate(prefill)
    ]
    engines += [
        EngineEntry(name=f"decode{i}", role="decode", config=config, node_labels=cell.spec.decode.node_labels)
        for i, config in enumerate(decode)
    ]
    own: dict[str, Any] = {
        "policy": cell.policy,
        "policy_settings": cell.policy_settings,
        "failure_policy": cell.failure_policy,
        "transfer": cell.spec.transfer,
        "offload": cell.spec.offload,
        "placement": cell.spec.placement,
        "gpus_per_worker": cell.gpus_per_worker,
    }
    return ServerSettings(model=model, engines=tuple(engines), **(own | others))
