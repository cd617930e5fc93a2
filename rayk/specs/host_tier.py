"""What is refused of a host tier that is asked for in vain, or that this machine cannot have."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from rayk.models.config import DecoderConfig
from rayk.models.engine_pool import engine_pool
from rayk.specs.cells import Cell
from rayk.specs.experiment import OffloadSpec
from rayk.specs.load import LoadedSpec
from rayk.types.config import EngineConfig
from rayk.types.errors import SpecError

_NO_FOLDER = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""What a path is to blame for; that a disk is full or read-only, or whose it is, is another matter."""


def check_heeded(cells: Sequence[Cell], loaded: LoadedSpec) -> None:
    """Refuse settings of a host tier that no cell has, and of a disk tier likewise. That some cells have
    none is how they are compared with others. Raises SpecError."""
    given = _given(loaded)
    tiers = [cell.spec.offload for cell in cells if cell.spec.offload.host_gib]
    if given and not tiers:
        raise SpecError(
            problem=f"offload.{given[0]} without a host tier: offload.host_gib is 0",
            where=loaded.where(f"offload.{given[0]}"),
            mend=f"offload: {{host_gib: 1}}, or leave {given[0]} out",
        )
    if "disk_gib" in given and not any(tier.disk_folder for tier in tiers):
        raise SpecError(
            problem="offload.disk_gib without a disk tier: there is no offload.disk_folder",
            where=loaded.where("offload.disk_gib"),
            mend="offload: {disk_folder: runs/kv}, or leave disk_gib out",
        )


def _given(loaded: LoadedSpec) -> list[str]:
    """List keys of the section, but for its size, that have another value than the default's, or several,
    or that an override gives. An override of the size may switch off all that a file says."""
    overrides = loaded.marks.overrides
    is_off = ("offload", "host_gib") in overrides and not loaded.spec.offload.host_gib
    varied = {key for matrix in loaded.spec.matrix for key in matrix}

    def is_given(name: str) -> bool:
        value, default = getattr(loaded.spec.offload, name), OffloadSpec.model_fields[name].default
        is_set = ("offload", name) in overrides and value is not None
        # A resolved spec, which may be run again, names every key: that alone says nothing.
        differs = value != default and not is_off
        return is_set or differs or f"offload.{name}" in varied

    return [name for name in OffloadSpec.model_fields if name != "host_gib" and is_given(name)]


def check_pools(engines: Iterable[EngineConfig], config: DecoderConfig, where: str) -> None:
    """Refuse engines whose KV pools together are larger than this machine's memory, where they will run in
    it. Raises SpecError."""
    alike = Counter(engine for engine in engines if engine.device == "cpu")
    pools_gib = sum(_pool_bytes(engine, config) * count for engine, count in alike.items()) / 2**30
    total_gib = _memory_gib()
    if pools_gib > total_gib:
        raise SpecError(
            problem=f"KV pools of {pools_gib:,.1f} GiB on a machine of {total_gib:.1f} GiB of memory",
            where=where,
            mend="fewer blocks: engine.num_blocks",
        )


@lru_cache(maxsize=1024)
def _pool_bytes(engine: EngineConfig, config: DecoderConfig) -> int:
    """Count the bytes of the KV pool on all ranks, a drafter's pages and the blocks behind it included."""
    return sum(rank.buffer_bytes for rank in engine_pool(engine, config))


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def check_machine(tier: OffloadSpec, where: Callable[[str], str]) -> None:
    """Refuse a host tier that is larger than this machine's memory, and a folder of pages that can be none,
    where the engines will run here. `where`: the place of a dotted key. Raises SpecError."""
    if not tier.host_gib:
        return
    total_gib = _memory_gib()
    if tier.host_gib > total_gib:
        raise SpecError(
            problem=f"a host tier of {tier.host_gib:g} GiB on a machine of {total_gib:.1f} GiB of memory",
            where=where("offload.host_gib"),
            mend=f"offload: {{host_gib: {total_gib / 4:.1f}}}, which leaves the rest to the engines",
        )
    why = None if tier.disk_folder is None else _why_no_folder(tier.disk_folder)
    if why is not None:
        raise SpecError(
            problem=f"{tier.disk_folder} cannot be the disk tier's folder: {why}",
            where=where("offload.disk_folder"),
            mend="offload: {disk_folder: a folder, or a path where one can be made}",
        )


def _why_no_folder(path: str) -> str | None:
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno in _NO_FOLDER else None
    return None if stat.S_ISDIR(mode) else "it is a file"
