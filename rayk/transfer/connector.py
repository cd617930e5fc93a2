"""The public protocol of a KV connector: what rayk asks of whoever moves a request's KV between engines.

One object stands for one rank of one engine. Its life, in the engine's words:

    connector = MyConnector(name)                   # a name no other rank has
    connector.register(caches)                      # once: the rank's KV cache, all of it
    blob = connector.describe()                     # what peers need to know
    connector.connect(producers, consumers)         # everybody's blobs, each engine's in rank order
    ...
    connector.send(request, peers)                  # on each producer rank, or
    connector.receive(request, peers)               # on each consumer rank
    for finished in connector.poll(): ...           # until the request is over here
    connector.close()

Push and pull are the same calls in another order, which `mode` names. Of a `pull` connector `send` is called
first, on every producer rank: it offers the blocks, and what it returns (a ticket) is handed to every
consumer rank's `receive`. Of a `push` connector `receive` is called first, on every consumer rank: it offers
room, and what it returns (a reservation) is handed to every producer rank's `send`. The half that is called
first gets no peers' answers; the half that is called second gets one of each peer rank, in rank order. How
these bytes travel is the engine's business; they may arrive late, or never.

Memory. The engine owns the cache and lends blocks. From `send` until `poll` reports the request, its blocks
on a producer rank are not written by the engine, and the connector reads but never writes them. From
`receive` until `poll` reports the request, its blocks on a consumer rank are the connector's to write: all
bytes of the request's blocks, rows of no token and padding included, and nothing else, not even the null
block 0. Once a request is reported, its blocks are the engine's again and may be used for another request at
once: on a consumer rank nothing may write to them any more, on a producer rank a peer that still reads them
must not report that request as done. `caches.generations` counts how often the engine has handed out each
block, so that a reader can tell.

Done. A consumer rank that reports a request without an error holds every byte of the request's live rows
(`spec.live_rows(num_tokens)` of each group: all tokens, those in the window or chunk, or the last state), for
all of its heads, visible to whoever reads the cache after `poll` has returned. A producer rank that reports
one, with or without an error, says: these blocks may be reused. Every producer rank reports, also one that
nobody reads from. Each rank reports each request exactly once.

Errors. `register`, `connect`, `send` and `receive` raise for what they cannot do, and then hold nothing of
it. What goes wrong later is reported by `poll`, in words. `poll`, `release` and `close` do not raise.

Threads and time. The engine calls from one thread; a connector may have threads of its own, which end with
`close`. No call waits for a peer: the engine polls both ends, and whoever blocks keeps it from doing so. A
request is reported at the latest `deadline_s` after its `send` or `receive`, whatever the peers do.

`rayk conformance MODULE:CLASS` tries all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rayk.kv.caches import CanonicalKVCaches

Mode = Literal["pull", "push"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVRequest:
    """One request's KV on one side. Block ids are the side's own, alike on all of its ranks."""

    request_id: str
    """The same on both sides; free for another request once every rank has reported it."""
    num_tokens: int
    """Tokens whose KV there is, from the first one on."""
    block_ids: tuple[tuple[int, ...], ...]
    """Per KV group, by position in the sequence: entry i holds tokens i * block_size to
    (i + 1) * block_size - 1. 0 stands for blocks in which nothing is live."""
    deadline_s: float
    """Seconds from the call after which the request is reported, one way or the other."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is over on this rank."""

    request_id: str
    error: str = ""
    """Why it failed; empty when it is done."""

    @property
    def ok(self) -> bool:
        """Done."""
        return not self.error


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectorCase:
    """A pair of engines that a connector may be asked to serve; pairs are (producer, consumer)."""

    kinds: tuple[str, ...]
    """Kinds of the layers' caches, as the specs of `rayk/kv/specs.py` name them."""
    num_kv_heads: int
    num_query_heads: int
    tp: tuple[int, int]
    layouts: tuple[str, str]
    """Orders of the axes Layer, Block, Head, tokeN and Content in memory."""
    block_sizes: tuple[int, int]
    """Tokens per block of attention."""
    kv_format: str = "bfloat16"
    """Format of keys and values: a name of rayk.kv.formats. Their scales, if any, are fields of the page."""
    fault: str = ""
    """What goes wrong; empty in a case where nothing does."""
    dcp: tuple[int, int] = (1, 1)
    """Over how many ranks of a stage the tokens of a sequence are dealt, where these hold the same heads."""
    dcp_interleave: tuple[int, int] = (1, 1)
    """Consecutive tokens of one of these ranks, before the next has its turn."""
    pp: tuple[int, int] = (1, 1)
    """Pipeline stages, of `tp` ranks and a run of layers each."""

    @property
    def is_alike(self) -> bool:
        """Both engines lay out their caches in one way: a block's bytes are the same on both sides."""
        pairs = (self.tp, self.dcp, self.dcp_interleave, self.pp, self.layouts, self.block_sizes)
        return all(pair[0] == pair[1] for pair in pairs)


@runtime_checkable
class Connector(Protocol):
    """A class is called with one argument, the rank's name, unique among all ranks.

    Besides the methods below a class may have (`BaseConnector` does, with these values):

    - `mode`, "pull" or "push": which half of a request comes first; "pull";
    - `is_cross_process`: whether the ranks may be in unlike processes; True;
    - `moves_whole_blocks_only`: whether requests must fill their last block; False. The kit then asks for no
      others, and lists the checks that need them as unsupported;
    - `supports(case)`, a static or class method: why it cannot serve a ConnectorCase, in words, or None.
      What is refused there is listed as unsupported, and is no failure;
    - `held()`: what the rank holds, by name (registrations, requests, peers, ...). All zero after `close`.
    """

    def register(self, caches: CanonicalKVCaches) -> None:
        """Get the rank's KV cache ready to be read and written, and remember how it is laid out.

        `caches.buffer` is the one dense allocation, int8 [bytes]; `caches.geometry` says where everything
        lies in it, `caches.tensors` and `caches.references` where the blocks of each group do, and
        `caches.view(layer, part)` gives what a layer's kernels use. Called once; a second call raises, and
        leaves the first cache as it is. The buffer lives until after `close`.
        """
        ...

    def describe(self) -> bytes:
        """Return what peers need to know about this rank: addresses, geometry, how to reach it. After
        `register`."""
        ...

    def connect(self, producers: Sequence[bytes], consumers: Sequence[bytes]) -> None:
        """Meet the other engine: the descriptions of all ranks of both, this rank's among them.

        Raises when the two cannot work together, saying why. Does not wait for peers: others connect later.
        """
        ...

    def send(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        """Producer rank: the request's KV is in these blocks; bring it to the consumer engine, or let it be
        fetched.

        Returns what the consumer ranks' `receive` needs (pull) or nothing of importance (push). Raises when
        the request id is in flight on this rank.
        """
        ...

    def receive(self, request: KVRequest, peers: Sequence[bytes] = ()) -> bytes:
        """Consumer rank: put the request's KV into these blocks, which may be more or fewer than the
        producer's, of another size.

        Returns what the producer ranks' `send` needs (push) or nothing of importance (pull). Raises when the
        request id is in flight on this rank.
        """
        ...

    def poll(self) -> Sequence[Finished]:
        """Make progress, briefly; requests that have come to their end here since the last call."""
        ...

    def release(self, request_id: str) -> None:
        """The engine gives the request up on this rank: end it soon, and report it as ever (as done if it is,
        else with an error). A request that is unknown or over, or was released before: nothing happens."""
        ...

    def close(self) -> None:
        """Give everything back: registrations, threads, connections. Unreported requests stay unreported,
        nothing touches the cache any more, and peers' requests fail. Again: nothing happens."""
        ...


class BaseConnector:
    """Much of a connector: keeps the cache and what has finished. See `Connector` for the methods.

    A connector that moves bytes within its calls needs `describe`, `send` and `receive` besides.
    """

    mode: Mode = "pull"
    is_cross_process: bool = True
    moves_whole_blocks_only: bool = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._caches: CanonicalKVCaches | None = None
        self._finished: list[Finished] = []

    @classmethod
    def supports(cls, case: ConnectorCase) -> str | None:
        """Say why this case cannot be served, or None."""
        return None

    @property
    def caches(self) -> CanonicalKVCaches:
        """What was registered. AssertionError before."""
        assert self._caches is not None, "nothing is registered"
        return self._caches

    def register(self, caches: CanonicalKVCaches) -> None:
        if self._caches is not None:
            raise ValueError(f"{self.name} has a cache already")
        self._caches = caches

    def connect(self, producers: Sequence[bytes], consumers: Sequence[bytes]) -> None:
        """Do nothing: there is nothing to prepare."""

    def is_unreported(self, request_id: str) -> bool:
        """Tell whether `finish` was called for it and no `poll` has told so yet: its id is still taken."""
        return any(finished.request_id == request_id for finished in self._finished)

    def finish(self, request_id: str, error: str = "") -> None:
        """Have the next `poll` report the request. Raises ValueError when it is waiting for that already."""
        if self.is_unreported(request_id):
            raise ValueError(f"{request_id} is over and not yet reported")
        self._finished.append(Finished(request_id, error))

    def poll(self) -> Sequence[Finished]:
        """Return what `finish` was called for since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def release(self, request_id: str) -> None:
        """Nothing is ever in flight."""

    def held(self) -> Mapping[str, int]:
        """Registrations, and requests to be reported."""
        return {"registrations": int(self._caches is not None), "requests": len(self._finished)}

    def close(self) -> None:
        self._caches = None
        self._finished.clear()
