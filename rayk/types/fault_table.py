"""Say what must come out of a cell with one fault: kind x point x mode x policy -> verdict. Pure.

The simulator is checked against this table, and so are real cells: it is what `expected_verdict` of a spec's
faults says. One fault strikes once. `kill`, `stop` and `restart` strike a whole rank, and its engine with it:
a stopped rank is found out by its silence and its engine is ended; a restarted one is formed again and takes
requests. Everything else strikes one message, read or write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

FailurePolicy = Literal["fail", "recompute", "migrate"]
FAILURE_POLICIES: tuple[FailurePolicy, ...] = ("fail", "recompute", "migrate")
MODES = ("pull", "push")
MESSAGE_KINDS = ("drop", "delay", "reorder", "duplicate", "corrupt")
RANK_KINDS = ("kill", "stop", "restart")
KINDS = (*MESSAGE_KINDS, *RANK_KINDS)
ROLES = ("prefill", "decode")

# point -> what happens there (pull, push)
POINTS: dict[str, tuple[str, str]] = {
    "handshake": ("engines describe their caches to each other, before any request", "the same"),
    "reserve": (
        "the ticket comes to the decode engine, which takes blocks for it",
        "the decode engine takes blocks; its reservation comes to the prefill engine",
    ),
    "post": ("a read is posted by the decode engine", "a write is posted by the prefill engine"),
    "mid_transfer": ("bytes of a read are under way", "bytes of a write are under way"),
    "notify": (
        "the decode engine reads the generations of the blocks it has read",
        "the prefill engine tells that everything has arrived",
    ),
    "free": ("the decode engine tells that the blocks are needed no longer", "the same"),
    "lease_renewal": ("the decode engine renews the lease of blocks it still needs", "the same"),
}
# points of wrong_kv in a recurrent layer
STATE_POINTS = ("swap_taps", "shift_taps", "state_dtype", "stale_state")
# points of wrong_drafts
DRAFT_POINTS = ("not_moved", "shifted", "wrong_layer")


class FaultLike(Protocol):
    """Has what the table looks at in a fault."""

    @property
    def kind(self) -> str: ...

    @property
    def point(self) -> str | None: ...

    @property
    def role(self) -> str | None:
        """Prefill or decode, of a fault that strikes a rank; None: prefill."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    point: str | None
    role: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} at {self.point}" + (f" of {self.role}" if self.role else "")


@dataclass(frozen=True, slots=True)
class ExpectedOutcome:
    verdict: str
    # the request would have failed, and the policy saved it; None: depends on what had arrived
    is_recovered: bool | None = False

    def __str__(self) -> str:
        note = {True: ", recovered", False: "", None: ", recovered if need be"}[self.is_recovered]
        return self.verdict + note


def all_faults() -> Iterator[Fault]:
    for point in POINTS:
        for kind in KINDS:
            for role in ROLES if kind in RANK_KINDS else (None,):
                yield Fault(kind, point, role)


def expected_verdict(fault: FaultLike, mode: str, policy: str, num_producers: int = 2) -> str:
    return expected(fault, mode, policy, num_producers).verdict


def expected(fault: FaultLike, mode: str, policy: str, num_producers: int = 2) -> ExpectedOutcome:
    """Look up the outcome. `num_producers`: prefill engines of the cell; a request migrates to the same one
    where it is the only one and lives. KeyError for faults that the table does not know."""
    assert mode in MODES, mode
    assert policy in FAILURE_POLICIES, policy
    verdict, is_final = _plainly(fault, mode)
    if verdict == "PASS" or policy == "fail" or is_final:
        return ExpectedOutcome(verdict)
    dead_for_good = verdict == "ENGINE_ERROR" and fault.kind != "restart"
    if dead_for_good and policy == "migrate" and num_producers == 1:
        return ExpectedOutcome(verdict)
    return ExpectedOutcome("PASS", is_recovered=_needs_recovery(fault, mode))


def _needs_recovery(fault: FaultLike, mode: str) -> bool | None:
    """Tell whether the request that a fault strikes cannot go on as it is."""
    if fault.kind not in RANK_KINDS or fault.role == "decode":
        return True
    if fault.kind == "stop" and mode == "pull":
        return None  # a decode engine reads from a stopped one what the network gives
    if fault.point in ("free", "lease_renewal") or (fault.point == "notify" and mode == "pull"):
        return None  # some ranks, or requests, have what they need
    return True


def _plainly(fault: FaultLike, mode: str) -> tuple[str, bool]:
    """Give the verdict without any recovery, and whether no policy changes it."""
    kind, point, role = fault.kind, fault.point, fault.role or "prefill"
    if kind in OTHERS:
        return OTHERS[kind]
    assert point in POINTS or point in REQUEST_POINTS, f"{kind} at {point}"
    if kind in ("kill", "kill_node", "stop"):
        # Without the decode engine nobody goes on; without a handshake nobody begins.
        return "ENGINE_ERROR", point == "handshake" or role == "decode" or point == "decode"
    if kind == "restart":
        # The new life shakes hands again; no request was lost.
        return ("PASS" if point == "handshake" else "ENGINE_ERROR"), False
    if kind == "drop":
        # A handshake is tried again; a lease ends by itself; two renewals out of three are spare.
        survives = point in ("handshake", "free", "lease_renewal")
        return ("PASS" if survives else "TRANSFER_ERROR"), False
    if kind == "corrupt":
        return CORRUPT[point or ""]
    assert kind in ("delay", "reorder", "duplicate"), kind
    return "PASS", False


# point -> (verdict without recovery, whether no policy changes it)
CORRUPT: dict[str, tuple[str, bool]] = {
    "handshake": ("TRANSFER_ERROR", True),  # refused field by field, and would be again
    "reserve": ("TRANSFER_ERROR", False),  # sealed: a ticket or reservation that was changed is not used
    "post": ("KV_MISMATCH", False),  # other blocks' bytes
    "mid_transfer": ("KV_MISMATCH", False),
    "notify": ("TRANSFER_ERROR", False),  # a generation that does not fit; an arrival that nobody can read
    "free": ("PASS", False),  # not understood: the lease ends by itself
    "lease_renewal": ("PASS", False),  # not understood: the next one counts
}

# faults that name no point of a transfer's life, as above
OTHERS: dict[str, tuple[str, bool]] = {
    "flip_bit": ("KV_MISMATCH", False),
    "early_reuse": ("TRANSFER_ERROR", False),
    "wrong_kv": ("KV_MISMATCH", True),  # wrong from the start: it arrives as it was sent
    "wrong_drafts": ("DRAFT_MISMATCH", True),  # tokens are verified by the model: they stay right
}

# points at which ranks can be killed, beside those of a transfer
REQUEST_POINTS = ("prefill", "transfer", "decode")


def table_text() -> str:
    """Write the table as Markdown: a row per kind and outcome, a column per mode and policy."""
    columns = [(mode, policy) for mode in MODES for policy in FAILURE_POLICIES]
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for fault in all_faults():
        name = fault.kind + (f" ({fault.role})" if fault.role else "")
        outcomes = tuple(str(expected(fault, mode, policy)) for mode, policy in columns)
        rows.setdefault((name, outcomes), []).append(str(fault.point))
    lines = [
        "| fault | at | " + " | ".join(f"{mode}, {policy}" for mode, policy in columns) + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for (name, outcomes), points in sorted(rows.items(), key=lambda row: _order(row[0][0])):
        where = "any point" if len(points) == len(POINTS) else ", ".join(points)
        lines.append(f"| {name} | {where} | " + " | ".join(outcomes) + " |")
    return "\n".join(lines)


def _order(name: str) -> tuple[int, str]:
    return KINDS.index(name.split(" ")[0]), name
