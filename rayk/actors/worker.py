"""Worker: owns one device (a GPU, a share of one, or a CPU slot) and one rank of an engine at a time.

A plain class; `launch` makes it a Ray actor. `form` builds the rank, `run` is its loop until `stop`, and
`generate` streams one request's events (rank 0). Workers outlive engines: the next cell forms a new one.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import platform
import queue
import socket
import threading
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rayk.actors.agents import make_agent
from rayk.actors.naming import rank_in_words
from rayk.actors.phases import phases_of
from rayk.actors.rank_spec import RankSpec as RankSpec
from rayk.actors.ray_metrics import make_meter
from rayk.actors.tier_client import RayTier
from rayk.actors.tokenizer import load_decoder, load_vocabulary
from rayk.engine.build import make_leader, make_rank
from rayk.engine.leader import Leader, RequestEvent, dead_engine
from rayk.engine.loop import EngineLoop, NoExtension, RankExtension, TurnStats
from rayk.engine.paced import PacedRank, watch_pace
from rayk.engine.rank import EngineRank
from rayk.engine.record import RecordedSteps, StepRecorder, recorder
from rayk.engine.stats import rank_stats
from rayk.handover.engine_request import EngineRequest
from rayk.handover.extension import CaptureExtension, TransferExtension
from rayk.handover.fault_injection import FaultyExtension, end_or_stop_process, pusher_agent
from rayk.handover.handover import TransferHandover
from rayk.handover.planted import commit_wrong_kv, kill_raylet
from rayk.handover.tier_side import TierFacts
from rayk.handover.transfer_metrics import begin_transfers, watch_handover
from rayk.lines.line import Funnel, Last, LineAddress, LineService, LineThread
from rayk.metrics import Meter
from rayk.models.families import load_config
from rayk.models.headers import check_weights
from rayk.models.hub import model_folder
from rayk.parallel.factory import make_comm
from rayk.parallel.timed import timed
from rayk.transfer.faulty_agent import FaultyAgent
from rayk.transfer.push_messages import PUSH_AGENT
from rayk.types.bugs import LOG
from rayk.types.errors import CommError, DeadlineExceeded, EngineDied, RaykError
from rayk.types.request import Request

LET_GO_S = 1.0
"""How long what a lost engine's rank held may be held by others still."""
ABORTED_KEPT = 4096
"""Requests that were aborted before they came are remembered, the last of them."""
FLUSH_S = 0.004
"""How long tokens after a request's first one are gathered before they leave."""


class Worker:
    """One process with one device. None of its methods may be a coroutine: see LineStreams."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._spec: RankSpec | None = None
        self._rank: EngineRank | None = None
        self._loop: EngineLoop | None = None
        self._leader: Leader | None = None
        self._handover: TransferHandover | None = None
        self._extension: RankExtension = NoExtension()
        self._meter = Meter()
        self._recorder: StepRecorder | None = None
        self._lock = threading.Lock()
        self._line: LineThread | None = None
        self._tier: RayTier | None = None
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._ended = threading.Event()
        """The loop is over."""
        self._lost_peer = False
        """Whether it ended because another rank did."""
        # A full collection over torch's own objects takes 100 ms, in the middle of somebody's first token:
        # what is imported stays, so it is never looked at again.
        gc.collect()
        gc.freeze()
        self._start_cpu_s = time.process_time()
        """Processor time that this process took to be here."""

    def __repr__(self) -> str:
        return f"Worker({rank_in_words(self.name)})"

    def describe(self) -> dict[str, Any]:
        """Return facts of the process and the device."""
        device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or "cpu"
        return {
            "name": self.name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "device": device,
            "torch": torch.__version__,
        }

    def clock_ns(self) -> int:
        """Return this host's monotonic clock, which events are stamped with."""
        return time.monotonic_ns()

    def check_model(self, model: str) -> None:
        """Raise CheckpointError when this node has no such checkpoint and cannot fetch it, or only a part of
        it."""
        folder = model_folder(model)
        load_config(folder)
        check_weights(folder)

    def reserve_address(self) -> str:
        """Find a free host:port where the ranks of an engine meet. They share a node: loopback will do."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{s.getsockname()[1]}"

    def form(self, spec: RankSpec) -> dict[str, Any]:
        """Become a rank of an engine: join its group, load the weights' share, allocate the cache.

        Raises what engine and comm raise; the worker is then empty again.
        """
        self.dissolve()
        self._spec = spec
        self._ended.clear()
        self._lost_peer = False
        began_s = time.process_time()
        if spec.config.device == "cpu":
            torch.set_num_threads(1)
        comm, comm_reason = make_comm(
            spec.config.comm,
            spec.rank,
            spec.config.num_ranks,
            spec.address,
            device=spec.config.device,
            timeout_s=spec.comm_timeout_s,
            secret=spec.secret,
        )
        try:
            commit = functools.partial(commit_wrong_kv, faults=spec.faults)
            located = replace(spec.config, model=str(model_folder(spec.config.model)))
            self._rank = make_rank(located, timed(comm), on_loaded=commit)
            self._meter = make_meter(
                spec.config.model, engine=spec.engine, role=spec.role, rank=str(spec.rank)
            )
            if spec.role != "aggregated":
                begin_transfers(self._meter, is_leader=spec.rank == 0)
            loaded_s = time.process_time()
            self._extension = self._make_extension(self._rank, spec)
            if spec.rank == 0:
                self._handover = TransferHandover(
                    engine=spec.engine,
                    epoch=spec.epoch,
                    shape=self._rank.plan.ranks[0].shape,
                    offload=spec.offload,
                )
                decoder = functools.partial(load_decoder, spec.config.model)
                vocabulary = functools.partial(load_vocabulary, spec.config.model)
                self._leader = make_leader(self._rank, self._handover, decoder, vocabulary)
        except BaseException:
            comm.close()
            self.dissolve()
            raise
        stats: TurnStats = rank_stats(self._meter, self._rank, self._leader)
        if spec.config.record_steps and self._leader is not None:
            stats = self._recorder = recorder(self._rank, self._leader, stats)
        if self._handover is not None:
            watch_handover(self._meter, self._handover)
        if isinstance(self._rank, PacedRank) and self._leader is not None:
            watch_pace(self._meter, self._rank.pace)
        self._loop = EngineLoop(self._rank, self._extension, self._leader, on_step=self._on_step, stats=stats)
        plan = self._rank.plan
        return {
            "backend": self._rank.backends.implementation,
            "comm": comm.name,
            "comm_reason": comm_reason,
            "decode_graphs": self._rank.graphs_note,
            "scheduling": self._rank.scheduling_note,
            "weights": self._rank.weights_note,
            "num_fast_prefill_layers": len(self._rank.fast_prefill_layers),
            "layout": plan.resolution.layout.name,
            "kv_scales": self._rank.decoder.kv_scales,
            "vetoes": plan.resolution.vetoes,
            "block_sizes": [g.spec.block_size for g in plan.groups],
            "kernel_block_sizes": list(plan.kernel_block_sizes),
            "groups": [(g.spec.kind, list(g.layers)) for g in plan.groups],
            "buffer_bytes": self._rank.caches.geometry.buffer_bytes,
            "load_memory": asdict(self._rank.load_memory),
            "cpu_s": {
                "start": round(self._start_cpu_s, 3),
                "load": round(loaded_s - began_s, 3),
                "transport": round(time.process_time() - loaded_s, 3),
            },
        }

    def run(self) -> None:
        """Run the rank's loop until `stop`. Raises EngineDied when it ends any other way, InternalError of a
        bug."""
        assert self._loop is not None, "form first"
        try:
            self._run()
        finally:
            try:
                self._meter.flush()
            finally:
                self._ended.set()  # who releases this rank waits for it

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run()
        except Exception as error:  # noqa: BLE001 - whatever ended the loop must reach every client
            assert self._spec is not None
            self._lost_peer = isinstance(error, CommError)
            died = dead_engine(self._spec.engine, error, self._spec.rank)
            if isinstance(died, EngineDied) and not isinstance(error, RaykError):
                LOG.exception("the loop of %s rank %d ended", self._spec.engine, self._spec.rank)
                died.cause += "\n" + traceback.format_exc(limit=-4)
            # Peers that wait for this rank learn of it now, not at their timeout.
            assert self._rank is not None
            self._rank.comm.close()
            if self._leader is not None:
                self._leader.fail(died)
            _let_go(error)
            _let_go(died)
            raise died from None
        else:
            if self._leader is not None:
                self._leader.fail(EngineDied(self.name, "stopped"))

    def call(self, command: object, timeout_s: float) -> list[object]:
        """Run a command on every rank of this engine (rank 0 only); one result per rank."""
        assert self._leader is not None, "only rank 0 takes commands"
        try:
            return self._leader.call(command).result(timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"{type(command).__name__} on {self.name}", timeout_s) from None

    def generate(self, asked: EngineRequest) -> Iterator[list[RequestEvent]]:
        """Run a request and yield its events as they come: those up to its first token at
        once, later ones gathered."""
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        engine = self._spec.engine if self._spec is not None else self.name
        phases = phases_of(asked.request.request_id, engine, asked.mode)
        try:
            self._submit(asked, events.put)
            first, is_over = True, False
            while not is_over:
                batch = [events.get()]
                if not first and not batch[0].is_last:
                    time.sleep(FLUSH_S)
                while not events.empty():
                    batch.append(events.get())
                phases.see(batch)
                first = first and not any(event.token_ids for event in batch)
                is_over = batch[-1].is_last
                yield batch
        finally:
            phases.end()

    def open_line(self, host: str) -> LineAddress:
        """Let fronts `generate` without Ray in between, until the engine is dissolved (rank 0)."""
        assert self._leader is not None, "requests go to rank 0"
        self._close_line()
        streams = LineStreams(self._prepare, self._submit, self.abort, FLUSH_S)
        self._line = LineThread(LineService(streams={"generate": streams.generate}))
        return self._line.open(host)

    def _prepare(self, request: Request) -> None:
        assert self._leader is not None, "requests go to rank 0"
        self._leader.prepare(request)

    def _submit(self, asked: EngineRequest, put: Callable[[RequestEvent], Any]) -> None:
        """Run a request; the engine's thread puts its events."""
        assert self._leader is not None, "requests go to rank 0"
        assert self._handover is not None
        request = asked.request
        if asked.mode == "decode":
            assert asked.ticket is not None
            self._handover.submit_decode(
                request,
                asked.ticket,
                asked.output_token_ids,
                asked.transfer_s,
                put,
                reserve_s=asked.reserve_s,
                recompute=asked.recompute,
            )
        elif asked.mode == "reserve":
            wait_s = asked.transfer_s if asked.reserve_s is None else asked.reserve_s
            self._handover.submit_reserve(
                request, put, producer=asked.producer, reserve_s=wait_s, hold_s=asked.hold_s
            )
        else:
            self._handover.submit(
                request,
                put,
                hand_over=asked.mode == "prefill",
                capture=asked.capture,
                via_host=asked.via_host,
                output_token_ids=asked.output_token_ids,
                reservation=asked.reservation,
            )
        if request.request_id in self._aborted:
            # The abort ran on another thread and overtook this call.
            self._leader.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """Stop a request, also one whose `generate` is still on its way."""
        self._aborted[request_id] = None
        while len(self._aborted) > ABORTED_KEPT:
            self._aborted.popitem(last=False)
        leader = self._leader
        if leader is not None:
            leader.abort(request_id)

    def attach_tier(self, handle: Any, facts: TierFacts) -> None:
        """Store in this host tier, and load from it, from now on (rank 0): its ranks are connected."""
        assert self._leader is not None, "only rank 0 asks"
        assert self._handover is not None
        offloading = self._handover.offloading
        assert offloading is not None, "an engine without offloading"
        self._close_tier()
        # Word of its end may come when another one is attached.
        tier = RayTier(handle, self._leader.post, lambda why: offloading.lost(why, facts.epoch))
        self._tier = tier
        self._leader.post(lambda: offloading.attach(tier, facts))

    def lose_tier(self, epoch: int, why: str) -> None:
        """Forget a host tier that is gone (rank 0)."""
        leader, handover = self._leader, self._handover
        if leader is not None and handover is not None:
            offloading = handover.offloading
            if offloading is not None:
                leader.post(lambda: offloading.lost(why, epoch))

    def settle(self, request_id: str) -> None:
        """Free what was kept for a failed request, after it was looked into."""
        handover = self._handover
        if handover is not None:
            handover.settle(request_id)

    def holders(self, block_ids: Sequence[int], timeout_s: float) -> dict[int, str]:
        """Return which request holds each of these blocks now, also by a lease (rank 0); free blocks are
        absent."""
        assert self._leader is not None, "only rank 0 knows"
        assert self._handover is not None
        handover, answer = self._handover, Future[dict[int, str]]()
        self._leader.post(lambda: answer.set_result(handover.holders(block_ids)))
        return answer.result(timeout_s)

    def status(self) -> dict[str, Any]:
        """Return counters of the rank: turns, steps, times, blocks, leases."""
        report: dict[str, Any] = {"name": self.name, "pid": os.getpid()}
        # Another thread may dissolve the engine meanwhile.
        loop, rank, leader, handover = self._loop, self._rank, self._leader, self._handover
        if loop is not None:
            times = loop.times
            report |= {
                "num_turns": times.num_turns,
                "num_steps": times.num_steps,
                "turn_ns": times.turn_ns,
                "model_ns": times.model_ns,
                "num_computed_tokens": times.num_computed_tokens,
                "num_sampled_tokens": times.num_sampled_tokens,
            }
        if rank is not None:
            report["num_token_layers"] = rank.num_token_layers
        if isinstance(rank, PacedRank):
            report["pace"] = asdict(rank.pace.report())
        if leader is not None:
            report |= {
                "num_free_blocks": leader.manager.pool.num_free_blocks,
                "num_blocks": leader.manager.pool.num_blocks,
                "leases": self._leases(leader, handover),
                "ledger": leader.manager.ledger,
                "num_running": leader.scheduler.num_running,
                "num_waiting": leader.scheduler.num_waiting,
                "num_preemptions": leader.scheduler.num_preemptions,
            }
            if leader.manager.has_riders and leader.scheduler.drafting is not None:
                report["num_undrafted_requests"] = leader.scheduler.drafting.num_undrafted
                report["num_undrafted_tokens"] = leader.manager.num_undrafted_tokens
            if handover is not None and handover.offloading is not None:
                report["offload"] = handover.offloading.status()
        return report

    def recorded_steps(self) -> RecordedSteps | None:
        """Return the engine's steps so far (rank 0, of an engine with `record_steps`)."""
        recorder = self._recorder
        return None if recorder is None else recorder.recorded()

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks leaked (rank 0, after its loop ended)."""
        leader = self._leader
        if leader is not None:
            leader.check_integrity()

    def take_role(self, role: str) -> None:
        """Report this rank under another role from now on."""
        self._meter.relabel(role=role)

    def stop(self) -> None:
        """Let the engine's loop end (rank 0)."""
        leader = self._leader
        if leader is not None:
            leader.stop()

    def dissolve(self) -> None:
        """Forget the engine: unbind, deregister, leave the group. The process and its agent stay."""
        with self._lock:
            self._close_line()
            self._close_tier()
            rank, self._rank = self._rank, None
            extension, self._extension = self._extension, NoExtension()
            self._loop = self._leader = self._handover = self._recorder = None
            self._meter = Meter()  # the last one asks this engine's objects
            self._aborted.clear()
            if isinstance(extension, TransferExtension | CaptureExtension):
                extension.close()
            if rank is not None:
                rank.comm.close()
                rank.close()
            del rank, extension
            gc.collect()  # between engines, not inside one

    def release(self, within_s: float) -> bool:
        """Forget an engine whose other ranks died; returns whether this process is as good as new. It is not
        where its own loop failed, or does not end in time."""
        if not self._ended.wait(within_s) or not self._lost_peer:
            return False
        extension = weakref.ref(self._extension)
        self.dissolve()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what was being read into it
        until = time.monotonic() + LET_GO_S
        while extension() is not None and time.monotonic() < until:
            time.sleep(LET_GO_S / 20)  # another thread's frames, on their way out
            gc.collect()
        return extension() is None

    def _close_tier(self) -> None:
        tier, self._tier = self._tier, None
        if tier is not None:
            tier.close()

    def _close_line(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    @staticmethod
    def _leases(leader: Leader, handover: TransferHandover | None) -> tuple[str, ...]:
        """List what holds blocks for another engine: leases, reservations, and reads that do not end."""
        if handover is None:
            return leader.manager.leases
        reserved, in_flight = handover.reservations.open_reservations, handover.receiving.in_flight
        offloading = handover.offloading
        stored = offloading.storing.in_outboxes if offloading is not None else ()
        return (*leader.manager.leases, *reserved, *in_flight, *handover.lending.in_outboxes, *stored)

    def _make_extension(self, rank: EngineRank, spec: RankSpec) -> CaptureExtension | TransferExtension:
        if spec.role == "aggregated" and spec.offload is None:
            return CaptureExtension(rank)
        # A host tier may die, and both ends of a link must look out for that, or neither.
        is_watched = spec.spans_nodes or spec.notices_deaths or spec.offload is not None
        handling = "peer" if is_watched else "none"
        name = f"{self.name}-{os.getpid()}-{spec.epoch}"
        agent = make_agent(name, handling)
        settings: dict[str, Any] = {
            "engine": spec.engine,
            "epoch": spec.epoch,
            "lease_s": spec.lease_s,
            "renewed_lease_s": spec.renewed_lease_s,
            "staging": spec.staging,
            "token_classes": spec.token_classes,
            "outbox_bytes": None if spec.offload is None else spec.offload.outbox_bytes,
            "faults": spec.faults,
            "on_point": self._on_point,
            "meter": self._meter,
        }
        transfer_faults = [f.transfer_fault for f in spec.faults if f.transfer_fault is not None]
        if spec.push is not None:
            settings["push_layers"] = spec.push.layers
            settings["make_push_agent"] = lambda: pusher_agent(
                make_agent(name + PUSH_AGENT, handling), spec.role, transfer_faults
            )
        if not transfer_faults:
            return TransferExtension(rank, agent, **settings)
        faulty = FaultyAgent(agent, end_or_stop_process, spec.role)
        return FaultyExtension(rank, faulty, transfer_faults=transfer_faults, **settings)

    def _on_step(self, step: int) -> None:
        assert self._spec is not None
        point = "decode" if self._spec.role == "decode" else "prefill"
        self._on_point(point, step)

    def _on_point(self, point: str, step: int) -> None:
        """Carry out planted kills: end or stop this process, or end its node (kill_node)."""
        assert self._spec is not None
        for fault in self._spec.faults:
            if fault.point == point and (fault.step or 1) == step:
                if fault.kind == "kill_node":
                    kill_raylet()
                if fault.kind in ("kill", "kill_node", "restart", "stop"):
                    end_or_stop_process(fault.kind)


def _let_go(error: BaseException) -> None:
    """Clear an error's frames and causes: they hold the rank, which is to be forgotten soon."""
    error.__context__ = error.__cause__ = error.__traceback__ = None


@dataclass(frozen=True, slots=True)
class LineStreams:
    """A worker's requests as streams over its line.

    These are no methods of the worker itself. Where one method of an actor's class is a coroutine, Ray runs
    all of them on event loops, and those that are none one at a time, each until it ends.
    """

    prepare: Callable[[Request], object]
    """Loads a tokenizer for the first request that has stop strings."""
    submit: Callable[[EngineRequest, Callable[[RequestEvent], Any]], None]
    """Worker._submit."""
    abort: Callable[[str], None]
    """Ends a request whose caller went."""
    flush_s: float
    """How long later events are gathered."""

    async def generate(self, asked: EngineRequest) -> AsyncIterator[list[RequestEvent] | Last]:
        """Do on the line's loop what Worker.generate does. The request is aborted when its caller goes."""
        request = asked.request
        if request.sampling.stop:  # the first of these loads a tokenizer, while other streams go on
            await asyncio.to_thread(self.prepare, request)
        events = Funnel()
        self.submit(asked, events.put)
        first, is_over = True, False
        try:
            while not is_over:
                await events.wait()
                batch: list[RequestEvent] = events.take()
                if not first and not batch[-1].is_last:
                    await asyncio.sleep(self.flush_s)
                    batch += events.take()
                first = first and not any(event.token_ids for event in batch)
                is_over = batch[-1].is_last
                yield Last(batch) if is_over else batch
        finally:
            if not is_over:
                self.abort(request.request_id)
