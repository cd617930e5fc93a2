"""Plans a run from its spec: cells and prompts, checked before anything starts, without torch or Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rayk.actors.environment import check_address, wanted_address
from rayk.experiments.checkpoints import write_checkpoints
from rayk.experiments.vllm_python import known_refusal, vllm_versions
from rayk.models.config import DecoderConfig
from rayk.models.families import load_config, read_config
from rayk.models.headers import check_weights
from rayk.models.hub import model_folder, pinned
from rayk.oracle.files import input_hashes
from rayk.reports.folder import check_directory
from rayk.specs import Cell, LoadedSpec, dump_spec, renew_spec
from rayk.specs.cells import expand_matrix
from rayk.specs.checks import check_cells
from rayk.specs.devices import check_device
from rayk.specs.engines import check_cell_device, with_compared_weights
from rayk.specs.host_tier import check_machine, check_pools
from rayk.specs.load import with_models
from rayk.specs.vllm_engines import in_order
from rayk.types.model_names import hub_name

PlannedCell = tuple[Cell, list[list[int]]]  # a cell with its prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentPlan:
    """A run that may start. Planned once; only the cluster that it runs on decides what `device: auto` is."""

    loaded: LoadedSpec
    yaml: str  # the resolved spec
    out: Path
    resume: bool
    configs: Mapping[str, DecoderConfig]  # by model
    inputs: Mapping[str, str]  # hashes of the checkpoints and prompt files
    cells: tuple[PlannedCell, ...]
    idle_rules: tuple[int, ...]
    """Indexes of the exclude rules that match no cell."""
    vllm_versions: Mapping[str, str] = field(default_factory=dict)
    """Interpreter of vLLM's environment -> its vLLM; empty where the engines run on another machine."""

    planned_ns: int = field(default_factory=time.monotonic_ns)
    """When it was made, by the monotonic clock."""

    @property
    def weights(self) -> tuple[str, ...]:
        """The models whose weights some engine reads."""
        return models_with_weights(cell for cell, _ in self.cells)

    def on_device(self, device: str) -> ExperimentPlan:
        """Return the plan where `auto` is `device`. Raises SpecError where an engine cannot run on that."""
        cells = [(cell.on_device(device), prompts) for cell, prompts in self.cells]
        for cell, _ in cells:
            if cell.unsupported is None and not cell.vllm:
                check_cell_device(cell, self.loaded)
        return replace(self, cells=tuple(cells))


def plan_experiment(
    loaded: LoadedSpec,
    out: str | Path,
    *,
    address: str | None = None,
    resume: bool = False,
    tell: Callable[[str], None],
) -> ExperimentPlan:
    """Write the spec's checkpoints that are missing, telling of each, then plan and check every cell. Raises
    UserError."""
    cluster = wanted_address(address)
    write_checkpoints(loaded, tell)
    loaded = _with_pinned_models(loaded, tell)
    spec = loaded.spec
    folders = {name: model_folder(name) for name in spec.models()}
    configs = {name: read_config(folder) for name, folder in folders.items()}
    # Of a cluster that is not this machine's it is not known yet which devices it has.
    expansion = expand_matrix(spec, configs, device=None if cluster is None else "auto")
    for name in models_with_weights(expansion.cells):
        load_config(folders[name])
        check_weights(folders[name])
    cells = check_cells(expansion.cells, loaded, configs, tokenizer_loader=_load_tokenizer)
    cells = [
        (with_compared_weights(cell, configs[cell.spec.model], loaded), prompts) for cell, prompts in cells
    ]
    if cluster is None:
        for cell, _ in cells:
            check_device(cell.spec.device, where=loaded.where("device"))
            check_machine(cell.spec.offload, loaded.where)
            if cell.unsupported is None and not cell.vllm:
                check_pools(cell.all_engines, configs[cell.spec.model], loaded.where("engine.num_blocks"))
    versions = vllm_versions([cell for cell, _ in cells], loaded) if cluster is None else {}
    cells = [(known_refusal(cell, configs[cell.spec.model], versions), prompts) for cell, prompts in cells]
    drafters = {name: model_folder(name) for name in spec.drafters()}
    inputs, yaml = input_hashes(folders | drafters, spec.prompt_files()), dump_spec(spec)
    check_directory(out, yaml, resume=resume, inputs=inputs, renew=renew_spec)
    if cluster is not None:
        check_address(cluster)
    return ExperimentPlan(
        loaded=loaded,
        yaml=yaml,
        out=Path(out),
        resume=resume,
        configs=configs,
        inputs=inputs,
        cells=tuple(cells),
        idle_rules=expansion.idle_rules,
        vllm_versions=versions,
    )


def _with_pinned_models(loaded: LoadedSpec, tell: Callable[[str], None]) -> LoadedSpec:
    """Fetch models of the hub, those that draft included, and name each with its commit, in the resolved spec
    and all that follows."""
    names = {name: pinned(name) for name in (*loaded.spec.models(), *loaded.spec.drafters())}
    for pin in names.values():
        if hub_name(pin) is not None:
            tell(f"model {pin}: {model_folder(pin)}")
    return with_models(loaded, names)


def models_with_weights(cells: Iterable[Cell]) -> tuple[str, ...]:
    """List the models whose weights engines of these cells read, each once."""
    return tuple(dict.fromkeys(cell.spec.model for cell in cells if cell.prefill.has_weights))


def in_running_order(cells: Sequence[PlannedCell]) -> list[PlannedCell]:
    """List cells as they run: those that share engines of vLLM's follow each other."""
    return [cells[index] for index in in_order([cell.vllm_engines for cell, _ in cells])]


def _load_tokenizer(model: str) -> Any:
    from rayk.actors.tokenizer import load_encoder

    return load_encoder(model)
