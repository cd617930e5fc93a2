"""The workers of a run: one placement group per engine, kept from cell to cell, replaced when they die.

Groups that lost their node are given back and reserved again on the nodes that are left. Where these
cannot hold the engine, that is said at once: Ray itself would wait for a node for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rayk.actors import placement
from rayk.actors.failures import translate
from rayk.actors.nodes import FORM_S, EngineDemand, Node, may_be_on, plan_nodes, start_limit_s, with_homes
from rayk.actors.placement import NODE_ID_LABEL
from rayk.types.errors import CheckpointError, DeadlineExceeded, DeviceError, EngineDied, RaykError
from rayk.types.model_names import hub_name
from rayk.types.waiting import busy

T = TypeVar("T")

ANSWER_S = 15.0
"""An idle worker that takes longer to say that it is there hangs."""
WATCH_S = 0.5
"""How often the list of live nodes is looked at while something is waited for."""
PLACED_POLL_S = 0.02
NODES_S = 10.0
"""How long Ray's GCS may take to say which nodes live, where no workers are being started."""


@dataclass(eq=False)
class Slot:
    """An engine's place: its workers, each in a bundle of a placement group."""

    group: Any
    """The first placement group of its workers."""
    resources: dict[str, float]
    node: Node | None = None
    """None until Ray has placed the group."""
    workers: list[Any] = field(default_factory=list)
    bundles: list[tuple[Any, int]] = field(default_factory=list)
    """Placement group and index of each worker."""
    models: set[str] = field(default_factory=set)
    """Checkpoints that its workers have found on their node."""

    has_answered: bool = False
    """Whether all its workers have ever answered."""
    is_asked: bool = False
    """Whether they are being asked again now."""

    @property
    def hangs(self) -> bool:
        """Return whether workers that answered once do not answer any more."""
        return self.has_answered and self.is_asked

    @property
    def node_id(self) -> str | None:
        """Return the id of its node; None until Ray has placed it."""
        return self.node.node_id if self.node is not None else None

    @property
    def groups(self) -> list[Any]:
        return [group for group, _ in self.bundles] or [self.group]

    def suits(self, demand: EngineDemand, *, exactly: bool) -> bool:
        """Return whether the engine can have this place; `exactly`: it must not be larger than needed."""
        num_more = len(self.workers) - demand.num_workers
        alike = self.resources == demand.resources and self.node is not None and may_be_on(demand, self.node)
        return alike and (num_more == 0 or (num_more > 0 and not exactly))


class _NodeLost(Exception):
    """A node died while workers were being started."""


class _WorkerGone(Exception):
    """A worker of this engine does not answer."""

    def __init__(self, name: str, error: RaykError, *, is_certain: bool = True) -> None:
        super().__init__(name)
        self.name, self.error, self.is_certain = name, error, is_certain


class WorkerPool:
    """Keeps a slot of workers per engine name. `keep`: slots that a cell does not use stay for later cells.
    `start` makes a slot's workers, by default placement.start_worker. `on_started` is called when all that
    were missing have been started, which takes them a while."""

    def __init__(
        self,
        run_id: str,
        *,
        keep: bool,
        start: Callable[..., Any] | None = None,
        on_started: Callable[[], object] = lambda: None,
    ) -> None:
        self._run_id = run_id
        self._keep = keep
        self._start_worker = start
        self._on_started = on_started
        self._slots: dict[str, Slot] = {}
        self._starts: Counter[str] = Counter()
        self._preparing = asyncio.Lock()
        self._waiting_for = ""

    async def prepare(
        self,
        demands: Sequence[EngineDemand],
        how: str,
        model: str | None = None,
        *,
        alone: bool = False,
        beside: Sequence[EngineDemand] = (),
    ) -> dict[str, int]:
        """Start workers for these engines, placed `how` (auto, pack, spread), that can read `model`.

        Returns worker name -> process id. `alone`: other engines stay, whatever is short. `beside`: those of
        them that `how` holds for as well, as far as the nodes allow it. Raises DeviceError when the live
        nodes cannot hold them, CheckpointError when a node has no such model, EngineDied when workers do not
        start, DeadlineExceeded.
        """
        limit_s = start_limit_s(model, demands)
        async with self._preparing:
            try:
                async with asyncio.timeout(limit_s):
                    return await self._prepare(demands, how, model, alone, beside)
            except TimeoutError:
                for name in [n for n, s in self._slots_of(demands).items() if s.is_asked]:
                    self._free(name)  # others start in their place
                raise DeadlineExceeded(self._waiting_for, limit_s, busy()) from None
            finally:  # also when the cell's deadline cancels this
                for name in [n for n, s in self._slots_of(demands).items() if s.node is None or s.hangs]:
                    self._free(name)

    def engine(self, name: str, num_workers: int) -> tuple[list[Any], Node]:
        """Return the first workers of a prepared slot, and its node. Raises EngineDied where that died."""
        slot = self._slot(name)
        if slot.node is None:
            raise EngineDied(name, "its place is not there yet")
        return slot.workers[:num_workers], slot.node

    async def replace_workers(self, name: str, num_workers: int) -> None:
        """End the first workers of a slot and start others, if their node lives."""
        lives = True
        with contextlib.suppress(DeadlineExceeded):  # nobody says that it is lost
            lives = await self.is_placed(name)
        slot = self._slots.get(name)
        if slot is None:
            return
        for worker in slot.workers[:num_workers]:
            placement.kill(worker)
        if not lives:
            self._free(name)
            return
        for index in range(num_workers):
            self.replace_worker(name, index)

    def has(self, name: str) -> bool:
        return name in self._slots

    def node_id(self, name: str) -> str | None:
        """Find the id of a slot's node; None without one."""
        return self._slots[name].node_id if name in self._slots else None

    def drop(self, name: str) -> None:
        """Give a slot back, if there is one; its workers end."""
        if name in self._slots:
            self._free(name)

    async def is_placed(self, name: str) -> bool:
        """Return whether there is such a slot, on a node that lives. Raises DeadlineExceeded."""
        alive = {n.node_id for n in await live_nodes()}
        slot = self._slots.get(name)
        return slot is not None and slot.node_id in alive

    def worker(self, name: str) -> Any:
        """Return the current first worker of a slot; None without one."""
        return next(iter(self._slots[name].workers), None) if name in self._slots else None

    def replace_worker(self, name: str, index: int) -> None:
        """End one worker of a slot at once and start another in its place. Raises EngineDied where the slot
        is gone."""
        slot = self._slot(name)
        placement.kill(slot.workers[index])
        slot.has_answered = False
        slot.workers[index] = self._start(name, slot, index)

    def exchange(self, name: str, index: int, spare: str) -> bool:
        """End one worker of a slot at once and put a spare slot's only worker, which may still be starting,
        in its place. A new worker starts as the spare. Returns False, with nothing changed, where they are
        not on one node. Raises EngineDied where the slot is gone."""
        slot, other = self._slot(name), self._slots.get(spare)
        if other is None or not other.workers or other.node_id != slot.node_id:
            return False
        placement.kill(slot.workers[index])
        slot.workers[index], slot.bundles[index], other.bundles[0] = (
            other.workers[0],
            other.bundles[0],
            slot.bundles[index],
        )
        slot.has_answered = slot.has_answered and other.has_answered
        other.has_answered = False
        other.workers[0] = self._start(spare, other, 0)
        return True

    async def answers(self, name: str, index: int = 0) -> None:
        """Wait until a worker of a slot has answered or is exchanged. Raises EngineDied where it is gone,
        DeadlineExceeded."""
        slot = self._slot(name)
        worker = slot.workers[index]
        limit_s = ANSWER_S if slot.has_answered else FORM_S
        try:
            async with asyncio.timeout(limit_s):
                await worker.describe.remote()
        except (TimeoutError, RayError) as error:
            if worker is not slot.workers[index]:
                return
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"a word from {name}", limit_s) from None
            raise translate(error, name, node=str(slot.node)) from None
        if worker is slot.workers[index]:
            slot.has_answered = True

    def free_all(self) -> None:
        """Give every placement group back; its workers end."""
        for name in tuple(self._slots):
            self._free(name)

    async def _prepare(
        self,
        demands: Sequence[EngineDemand],
        how: str,
        model: str | None,
        alone: bool,
        beside: Sequence[EngineDemand],
    ) -> dict[str, int]:
        failures: Counter[str] = Counter()
        while True:
            self._waiting_for = "an answer of Ray's GCS"
            nodes = await asyncio.to_thread(placement.live_nodes)  # within FORM_S, not NODES_S
            try:
                return await _while_alive(self._settle(demands, how, model, nodes, alone, beside), nodes)
            except _NodeLost:
                continue  # at most once per node of the cluster
            except _WorkerGone as gone:
                # A node that was killed looks alive until Ray's health check has missed it.
                failures[gone.name] += gone.is_certain
                if failures[gone.name] > 1:
                    raise gone.error from None
                self._free(gone.name)
                await asyncio.sleep(WATCH_S)

    async def _settle(
        self,
        demands: Sequence[EngineDemand],
        how: str,
        model: str | None,
        nodes: Sequence[Node],
        alone: bool,
        beside: Sequence[EngineDemand],
    ) -> dict[str, int]:
        """Keep, move, free and reserve slots until these engines have their workers."""
        self._drop_misfits(demands, nodes)
        demands = [
            replace(a, num_workers=len(self._slots[a.name].workers)) if a.name in self._slots else a
            for a in demands
        ]
        homes = self._plan(demands, how, nodes, alone, beside)
        for name, node in homes.items():
            if name in self._slots and self._slots[name].node_id != node.node_id:
                self._free(name)
        missing = [a for a in demands if a.name not in self._slots]
        # Large ones first: they have the fewest places to go.
        for demand in sorted(missing, key=lambda a: -a.num_workers):
            labels = dict(demand.labels) if how == "auto" else {NODE_ID_LABEL: homes[demand.name].node_id}
            if how == "auto" and demand.avoid is not None:
                labels[NODE_ID_LABEL] = f"!{demand.avoid}"
            group_name = f"rayk/{self._run_id}/{demand.name}{self._suffix(demand.name)}"
            group = placement.reserve_group(group_name, demand.num_workers, demand.resources, labels)
            self._slots[demand.name] = Slot(group, dict(demand.resources))
        for demand in missing:
            await self._place(demand, nodes)
        self._on_started()
        self._waiting_for = f"starting {sum(len(s.workers) for s in self._slots.values())} workers"
        descriptions = await asyncio.gather(*(self._describe(a.name, model) for a in demands))
        return {d["name"]: d["pid"] for per_slot in descriptions for d in per_slot}

    def _drop_misfits(self, demands: Sequence[EngineDemand], nodes: Sequence[Node]) -> None:
        """Free slots whose node is gone, and those that are of no use to the engines asked for."""
        alive = {n.node_id for n in nodes}
        wanted = {a.name: a for a in demands}
        for name, slot in list(self._slots.items()):
            demand = wanted.get(name)
            if slot.node_id not in alive:
                self._free(name)
            elif demand is None:
                if not self._keep:
                    self._free(name)
            elif not slot.suits(demand, exactly=not self._keep):
                self._free(name)

    def _plan(
        self,
        demands: Sequence[EngineDemand],
        how: str,
        nodes: Sequence[Node],
        alone: bool,
        beside: Sequence[EngineDemand],
    ) -> dict[str, Node]:
        """Choose a node per engine: of what is free now, else of all there is (others may soon leave)."""
        demands = with_homes(demands, {name: s.node_id for name, s in self._slots.items()})
        settled = [
            replace(b, home=s.node_id, num_workers=len(s.workers), labels={NODE_ID_LABEL: s.node_id})
            for b in beside
            if (s := self._slots.get(b.name)) is not None and s.node_id is not None
        ]
        try:
            return plan_nodes([*demands, *settled], nodes, how, free=True)
        except DeviceError:
            if settled:  # better in the wrong place than in none
                return plan_nodes(demands, nodes, "auto", free=True)
            if alone:
                raise
            for name in [n for n in self._slots if n not in {a.name for a in demands}]:
                self._free(name)
            return plan_nodes(demands, nodes, how)

    async def _place(self, demand: EngineDemand, nodes: Sequence[Node]) -> None:
        slot = self._slots[demand.name]
        self._waiting_for = (
            f"placing {demand.num_workers} workers of {demand.name} on one node, each {slot.resources}"
        )
        while (node_id := await asyncio.to_thread(placement.node_of, slot.group)) is None:
            await asyncio.sleep(PLACED_POLL_S)
        slot.node = next((n for n in nodes if n.node_id == node_id), None)
        if slot.node is None:  # it joined just now
            raise _NodeLost
        slot.bundles = [(slot.group, index) for index in range(demand.num_workers)]
        slot.workers = [self._start(demand.name, slot, index) for index in range(demand.num_workers)]

    def _start(self, name: str, slot: Slot, index: int) -> Any:
        worker = f"{name}/r{index}"
        full = f"rayk/{self._run_id}/{worker}{self._suffix(worker)}"
        return (self._start_worker or placement.start_worker)(full, *slot.bundles[index], slot.resources)

    def _suffix(self, name: str) -> str:
        # Ray frees a name only some time after its owner's death.
        count = self._starts[name]
        self._starts[name] += 1
        return f"#{count}" if count else ""

    async def _describe(self, name: str, model: str | None) -> list[dict[str, Any]]:
        """Return the facts of a slot's workers, once they answer."""
        slot = self._slots[name]
        slot.is_asked, workers = True, tuple(slot.workers)
        try:
            async with asyncio.timeout(ANSWER_S if slot.has_answered else None):
                found = list(await asyncio.gather(*(w.describe.remote() for w in workers)))
            slot.has_answered, slot.is_asked = True, False
            if model is not None and model not in slot.models:
                await slot.workers[0].check_model.remote(model)
                slot.models.add(model)
        except TimeoutError:
            raise _WorkerGone(name, DeadlineExceeded(f"a word from {name}", ANSWER_S)) from None
        except RayActorError as error:
            if workers != tuple(slot.workers):
                return await self._describe(name, model)  # others are in their places by now
            died = translate(error, name, node=str(slot.node))
            is_certain = not isinstance(error, ActorUnavailableError)
            raise _WorkerGone(name, died, is_certain=is_certain) from None
        except RayError as error:
            failure = translate(error, name, node=str(slot.node))
            if isinstance(failure, CheckpointError):
                failure.where += f" on node {slot.node}"
                if model is not None and hub_name(model) is None:
                    failure.mend = (
                        "put the model in the same folder of every node, e.g. on a shared file system"
                    )
            raise failure from None
        return found

    def _free(self, name: str) -> None:
        slot = self._slots.pop(name)
        # Groups end their workers, but not one that others have a part in, nor a process that is stopped.
        others = {id(group) for other in self._slots.values() for group in other.groups}
        if slot.is_asked or any(id(group) in others for group in slot.groups):
            for worker in slot.workers:
                placement.kill(worker)
        for group in {id(g): g for g in slot.groups if id(g) not in others}.values():
            placement.free_group(group)

    def _slot(self, name: str) -> Slot:
        if name not in self._slots:  # its node died, and somebody who looked for places saw it first
            raise EngineDied(name, "its place was given up")
        return self._slots[name]

    def _slots_of(self, demands: Sequence[EngineDemand]) -> dict[str, Slot]:
        return {a.name: self._slots[a.name] for a in demands if a.name in self._slots}


async def _while_alive(awaitable: Awaitable[T], nodes: Sequence[Node]) -> T:
    """Await a result as long as all of these nodes live. Raises _NodeLost."""
    task = asyncio.ensure_future(awaitable)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=WATCH_S)
            if done:
                return task.result()
            with contextlib.suppress(DeadlineExceeded):  # nobody says that any is lost
                now = await live_nodes()
                if not {n.node_id for n in nodes} <= {n.node_id for n in now}:
                    raise _NodeLost
    finally:
        task.cancel()
        # Its end is awaited, its result is not wanted. Not `suppress`: this may be cancelled meanwhile.
        await asyncio.gather(task, return_exceptions=True)


async def live_nodes() -> list[Node]:
    """List the nodes that Ray believes to be alive. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout(NODES_S):
            # An event loop that waits for Ray's GCS itself answers nobody meanwhile.
            return await asyncio.to_thread(placement.live_nodes)
    except TimeoutError:
        raise DeadlineExceeded("an answer of Ray's GCS", NODES_S) from None


async def name_lost_nodes(errors: Sequence[Exception], nodes: dict[str, Node]) -> None:
    """Add to engines' deaths that their node died, where Ray knows of it. `nodes` by engine name."""
    dead = [e for e in errors if isinstance(e, EngineDied) and e.engine in nodes]
    if not dead:
        return
    try:
        alive = {n.node_id for n in await live_nodes()}
    except DeadlineExceeded:
        return
    for error in dead:
        if nodes[error.engine].node_id not in alive:
            error.cause, error.rank = f"node {nodes[error.engine]} is lost", None
