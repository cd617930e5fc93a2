"""Keep a machine's cost tables in a folder: a JSON file per kind of engine, and one of what they share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rayk.costs.stored import as_json, read
from rayk.costs.table import EngineCosts, EngineKey, GapTable, HostTable, TransferTable, engine_key
from rayk.models.config import DecoderConfig
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from rayk.types.files import parse_json, read_text, write_atomically

VERSION = 3
"""Files of version 2 know of no drafts, which is what those say that lack them. Files of version 1 tell of a
host, and not of each engine, what steps lose to neighbours."""
READ = (2, VERSION)
FILE_BYTES = 4 << 20
SHARED = ("transfers", "gaps", "host", "provenance", "validated")
"""Files that are of no one engine."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What the tables come from."""

    machine: str = ""
    cpu: str = ""
    num_cores: int = 0
    packages: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    runs: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()  # those fitted: a validation refuses them


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """How far predictions from the tables were off when they were last held against runs."""

    num_cells: int = 0  # 0: they never were
    within: Mapping[str, float] = field(default_factory=dict)
    """Metric -> the share of the measured by which half of the cells were off at the most."""
    date: str = ""
    folder: str = ""  # of the validation


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBook:
    engines: Mapping[EngineKey, EngineCosts] = field(default_factory=dict)
    transfers: TransferTable = field(default_factory=TransferTable)
    gaps: GapTable = field(default_factory=GapTable)
    host: HostTable = field(default_factory=HostTable)
    provenance: Provenance = field(default_factory=Provenance)
    validated: Validated = field(default_factory=Validated)
    any_engine: EngineCosts | None = None
    """In place of `engines`, the costs of every engine: for tests."""
    folder: str = ""  # where it was read from

    @classmethod
    def flat(cls, step_ns: float, token_ns: float = 0.0, **others: Any) -> CostBook:
        """Make a book of `EngineCosts.flat` for every engine: for tests."""
        return cls(any_engine=EngineCosts.flat(step_ns, token_ns), folder="flat", **others)

    @property
    def is_measured(self) -> bool:
        costs = [*self.engines.values(), *([self.any_engine] if self.any_engine else [])]
        return all(c.is_measured for c in costs)

    def of_engine(self, config: DecoderConfig, engine: EngineConfig) -> EngineCosts:
        """Find the costs of an engine of this model. Raises UserError, also where it drafts and nobody
        measured what that takes."""
        found = self.find(engine_key(config, engine))
        try:
            found.turns_of(engine.speculative)
        except UserError as error:
            raise UserError(error.problem, where=self.folder or "costs", mend=error.mend) from error
        return found

    def find(self, key: EngineKey) -> EngineCosts:
        """Find an engine's costs. Raises UserError naming the most alike engine and what differs."""
        found = self.any_engine or self.engines.get(key)
        if found is not None:
            return found
        nearest = max(self.engines, key=lambda other: _num_alike(key, other), default=None)
        raise UserError(
            problem=f"no costs of {key.text}" + (f"; of {_unlike(key, nearest)}" if nearest else ""),
            where=self.folder or "costs",
            mend="measure them with `rayk costs`",
        )

    @classmethod
    def load(cls, path: str | Path) -> CostBook:
        """Read a folder that `save` or `rayk costs` wrote. Raises UserError."""
        folder = Path(path)
        files = sorted(folder.glob("*.json")) if folder.is_dir() else []
        if not files:
            raise UserError("no cost tables here", where=str(path), mend="write them with `rayk costs`")
        engines = [_read(EngineCosts, file) for file in files if file.stem not in SHARED]
        return cls(
            engines={costs.key: costs for costs in engines},
            transfers=_read_or_new(TransferTable, folder / "transfers.json"),
            gaps=_read_or_new(GapTable, folder / "gaps.json"),
            host=_read_or_new(HostTable, folder / "host.json"),
            provenance=_read_or_new(Provenance, folder / "provenance.json"),
            validated=_read_or_new(Validated, folder / "validated.json"),
            folder=str(path),
        )

    def save(self, path: str | Path) -> None:
        """Write the tables into a folder, made where there is none; engines' files of others stay."""
        assert self.any_engine is None, "a flat book is for tests"
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for name in SHARED:
            _write(getattr(self, name), folder / f"{name}.json")
        for key, costs in self.engines.items():
            _write(costs, folder / f"{key.file_name}.json")


def note_validation(folder: str | Path, found: Validated) -> None:
    """Keep with a folder's tables how far they were off. Raises OSError."""
    _write(found, Path(folder) / "validated.json")


def _num_alike(key: EngineKey, other: EngineKey) -> int:
    return sum(a == b for a, b in zip(key, other, strict=True))


def _unlike(key: EngineKey, other: EngineKey) -> str:
    differs = [f"{n} {b}, not {a}" for n, a, b in zip(key._fields, key, other, strict=True) if a != b]
    return f"{other.text} there are ({'; '.join(differs)})"


def _write(table: Any, path: Path) -> None:
    write_atomically(path, json.dumps({"version": VERSION} | as_json(table), indent=1) + "\n")


def _read_or_new(kind: type[T], path: Path) -> T:
    return _read(kind, path) if path.is_file() else kind()


def _read(kind: type[T], path: Path) -> T:
    try:
        values = parse_json(read_text(path, FILE_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from error
    version = values.pop("version", None) if isinstance(values, dict) else None
    if version is None:
        raise UserError("not a cost table", where=str(path))
    if version not in READ:
        folder = path.parent
        raise UserError(
            f"a cost table of version {version!r:.20}, and this rayk reads version {VERSION}",
            where=str(path),
            mend=f"measure anew, or fit what was measured: `rayk costs MODEL --from {folder} --out {folder}`",
        )
    return read(kind, values, str(path))
