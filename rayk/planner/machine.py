"""Say what a plan may use: nodes, what fits on each, and how much memory a rank has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rayk.costs.roofline import Hardware
from rayk.models.memory_plan import GPU_GB, MULTIPLIES_FP8, USED_SHARE
from rayk.specs.plan import LoadedPlan
from rayk.types.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMachine:
    """Nodes of GPUs, or of CPU slots, each of which a rank may have."""

    name: str  # e.g. 2 x 8 H200
    nodes: tuple[int, ...]  # GPUs of each
    rank_bytes: int  # for weights and KV
    keeps_fp8: bool = False

    @property
    def num_gpus(self) -> int:
        return sum(self.nodes)

    @property
    def largest(self) -> int:
        """GPUs of the largest node, and so of the largest engine."""
        return max(self.nodes)

    def holds(self, engines: Sequence[tuple[int, int]]) -> bool:
        """Tell whether engines, as pairs of (TP, how many), fit so that each lies within one node.

        The largest are placed first; where sizes do not divide each other, more may fit.
        """
        if sum(tp * num for tp, num in engines) > self.num_gpus:
            return False
        sizes = sorted({tp for tp, num in engines if num})
        divides = all(b % a == 0 for a, b in pairwise(sizes))
        if not sizes or (divides and all(node % sizes[-1] == 0 for node in self.nodes)):
            return True  # no node has a rest that nobody can use
        free = list(self.nodes)
        for tp, num in sorted(engines, reverse=True):
            for _ in range(num):
                place = next((i for i, left in enumerate(free) if left >= tp), None)
                if place is None:
                    return False
                free[place] -= tp
        return True


def machine_of(loaded: LoadedPlan, hardware: Hardware | None) -> PlanMachine:
    """Read what a spec names. `hardware`: a data sheet, whose memory counts where it tells it. Raises
    SpecError for a GPU of which neither tells the memory, and for a data sheet of other GPUs."""
    spec = loaded.spec
    if spec.cpu is not None:
        return PlanMachine(
            name=f"{spec.cpu.slots} CPU slots",
            nodes=(spec.cpu.slots,),
            rank_bytes=int(spec.cpu.memory_gib * 2**30),
        )
    texts = [(1, spec.gpus, "gpus")] if spec.gpus else []
    texts += [(n.count, n.gpus, f"nodes.{i}.gpus") for i, n in enumerate(spec.nodes or [])]
    nodes: list[int] = []
    kinds: dict[str, str] = {}
    for count, text, key in texts:
        found = re.fullmatch(r"(?:(\d+)x)?(\w+)", text or "")
        assert found is not None, text
        nodes += [int(found[1] or 1)] * count
        kinds.setdefault(found[2].upper(), key)
    if len(kinds) > 1:
        raise SpecError(
            f"nodes with GPUs of several kinds: {', '.join(kinds)}",
            where=loaded.where("nodes"),
            mend="one plan for each kind",
        )
    ((kind, key),) = kinds.items()
    if hardware is not None and kind not in hardware.name.upper():
        raise SpecError(
            f"GPUs are {kind}, and the data sheet is of {hardware.name}",
            where=loaded.where(key),
            mend="a data sheet of such GPUs, or GPUs of that sheet",
        )
    gigabytes = (hardware.memory_gb if hardware is not None else 0.0) or GPU_GB.get(kind, 0)
    if not gigabytes:
        raise SpecError(
            f"the memory of {kind} is not known",
            where=loaded.where(key),
            mend=f"memory_gb in the file of `hardware`, or one of {', '.join(GPU_GB)}",
        )
    sizes = sorted(set(nodes), reverse=True)
    name = " + ".join(
        f"{nodes.count(n)} x {n} {kind}" if nodes.count(n) > 1 else f"{n} {kind}" for n in sizes
    )
    return PlanMachine(
        name=name,
        nodes=tuple(nodes),
        rank_bytes=int(gigabytes * 1e9 * USED_SHARE),
        keeps_fp8=kind in MULTIPLIES_FP8 if hardware is None else hardware.keeps_fp8,
    )
