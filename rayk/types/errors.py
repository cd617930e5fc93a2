"""Errors people meet, as dataclasses so that they cross a Ray (pickle) boundary intact.

RaykError
├── UserError             the input is bad: exit code 2, nothing was started
│   ├── SpecError         the experiment file: where, what, how to mend it
│   ├── CheckpointError   the model folder
│   ├── UnsupportedArchitecture
│   ├── DeviceError       the machine or cluster cannot give what was asked
│   ├── DiskUnavailable   a folder's disk is full, read-only or fails: pages go without it
│   ├── OutsideHull       a step is unlike any that a cost table was fitted to
│   ├── UnknownEngine     a server has no engine of that name
│   └── RoleConflict      an engine of a server cannot change its role, as things are
├── Unsupported           the model itself cannot run this way (verdict UNSUPPORTED)
├── LayoutVetoed          no KV-cache layout is accepted by everybody
├── OutOfBlocks           the KV pool cannot hold the request
├── HandshakeMismatch     producer and consumer disagree on a field
├── TransferError         bytes did not arrive
├── KVMismatch            bytes arrived and are wrong
├── NotFiniteError        a request's logits or KV are NaN or infinite
├── EngineDied            a rank of the engine is gone or failed
├── CommError             a collective failed or a peer is gone
├── Overloaded            a server has no room for another request
├── ServerEnded           a server ended before the request did
├── InternalError         a bug of rayk: nothing that trying again would mend
└── DeadlineExceeded      a wait ran past its deadline
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_CHARACTERS = 3000  # per part of a message


@dataclass
class RaykError(Exception):
    """Base of every error rayk raises on purpose."""

    def __str__(self) -> str:
        return type(self).__name__

    def __reduce__(self) -> tuple[object, ...]:
        # Exception.__reduce__ would call the class with `args`, which a dataclass __init__ never sets.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[RaykError], fields: dict[str, object]) -> RaykError:
    error = cls.__new__(cls)
    error.__dict__.update(fields)
    return error


def shortened(text: str, num_characters: int = MAX_CHARACTERS) -> str:
    """Return the text, without its middle if that is long: somebody's input may be quoted in it."""
    left_out = len(text) - num_characters
    if left_out <= 0:
        return text
    half = num_characters // 2
    return f"{text[:half]} [{left_out:,} characters] {text[-half:]}"


@dataclass
class UserError(RaykError):
    """Bad input. `where` names the file, line or option; `mend` says what would work."""

    problem: str
    where: str = ""
    mend: str = ""

    def __str__(self) -> str:
        where, problem, mend = map(shortened, (self.where, self.problem, self.mend))
        text = f"{where}: {problem}" if where else problem
        return f"{text}\n  mend: {mend}" if mend else text


@dataclass
class SpecError(UserError):
    """The experiment spec is wrong."""


@dataclass
class CheckpointError(UserError):
    """The checkpoint folder is missing, unreadable or incomplete."""


@dataclass
class UnsupportedArchitecture(UserError):
    """The checkpoint's architecture, or a setting of it, is not implemented."""

    architecture: str = ""
    supported: tuple[str, ...] = ()


@dataclass
class DeviceError(UserError):
    """The machine or the cluster does not have what was asked for."""


@dataclass
class DiskUnavailable(UserError):
    """A folder for pages cannot be used as its disk is now: full, read-only, failing, or not this user's."""


@dataclass
class OutsideHull(UserError):
    """A step, or an engine, is unlike those that the cost tables were fitted to."""


@dataclass
class UnknownEngine(UserError):
    """A server has no engine of that name."""


@dataclass
class RoleConflict(UserError):
    """An engine of a server cannot take a role, as things are."""


@dataclass
class Unsupported(RaykError):
    """The model itself cannot run this way, e.g. a TP size that does not divide its heads."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass
class LayoutVetoed(RaykError):
    """Every candidate layout has a veto. `vetoes` holds (layout, who, reason) rows."""

    vetoes: tuple[tuple[str, str, str], ...]
    requested: str = ""  # the one layout asked for; the user vetoes the others, which the message leaves out
    engine: str = ""  # whose layout, for the message

    def __str__(self) -> str:
        prefix = f"{self.engine}: " if self.engine else ""
        own = [(who, why) for layout, who, why in self.vetoes if layout == self.requested]
        if not own:
            rows = "\n".join(f"  {layout}: {who}: {why}" for layout, who, why in self.vetoes)
            return f"{prefix}no KV-cache layout is left; vetoes:\n{rows}"
        # The groups' own veto is a sentence that names the layout.
        texts = [why if who == "specs" else f"layout {self.requested}: {who}: {why}" for who, why in own]
        return prefix + "; ".join([*texts, *self._mend()])

    def _mend(self) -> list[str]:
        others = dict.fromkeys(layout for layout, _, _ in self.vetoes if layout != self.requested)
        refused = {layout for layout, who, _ in self.vetoes if who != "user"}
        left = [layout for layout in others if layout not in refused]
        names = ", ".join(left)
        mend = f"any other layout ({names})" if len(left) == len(others) else f"one of {names}"
        return [f"mend: {mend}"] if left else []


@dataclass
class OutOfBlocks(RaykError):
    needed_blocks: int
    free_blocks: int

    def __str__(self) -> str:
        return f"{self.needed_blocks} blocks needed, {self.free_blocks} free"


@dataclass
class HandshakeMismatch(RaykError):
    """Producer and consumer would read the same bytes differently."""

    # (field, producer's value, consumer's value) of every field that differs
    fields: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        rows = "; ".join(f"{name}: producer {a}, consumer {b}" for name, a, b in self.fields)
        return f"handshake refused: {rows}"


@dataclass
class TransferError(RaykError):
    """A transfer failed or ran out of time."""

    request_id: str
    reason: str
    producer: str = ""
    consumer: str = ""

    def __str__(self) -> str:
        route = f" from {self.producer}" if self.producer else ""
        route += f" to {self.consumer}" if self.consumer else ""
        request = f" of {self.request_id}" if self.request_id else ""
        return f"transfer{request}{route}: {self.reason}"


@dataclass
class KVMismatch(RaykError):
    """D's KV differs from P's. The coordinate is the first wrong one in canonical order."""

    request_id: str
    layer: int
    group: int
    field: str
    head: int
    token: int
    classification: str
    num_bytes_checked: int = 0
    num_bytes_mismatched: int = 0
    unit_name: str = "head"  # names the unit `head` in the message
    found_rows: tuple[bytes, ...] = ()
    """A few rows from `token` on as found, if nothing here explains them: the producer may know whose they
    are."""
    is_tail: bool = False  # all rows of the sequence from `token` on are wrong, and none before
    draft_layer: int | None = None  # which of a drafter's layers `layer` is; None of the model's own

    def __str__(self) -> str:
        layer = f"layer {self.layer}" if self.draft_layer is None else f"draft layer {self.draft_layer}"
        return (
            f"KV of {self.request_id} differs: {layer}, group {self.group}, "
            f"{self.field}, {self.unit_name} {self.head}, token {self.token}: {self.classification}"
        )


@dataclass
class NotFiniteError(RaykError):
    """Something computed for a request is NaN or infinite: no token of it means anything."""

    request_id: str
    what: str  # the logits of a token, or KV
    engine: str = ""
    kv: str = ""  # where its KV is so first, by layer, then token; empty: nowhere, or nobody looked
    # weights that are not finite themselves; None: not all were looked at
    weights: tuple[str, ...] | None = None

    def __str__(self) -> str:
        engine = f" on {self.engine}" if self.engine else ""
        text = f"request {self.request_id}{engine}: {self.what} not finite (NaN or infinite)"
        if self.kv:
            text += f"; KV is so first at {self.kv}"
        if self.weights:
            more = f" and {len(self.weights) - 1} more" if len(self.weights) > 1 else ""
            text += f"; so are weights: {self.weights[0]}{more}"
        elif self.weights is not None:
            text += "; all weights are finite: it was computed"
        return text


@dataclass
class EngineDied(RaykError):
    """An engine lost a rank, or its machine failed it. A bug in its loop is an InternalError."""

    engine: str
    cause: str
    rank: int | None = None

    def __str__(self) -> str:
        who = self.engine if self.rank is None else f"{self.engine} rank {self.rank}"
        return f"engine {who} died: {self.cause}"


@dataclass
class CommError(RaykError):
    """A collective among tensor-parallel ranks failed."""

    operation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.reason}"


@dataclass
class Overloaded(RaykError):
    """A server's queue is full, or it is about to end. Nothing was started."""

    reason: str
    retry_after_s: float  # when it may be worth trying again

    def __str__(self) -> str:
        return f"{self.reason}; try again in {self.retry_after_s:.0f} s"


@dataclass
class ServerEnded(RaykError):
    """A server that was told to end did so before the request was over."""

    def __str__(self) -> str:
        return "the server has ended"


@dataclass
class InternalError(RaykError):
    """A bug: an error that nobody raised on purpose."""

    where: str
    cause: str
    trace: str = field(default="", repr=False)  # its traceback

    def __str__(self) -> str:
        return f"a bug in {self.where}: {self.cause}"


@dataclass
class DeadlineExceeded(RaykError):
    """Something took longer than its deadline allows."""

    what: str
    deadline_s: float
    detail: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        extra = "".join(f", {k}={v}" for k, v in self.detail.items())
        return f"{self.what} exceeded its deadline of {self.deadline_s:g} s{extra}"
