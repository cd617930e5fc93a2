"""Connectors that each do one thing wrong, as connectors have done."""

from __future__ import annotations

import os
import pickle
import threading
import time
from dataclasses import replace

from rayk.transfer.agent import TransferState
from rayk.transfer.connector import Finished, KVRequest
from rayk.transfer.connectors import layer_views
from rayk.transfer.local_agent import LocalAgent
from rayk.transfer.push_connectors import LocalPushConnector
from rayk.transfer.transports import LOCAL_DELAY_POLLS, LOCAL_NETWORK
from tests.conformance.copying import DELAY_POLLS, RANKS, Copying


class NextHead(Copying):
    """Takes the next head, where TP sizes differ: its first rank's share begins at 1."""

    def copy(self, reads, theirs, shift=0):
        ours = self.caches.geometry
        if ours.tp_size < theirs.caches.geometry.tp_size and theirs.caches.geometry.tp_rank == 0:
            shift = ours.groups[reads.group].fields[0].unit_stride
        super().copy(reads, theirs, shift)


class WholeBlocksOnly(Copying):
    """Forgets the last block where it is not full."""

    def push(self, request, consumer):
        size = self.caches.geometry.groups[0].block_size
        whole = request.num_tokens // size * size
        super().push(replace(request, num_tokens=whole), consumer)


class DoneEarly(Copying):
    """Tells the consumer that all is there when it has only been asked to send."""

    def send(self, request, peers=()):
        answer = super().send(request, peers)
        for consumer in self.consumers:
            RANKS[consumer].finish(request.request_id)
        return answer

    def give_up(self, request_id, error):
        self.waiting.pop(request_id, None)
        self.requests.pop(request_id, None)


class FreedEarly(Copying):
    """Says that the producer's blocks are free as soon as it was asked to send them."""

    def send(self, request, peers=()):
        answer = super().send(request, peers)
        self.finish(request.request_id)
        return answer

    def sent(self, request):
        pass


class SwappedKV(Copying):
    """Puts V where K should be."""

    def copy(self, reads, theirs, shift=0):
        super().copy(reads, theirs, shift)
        group = theirs.caches.geometry.groups[reads.group].group
        for layer in group.layers:
            view = theirs.caches.view(layer)
            blocks = reads.destination_blocks.tolist()
            half = view.shape[-1] // 2
            view[blocks] = view[blocks].roll(half, dims=-1)


class NullBlock(Copying):
    """Also writes into block 0."""

    def push(self, request, consumer):
        super().push(request, consumer)
        RANKS[consumer].caches.tensors[0][0, :4] = 7


class WritesLate(Copying):
    """Writes the last byte of a block once more when the request has been reported."""

    late = None

    def poll(self):
        if self.late is not None:
            self.caches.tensors[0][self.late, -1:] = 7
            self.late = None
        reported = super().poll()
        if self.name in self.consumers and any(finished.ok for finished in reported):
            self.late = self.last.block_ids[0][-1]
        return reported

    def receive(self, request, peers=()):
        self.last = request
        return super().receive(request, peers)


class NextTurn(Copying):
    """Gives each rank the tokens of the next one, where tokens are dealt."""

    def plan(self, consumer):
        if self.geometries[consumer].shape.dcp > 1:
            consumer = self.consumers[(self.consumers.index(consumer) + 1) % len(self.consumers)]
        return super().plan(consumer)


class LastStageAlone(Copying):
    """Forgets the layers of all pipeline stages but the last."""

    def copy(self, reads, theirs, shift=0):
        geometry = self.caches.geometry
        if geometry.share.stage == geometry.shape.pp - 1:
            super().copy(reads, theirs, shift)


class UnreadRanksForgotten(Copying):
    """Producer ranks that nobody reads from never hear that their blocks are free."""

    def sent(self, request):
        mine = self.producers.index(self.name)
        if any(mine in self.plan(consumer).producer_ranks for consumer in self.consumers):
            super().sent(request)


class Twice(Copying):
    """Reports a request a second time."""

    def sent(self, request):
        super().sent(request)
        self._finished += self._finished


class Hangs(Copying):
    """Waits in `poll` for what never comes."""

    def poll(self):
        if self.sending:
            threading.Event().wait()
        return super().poll()


class Raises(Copying):
    """Lets an error out of `poll`."""

    def push(self, request, consumer):
        raise KeyError(request.request_id)


class NoDeadline(Copying):
    """Waits for a sender for ever."""

    def receive(self, request, peers=()):
        return super().receive(replace(request, deadline_s=1e9), peers)


class DoneAnyhow(Copying):
    """Says that a request is done when its deadline has passed."""

    def give_up(self, request_id, error):
        super().give_up(request_id, "")


class Threads(Copying):
    """Leaves a thread behind."""

    def __init__(self, name):
        super().__init__(name)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class SecondCache(Copying):
    """Takes a second cache in place of the first."""

    def register(self, caches):
        self._caches = caches


class Keeps(Copying):
    """Holds a request that is over."""

    def held(self):
        return super().held() | {"requests": 1}


class ChangesSource(Copying):
    """Marks the producer's page as sent, in the page."""

    def push(self, request, consumer):
        super().push(request, consumer)
        self.caches.tensors[0][request.block_ids[0][0], 5] ^= 1


class Finishes(Copying):
    """Reports what nobody asked for."""

    def poll(self):
        return [*super().poll(), Finished("something else")]


class NoTwins(Copying):
    """Lets a request id be in flight twice."""

    def receive(self, request, peers=()):
        self.waiting.pop(request.request_id, None)
        return super().receive(request, peers)


class Dies(Copying):
    """Takes its process with it."""

    def push(self, request, consumer):
        print("a last word", flush=True)
        os._exit(3)


class LosesBehind64(Copying):
    """Forgets the blocks of a read behind the 64th."""

    def copy(self, reads, theirs, shift=0):
        first = {name: getattr(reads, name)[:64] for name in ("source_blocks", "destination_blocks")}
        super().copy(replace(reads, **first), theirs, shift)


class ByteIds(Copying):
    """Cuts block ids to one byte."""

    def copy(self, reads, theirs, shift=0):
        cut = {name: getattr(reads, name) & 0xFF for name in ("source_blocks", "destination_blocks")}
        super().copy(replace(reads, **cut), theirs, shift)


class ScalesForgotten(Copying):
    """Leaves scales as they were."""

    def copy(self, reads, theirs, shift=0):
        blocks = reads.destination_blocks.tolist()
        scales = [f.view for v in layer_views(theirs.caches) for f in v.fields if f.name.endswith("_scale")]
        were = [view[blocks].clone() for view in scales]
        super().copy(reads, theirs, shift)
        for view, was in zip(scales, were, strict=True):
            view[blocks] = was


class CheckThenRead(Copying):
    """Pulls: sees in `receive` that the producer's blocks are lent, reads them some polls later, and does not
    look again."""

    mode = "pull"

    def __init__(self, name):
        super().__init__(name)
        self.offered: dict[str, tuple[KVRequest, float, set[str]]] = {}
        """Requests of this producer rank: deadline, and consumer ranks that have yet to read."""
        self.reading: dict[str, tuple[int, KVRequest, list[KVRequest]]] = {}
        """Requests of this consumer rank: polls left, request, what each producer rank offered."""

    def send(self, request, peers=()):
        if request.request_id in self.offered:
            raise ValueError(f"{request.request_id} is being sent")
        self.offered[request.request_id] = (
            request,
            time.monotonic() + request.deadline_s,
            set(self.consumers),
        )
        return pickle.dumps(self.name)

    def receive(self, request, peers=()):
        if request.request_id in self.reading:
            raise ValueError(f"{request.request_id} is being received")
        if any(p not in RANKS or request.request_id not in RANKS[p].offered for p in self.producers):
            raise ValueError(f"{request.request_id} is not offered")
        offers = [RANKS[p].offered[request.request_id][0] for p in self.producers]
        self.reading[request.request_id] = (DELAY_POLLS, request, offers)
        return b""

    def poll(self):
        for request_id, (polls_left, request, offers) in list(self.reading.items()):
            self.reading[request_id] = (polls_left - 1, request, offers)
            if not polls_left:
                self.read(request, offers)
        for request_id, (_, deadline, left) in list(self.offered.items()):
            if not left or time.monotonic() > deadline:
                del self.offered[request_id]
                self.finish(request_id, "nobody read it in time" if left else "")
        return super().poll()

    def read(self, request, offers):
        for rank, (name, offer) in enumerate(zip(self.producers, offers, strict=True)):
            if name not in RANKS:
                self.end(request.request_id, "a producer is gone")
                return
            for reads in self.plan(self.name).lower(offer.num_tokens, offer.block_ids, request.block_ids):
                if reads.producer_rank == rank:
                    RANKS[name].copy(reads, self)
        self.end(request.request_id, "")

    def end(self, request_id, error):
        if self.reading.pop(request_id, None) is not None:
            self.finish(request_id, error)
            for name in self.producers:
                if name in RANKS and request_id in RANKS[name].offered:
                    RANKS[name].offered[request_id][2].discard(self.name)

    def release(self, request_id):
        self.end(request_id, "released")
        if self.offered.pop(request_id, None) is not None:
            self.finish(request_id, "released")

    def held(self):
        return super().held() | {"requests": len(self.offered) + len(self.reading)}

    def close(self):
        super().close()
        self.offered.clear()
        self.reading.clear()


class _TellsFirst(LocalAgent):
    """Tells of a write when it is posted, and takes it for done; its bytes follow two polls later."""

    def write(self, handle, local_indices, remote_indices, notification=None):
        peer = self._handles[handle].peer
        transfer = super().write(handle, local_indices, remote_indices)
        self.notify(peer, notification)
        return transfer

    def poll(self, transfer):
        return TransferState.DONE

    def release(self, transfer):
        return True

    def notifications(self):
        for transfer in list(self._in_flight):
            if LocalAgent.poll(self, transfer) is TransferState.DONE:
                LocalAgent.release(self, transfer)
        return super().notifications()


class PushTellsFirst(LocalPushConnector):
    """Sends the notification of a write before its bytes."""

    def make_agent(self, name):
        return _TellsFirst(name, LOCAL_NETWORK, delay_polls=LOCAL_DELAY_POLLS)


class PushForgetsLayers(LocalPushConnector):
    """Counts its layers by their first group: those behind are not written."""

    def connect(self, producers, consumers):
        super().connect(producers, consumers)
        if self._pusher is None:
            return
        num_layers = len(self.caches.geometry.groups[0].group.layers)
        worker = self._pusher._worker
        worker.links = {
            name: replace(link, layers=link.layers[:num_layers]) for name, link in worker.links.items()
        }
        computed = worker.computed
        worker.computed = lambda layer, *rest: computed(layer, *rest) if layer < num_layers else None
