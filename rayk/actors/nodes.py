"""Which node each engine goes to: pure planning over a list of nodes. No Ray here; see `placement`.

An engine's workers always share one node. `auto` leaves the node to Ray, `pack` takes one node for all
engines of a cell, `spread` never lets a prefill engine share a node with a decode engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayk.specs import Cell
from rayk.specs.serving import EngineEntry, ServerSettings
from rayk.types.config import EngineConfig
from rayk.types.errors import DeviceError
from rayk.types.model_names import hub_name

CPU_SHARE = 0.01
"""CPU slots are logical: a worker never waits for a core."""
ROUNDING = 1e-4
"""Ray counts resources in steps of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A live node of the cluster. `placement.live_nodes` fills it."""

    node_id: str
    address: str
    """IP address."""
    resources: Mapping[str, float]
    """All its resources, in use or not."""
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.address} ({self.node_id[:8]})"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDemand:
    """What an engine needs of a node."""

    name: str
    """prefill0, decode1, ..."""
    num_workers: int
    resources: Mapping[str, float]
    """Resources of one worker."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label -> value that the node's label must have, in the words of Ray's label selectors: v, !v, in(a, b),
    !in(a, b)."""
    home: str | None = None
    """Id of the node where its workers are already."""
    avoid: str | None = None
    """Id of the driver's node, if a planted fault will end this engine's node: the run must survive that."""

    @property
    def side(self) -> str:
        """Return prefill or decode."""
        return self.name.rstrip("0123456789")

    @property
    def total(self) -> dict[str, float]:
        """Return the resources of all its workers."""
        return {name: amount * self.num_workers for name, amount in self.resources.items()}

    def __str__(self) -> str:
        each = " and ".join(f"{amount:g} {name}" for name, amount in self.resources.items())
        labels = "".join(f", {name}={value}" for name, value in self.labels.items())
        avoid = ", not on the driver's node, because of fault kill_node" if self.avoid else ""
        return f"{self.name} ({self.num_workers} workers of {each}{labels}{avoid})"


FORM_S = 120.0
"""Deadline for starting workers and forming an engine (imports, weights)."""
FEW_WORKERS = 8
WORKER_S = 5.0
"""How much longer the start may take for each worker beyond FEW_WORKERS: they may share two cores."""
FETCH_S = 3600.0
"""How much longer the start may take where nodes fetch a model of the hub first."""


def start_limit_s(model: str | None, demands: Sequence[EngineDemand] = ()) -> float:
    """Return the deadline for these workers, which can read `model`, in seconds."""
    fetches = model is not None and hub_name(model) is not None
    num_more = max(0, sum(demand.num_workers for demand in demands) - FEW_WORKERS)
    return FORM_S + num_more * WORKER_S + (FETCH_S if fetches else 0)


def worker_resources(device: str, gpus_per_worker: float) -> dict[str, float]:
    """List the Ray resources that one worker asks for."""
    cpu = {"CPU": CPU_SHARE}
    return cpu | {"GPU": gpus_per_worker} if device == "cuda" else cpu


def cell_demands(cell: Cell, driver_node: str, gpus_per_worker: float | None = None) -> list[EngineDemand]:
    """List what the engines of a cell need; `gpus_per_worker` replaces the cell's own share."""
    share = cell.gpus_per_worker if gpus_per_worker is None else gpus_per_worker
    assert share != "auto", "decided by the driver"
    sides = [("prefill", cell.num_prefill_engines, cell.prefill)]
    if cell.decode is not None:
        sides.append(("decode", cell.num_decode_engines, cell.decode))
    lost = {f.engine_role for f in cell.faults if f.kind == "kill_node"}
    return [
        EngineDemand(
            name=f"{side}{i}",
            # All ranks of an engine of vLLM are processes of one worker.
            num_workers=1 if cell.vllm else engine.num_ranks,
            resources=worker_resources(engine.device, share * engine.num_ranks if cell.vllm else share),
            labels=getattr(cell.spec, side).node_labels,
            avoid=driver_node if side in lost else None,
        )
        for side, count, engine in sides
        for i in range(count)
    ]


def largest_demands(cells: Iterable[Cell], driver_node: str) -> list[EngineDemand]:
    """List the largest engine of every name over some cells."""
    largest: dict[str, EngineDemand] = {}
    for cell in cells:
        for demand in cell_demands(cell, driver_node):
            known = largest.get(demand.name)
            if known is None or known.num_workers < demand.num_workers:
                largest[demand.name] = demand
    return list(largest.values())


def placement_of(cell: Cell) -> str:
    """Return auto, pack or spread. Aggregated engines have no other side to be spread from."""
    placement: str = cell.spec.placement
    return "auto" if placement == "spread" and cell.decode is None else placement


def weights_of(engine: EngineConfig) -> str | None:
    """Return the model whose weights an engine's node must have; None: config.json will do."""
    return engine.model if engine.has_weights else None


def plan_nodes(
    demands: Sequence[EngineDemand], nodes: Sequence[Node], placement: str, *, free: bool = False
) -> dict[str, Node]:
    """Choose a node for every engine, its home where that is possible.

    `free`: count what is free now (an engine with a home takes nothing new) instead of all there is. Raises
    DeviceError when these nodes cannot hold the engines this way.
    """
    nodes_left = [_NodeLeft(node, dict(node.free if free else node.resources)) for node in nodes]
    if free:
        for node_left in nodes_left:
            for demand in demands:
                if demand.home == node_left.node.node_id:
                    node_left.take(demand, -1)
    order = sorted(
        demands, key=lambda a: (a.home is None, -a.num_workers * max(a.resources.values(), default=0))
    )
    found: dict[str, Node] = {}
    if placement == "pack":
        homes = [a.home for a in order]
        for node_left in sorted(nodes_left, key=lambda r: -homes.count(r.node.node_id)):
            if _fill(order, [node_left], found, spread=False, failed=set()):
                return found
    elif _fill(order, nodes_left, found, spread=placement == "spread", failed=set()):
        return found
    raise _refusal(demands, nodes, placement)


@dataclass(eq=False, slots=True)
class _NodeLeft:
    """What a node has left while a plan is made, and which engines are on it."""

    node: Node
    left: dict[str, float]
    sides: list[str] = field(default_factory=list)

    def fits(self, demand: EngineDemand, spread: bool) -> bool:
        if spread and any(side != demand.side for side in self.sides):
            return False
        enough = all(self.left.get(n, 0.0) + ROUNDING / 2 >= amount for n, amount in demand.total.items())
        return enough and may_be_on(demand, self.node)

    def take(self, demand: EngineDemand, sign: int = 1) -> None:
        for name, amount in demand.total.items():
            self.left[name] = round(self.left.get(name, 0.0) - sign * amount, 4)

    def state(self, demands: Sequence[EngineDemand]) -> tuple[object, ...]:
        """Return a key: nodes with equal keys can take the same of `demands`."""
        names = sorted({name for demand in demands for name in demand.resources})
        amounts = tuple(self.left.get(name, 0.0) for name in names)
        return (amounts, self.sides[:1], [may_be_on(demand, self.node) for demand in demands])


def _fill(
    order: Sequence[EngineDemand],
    nodes_left: Sequence[_NodeLeft],
    found: dict[str, Node],
    *,
    spread: bool,
    failed: set[str],
) -> bool:
    """Place the engines one after the other, and backtrack where that leads nowhere."""
    if not order:
        return True
    demand, rest = order[0], order[1:]
    # Nodes that look the same are tried once: what follows depends on what the nodes have left alone.
    key = repr((len(order), sorted(repr(node_left.state(order)) for node_left in nodes_left)))
    if key in failed:
        return False
    # Home first, then beside engines of its own side, then where least is left.
    fitting = sorted(
        (r for r in nodes_left if r.fits(demand, spread)),
        key=lambda r: (
            r.node.node_id != demand.home,
            demand.side not in r.sides if spread else False,
            [r.left[name] for name in sorted(demand.resources, reverse=True)],
        ),
    )
    for node_left in fitting:
        node_left.take(demand)
        node_left.sides.append(demand.side)
        if _fill(rest, nodes_left, found, spread=spread, failed=failed):
            found[demand.name] = node_left.node
            return True
        node_left.sides.pop()
        node_left.take(demand, -1)
    failed.add(key)
    return False


def may_be_on(demand: EngineDemand, node: Node) -> bool:
    """Return whether an engine may be on a node if there is room."""
    return node.node_id != demand.avoid and matches(demand.labels, node.labels)


def matches(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether a node's labels satisfy a selector (Ray's words)."""
    return all(_matches(value, labels.get(name)) for name, value in wanted.items())


def _matches(wanted: str, found: str | None) -> bool:
    if wanted.startswith("!"):
        return not _matches(wanted[1:], found)
    if wanted.startswith("in(") and wanted.endswith(")"):
        return found in [value.strip() for value in wanted[3:-1].split(",")]
    return found == wanted


def _refusal(demands: Sequence[EngineDemand], nodes: Sequence[Node], placement: str) -> DeviceError:
    """Explain why the nodes cannot hold the engines, the plainest reason first."""
    alone = [[n for n in nodes if _NodeLeft(n, dict(n.resources)).fits(demand, False)] for demand in demands]
    cluster = f"the cluster's live nodes are {', '.join(_describe(n, demands) for n in nodes) or 'none'}"
    for demand, able in zip(demands, alone, strict=True):
        if not able:
            return DeviceError(
                f"no node can hold engine {demand}, whose workers share one node; {cluster}",
                where=f"{demand.side}.node_labels" if demand.labels else f"{demand.side}.tp",
                mend="a smaller TP size, gpus_per_worker: auto, or a node that has room",
            )
    wanted = f"{len(demands)} engines, {', '.join(map(str, demands))}"
    if placement == "pack":
        problem = f"placement: pack wants one node for all of {wanted}"
    elif placement == "spread":
        able_ids = {n.node_id for able in alone for n in able}
        problem = (
            f"placement: spread wants prefill and decode engines on different nodes: {wanted}; "
            f"{len(able_ids)} of {len(nodes)} nodes can hold one"
        )
    else:
        problem = f"the nodes cannot hold {wanted} at once"
    return DeviceError(
        f"{problem}; {cluster}",
        where="placement",
        mend="placement: auto, smaller engines, gpus_per_worker: auto, or more nodes",
    )


def _describe(node: Node, demands: Sequence[EngineDemand]) -> str:
    names = sorted({name for demand in demands for name in demand.resources if name != "CPU"}) or ["CPU"]
    return f"{node} with {' and '.join(f'{node.resources.get(name, 0):g} {name}' for name in names)}"


def with_homes(demands: Iterable[EngineDemand], homes: Mapping[str, str | None]) -> list[EngineDemand]:
    """Fill in the nodes where the engines' workers are already."""
    return [replace(demand, home=homes.get(demand.name)) for demand in demands]


def engine_demand(entry: EngineEntry, settings: ServerSettings) -> EngineDemand:
    """Describe what an engine of a server needs of a node."""
    share = settings.gpus_per_worker
    assert share != "auto", "decided by the driver"
    resources = worker_resources(entry.config.device, share)
    return EngineDemand(
        name=entry.name, num_workers=entry.config.num_ranks, resources=resources, labels=entry.node_labels
    )
