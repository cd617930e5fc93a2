"""Which node each engine goes to: pure planning over a list of nodes. No Ray here; see `placement`.

An engine's workers always share one node. `auto` leaves the node to Ray, `pack` takes one node for all
engines of a cell, `spread` never lets a prefill engine share a node with a decode engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayk.specs import Cell
from rayk.specs.serving import EngineEntry, ServerSettings
from rayk.types.errors import DeviceError

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
class EngineAsk:
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


def worker_resources(device: str, gpus_per_worker: float) -> dict[str, float]:
    """List the Ray resources that one worker asks for."""
    cpu = {"CPU": CPU_SHARE}
    return cpu | {"GPU": gpus_per_worker} if device == "cuda" else cpu


def cell_asks(cell: Cell, driver_node: str, gpus_per_worker: float | None = None) -> list[EngineAsk]:
    """List what the engines of a cell need; `gpus_per_worker` replaces the cell's own share."""
    share = cell.gpus_per_worker if gpus_per_worker is None else gpus_per_worker
    assert share != "auto", "decided by the driver"
    sides = [("prefill", cell.num_prefill_engines, cell.prefill)]
    if cell.decode is not None:
        sides.append(("decode", cell.num_decode_engines, cell.decode))
    lost = {f.engine_role for f in cell.faults if f.kind == "kill_node"}
    return [
        EngineAsk(
            name=f"{side}{i}",
            # All ranks of an engine of vLLM are processes of one worker.
            num_workers=1 if cell.vllm else engine.tp,
            resources=worker_resources(engine.device, share * engine.tp if cell.vllm else share),
            labels=getattr(cell.spec, side).node_labels,
            avoid=driver_node if side in lost else None,
        )
        for side, count, engine in sides
        for i in range(count)
    ]


def largest_asks(cells: Iterable[Cell], driver_node: str) -> list[EngineAsk]:
    """List the largest engine of every name over some cells."""
    largest: dict[str, EngineAsk] = {}
    for cell in cells:
        for ask in cell_asks(cell, driver_node):
            known = largest.get(ask.name)
            if known is None or known.num_workers < ask.num_workers:
                largest[ask.name] = ask
    return list(largest.values())


def placement_of(cell: Cell) -> str:
    """Return auto, pack or spread. Aggregated engines have no other side to be spread from."""
    placement: str = cell.spec.placement
    return "auto" if placement == "spread" and cell.decode is None else placement


def plan_nodes(
    asks: Sequence[EngineAsk], nodes: Sequence[Node], placement: str, *, free: bool = False
) -> dict[str, Node]:
    """Choose a node for every engine, its home where that is possible.

    `free`: count what is free now (an engine with a home takes nothing new) instead of all there is. Raises
    DeviceError when these nodes cannot hold the engines this way.
    """
    rooms = [_Room(node, dict(node.free if free else node.resources)) for node in nodes]
    if free:
        for room in rooms:
            for ask in asks:
                if ask.home == room.node.node_id:
                    room.take(ask, -1)
    order = sorted(
        asks, key=lambda a: (a.home is None, -a.num_workers * max(a.resources.values(), default=0))
    )
    found: dict[str, Node] = {}
    if placement == "pack":
        homes = [a.home for a in order]
        for room in sorted(rooms, key=lambda r: -homes.count(r.node.node_id)):
            if _fill(order, [room], found, spread=False, failed=set()):
                return found
    elif _fill(order, rooms, found, spread=placement == "spread", failed=set()):
        return found
    raise _refusal(asks, nodes, placement)


@dataclass(eq=False, slots=True)
class _Room:
    """What a node has left while a plan is made, and which engines are on it."""

    node: Node
    left: dict[str, float]
    sides: list[str] = field(default_factory=list)

    def fits(self, ask: EngineAsk, spread: bool) -> bool:
        if spread and any(side != ask.side for side in self.sides):
            return False
        enough = all(self.left.get(n, 0.0) + ROUNDING / 2 >= amount for n, amount in ask.total.items())
        return enough and may_be_on(ask, self.node)

    def take(self, ask: EngineAsk, sign: int = 1) -> None:
        for name, amount in ask.total.items():
            self.left[name] = round(self.left.get(name, 0.0) - sign * amount, 4)

    def state(self, asks: Sequence[EngineAsk]) -> tuple[object, ...]:
        """Return a key: rooms with equal keys can take the same of `asks`."""
        names = sorted({name for ask in asks for name in ask.resources})
        amounts = tuple(self.left.get(name, 0.0) for name in names)
        return (amounts, self.sides[:1], [may_be_on(ask, self.node) for ask in asks])


def _fill(
    order: Sequence[EngineAsk],
    rooms: Sequence[_Room],
    found: dict[str, Node],
    *,
    spread: bool,
    failed: set[str],
) -> bool:
    """Place the engines one after the other, and backtrack where that leads nowhere."""
    if not order:
        return True
    ask, rest = order[0], order[1:]
    # Nodes that look the same are tried once: what follows depends on the state of the rooms alone.
    key = repr((len(order), sorted(repr(room.state(order)) for room in rooms)))
    if key in failed:
        return False
    # Home first, then beside engines of its own side, then where least is left.
    rooms_left = sorted(
        (r for r in rooms if r.fits(ask, spread)),
        key=lambda r: (
            r.node.node_id != ask.home,
            ask.side not in r.sides if spread else False,
            [r.left[name] for name in sorted(ask.resources, reverse=True)],
        ),
    )
    for room in rooms_left:
        room.take(ask)
        room.sides.append(ask.side)
        if _fill(rest, rooms, found, spread=spread, failed=failed):
            found[ask.name] = room.node
            return True
        room.sides.pop()
        room.take(ask, -1)
    failed.add(key)
    return False


def may_be_on(ask: EngineAsk, node: Node) -> bool:
    """Return whether an engine may be on a node if there is room."""
    return node.node_id != ask.avoid and matches(ask.labels, node.labels)


def matches(wanted: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Return whether a node's labels satisfy a selector (Ray's words)."""
    return all(_matches(value, labels.get(name)) for name, value in wanted.items())


def _matches(wanted: str, found: str | None) -> bool:
    if wanted.startswith("!"):
        return not _matches(wanted[1:], found)
    if wanted.startswith("in(") and wanted.endswith(")"):
        return found in [value.strip() for value in wanted[3:-1].split(",")]
    return found == wanted


def _refusal(asks: Sequence[EngineAsk], nodes: Sequence[Node], placement: str) -> DeviceError:
    """Explain why the nodes cannot hold the engines, the plainest reason first."""
    alone = [[n for n in nodes if _Room(n, dict(n.resources)).fits(ask, False)] for ask in asks]
    cluster = f"the cluster's live nodes are {', '.join(_describe(n, asks) for n in nodes) or 'none'}"
    for ask, able in zip(asks, alone, strict=True):
        if not able:
            return DeviceError(
                f"no node can hold engine {ask}, whose workers share one node; {cluster}",
                where=f"{ask.side}.node_labels" if ask.labels else f"{ask.side}.tp",
                mend="a smaller TP size, gpus_per_worker: auto, or a node that has room",
            )
    wanted = f"{len(asks)} engines, {', '.join(map(str, asks))}"
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


def _describe(node: Node, asks: Sequence[EngineAsk]) -> str:
    names = sorted({name for ask in asks for name in ask.resources if name != "CPU"}) or ["CPU"]
    return f"{node} with {' and '.join(f'{node.resources.get(name, 0):g} {name}' for name in names)}"


def with_homes(asks: Iterable[EngineAsk], homes: Mapping[str, str | None]) -> list[EngineAsk]:
    """Fill in the nodes where the engines' workers are already."""
    return [replace(ask, home=homes.get(ask.name)) for ask in asks]


def engine_ask(entry: EngineEntry, settings: ServerSettings) -> EngineAsk:
    """Describe what an engine of a server needs of a node."""
    share = settings.gpus_per_worker
    assert share != "auto", "decided by the driver"
    resources = worker_resources(entry.config.device, share)
    return EngineAsk(
        name=entry.name, num_workers=entry.config.tp, resources=resources, labels=entry.node_labels
    )
