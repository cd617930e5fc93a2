"""Decide whether a folder may take a run: it has no tables, or those of the same run to continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rayk.reports.files import SPEC_BYTES, TABLES, parse_spec
from rayk.types.errors import UserError
from rayk.types.files import JSON_BYTES, parse_json, read_text

FACTS = ("git_commit", "python", "platform", "packages", "devices", "vllm")  # what measured a cell
# how fast and busy the machine was: told (`trust.py`), no reason to refuse a resume
PROBED = ("ceiling", "load")
_SHOWN = 40


def check_directory(
    directory: str | Path,
    spec_yaml: str,
    *,
    resume: bool,
    inputs: Mapping[str, str] | None = None,
    renew: Callable[[str], str] = str,
) -> None:
    """Refuse a folder that holds tables, unless resuming the same run. `inputs` maps the files that a run
    reads to their hashes, which must not have changed; `renew` brings an older spec.yaml up to date. Raises
    UserError."""
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise UserError(problem="is a file, not a folder", where=str(folder))
    if not any((folder / f"{name}.parquet").exists() for name in TABLES):
        return
    if not resume:
        raise UserError(
            problem="already holds a run's tables",
            where=str(folder),
            mend="--resume to continue it, or another --out",
        )
    path = folder / "spec.yaml"
    changed = differences(_read_spec(path, renew), yaml.safe_load(spec_yaml))
    if changed:
        raise UserError(
            problem=f"cannot resume: the spec differs from the run's in {', '.join(changed)}",
            where=str(path),
            mend="the same spec and --set options, or another --out",
        )
    before = read_environment(folder).get("inputs", {})
    replaced = [name for name, digest in (inputs or {}).items() if before.get(name, digest) != digest]
    if replaced:
        raise UserError(
            problem=f"cannot resume: changed since the run began: {', '.join(replaced)}",
            where=str(folder),
            mend="the same files as before, or another --out",
        )


def differences(before: Any, now: Any) -> list[str]:
    """Name dotted keys with unlike values, e.g. `sampling.max_tokens (24, now 8)`."""
    old, new = dict(flatten(before)), dict(flatten(now))
    found = []
    for key in {**old, **new}:
        values = [repr(side.get(key)) for side in (old, new)]
        if old.get(key) != new.get(key):
            short = all(len(v) <= _SHOWN for v in values)
            found.append(f"{key} ({values[0]}, now {values[1]})" if short else key)
    return found


def changed_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare versions, commit and devices, as far as both sides know them."""
    known = [k for k in FACTS if before.get(k) is not None and now.get(k) is not None]
    return differences({k: before[k] for k in known}, {k: now[k] for k in known})


def read_environment(folder: Path) -> dict[str, Any]:
    """Read environment.json; empty if none can be read."""
    try:
        found = parse_json(read_text(folder / "environment.json", JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_spec(path: Path, renew: Callable[[str], str]) -> Any:
    try:
        return parse_spec(renew(read_text(path, SPEC_BYTES)), str(path))
    except (OSError, ValueError, UserError) as error:
        raise UserError(
            problem=f"cannot resume: the run's spec cannot be read: {error}",
            where=str(path),
            mend="another --out",
        ) from error


def flatten(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
